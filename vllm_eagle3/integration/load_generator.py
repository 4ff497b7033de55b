"""vLLM's own load generator (`vllm bench serve`), called in this process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm.benchmarks import serve
from vllm.utils.argparse_utils import FlexibleArgumentParser


def bench_serve(arguments: Sequence[str]) -> dict[str, Any]:
    """`vllm bench serve ARGUMENTS`; returns the content of its result file.

    Raises:
        ValueError: what the load generator refuses, or a server that does not answer.
    """
    parser = FlexibleArgumentParser()
    serve.add_cli_args(parser)
    return serve.main(parser.parse_args(list(arguments)))
