"""Log-probabilities from an engine in a process of its own, for the trainer's gate.

Not in the trainer's process: that one may be a rank of several, holds a target, and
must not be forked.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from ..bench.launch import worker_environ
from ..bench.methods import Method, parse_method
from ..bench.process import WorkerProcess
from ..engine import EngineMode, EngineSpec

# What torchrun tells a rank; the engine is none.
_OF_A_RANK = frozenset(
    {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR"}
    | {"MASTER_PORT", "GROUP_RANK", "ROLE_RANK"}
)


def scorer(
    engine: str,
) -> Callable[[EngineSpec, Sequence[Sequence[int]]], list[list[float]]]:
    """`Engine.score` of an engine that is started for it and ended afterwards.

    Args:
        engine: `module:class`, see `bench.worker`.
    """

    def score(spec: EngineSpec, prompts: Sequence[Sequence[int]]) -> list[list[float]]:
        environ = environ_of_no_rank(parse_method("off"), spec.mode)
        with (
            tempfile.TemporaryDirectory(prefix="vllm-eagle3-parity-") as folder,
            WorkerProcess("engine", engine, environ, Path(folder) / "log") as worker,
        ):
            worker.request_start(spec)
            worker.wait_started()
            return worker.score(prompts)

    return score


def environ_of_no_rank(method: Method, mode: EngineMode) -> dict[str, str]:
    """The environment of a process beside the trainer's, which may be a rank."""
    base = {k: v for k, v in os.environ.items() if k not in _OF_A_RANK}
    return worker_environ(method, mode, base)
