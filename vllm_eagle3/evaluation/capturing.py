"""States from an engine in a process of its own: trainings with `features: vllm`."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from ..bench.methods import parse_method
from ..bench.process import WorkerProcess
from ..engine import EngineSpec
from .scoring import environ_of_no_rank


@contextmanager
def capturing(engine: str) -> Iterator[Callable[[EngineSpec], WorkerProcess]]:
    """Start engines when asked; they end with the context.

    Args:
        engine: `module:class`, see `bench.worker`.
    """
    with ExitStack() as stack:

        def start(spec: EngineSpec) -> WorkerProcess:
            folder = tempfile.TemporaryDirectory(prefix="vllm-eagle3-features-")
            log = Path(stack.enter_context(folder)) / "log"
            environ = environ_of_no_rank(parse_method("ours:chain:1"), spec.mode)
            worker = WorkerProcess("engine for features", engine, environ, log)
            stack.enter_context(worker)
            worker.request_start(spec)
            worker.wait_started()
            return worker

        yield start
