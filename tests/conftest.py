"""Fixtures shared by all tests: small models built once, and one engine at a time."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

# Before anything imports vLLM or transformers.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
# Tiny models are quickest on one thread, and other work may share the machine.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest

from tests.engine_run import Run, llm_settings, run
from tests.models import builders
from tests.models.head_fixtures import save_head, small_target  # noqa: F401


@pytest.fixture(scope="session")
def models(pytestconfig: pytest.Config) -> Callable[[str], Path]:
    """models("f1") -> folder of that fixture, kept between sessions."""
    root = Path(pytestconfig.cache.mkdir("models")) / builders.digest()
    return lambda name: builders.build(root, name)


class EngineHandle:
    """One engine of the pool: `run(prompts, params)`, and vLLM's own object as `llm`.

    `params` is one SamplingParams for all prompts or one for each.
    """

    def __init__(self, llm: Any) -> None:
        self.llm = llm

    def run(self, prompts: Sequence[Sequence[int]], params: Any) -> Run:
        return run(self.llm, prompts, params)


class EnginePool:
    """At most one in-process engine, kept as long as the settings stay the same."""

    def __init__(self, models: Callable[[str], Path]) -> None:
        self._models = models
        self._key = ""
        self._handle: EngineHandle | None = None

    def __call__(
        self, target: str, head: str | None = None, **settings: Any
    ) -> EngineHandle:
        """Engine for a fixture target and head.

        Args:
            target, head: fixture names; no head means no speculation.
            settings: `num_speculative_tokens`, `draft_sample_method` and any argument
                of vllm.LLM.
        """
        key = repr((target, head, sorted(settings.items())))
        if self._handle is None or key != self._key:
            self.close()
            paths = (str(self._models(n)) if n else None for n in (target, head))
            from vllm import LLM

            self._handle = EngineHandle(LLM(**llm_settings(*paths, **settings)))
            self._key = key
        return self._handle

    def close(self) -> None:
        if self._handle is None:
            return
        from vllm.distributed import cleanup_dist_env_and_memory

        self._handle.llm.llm_engine.engine_core.shutdown()
        self._handle = None
        gc.collect()
        cleanup_dist_env_and_memory()


@pytest.fixture(scope="session")
def engine(models: Callable[[str], Path]) -> Iterator[EnginePool]:
    """engine("f1", "h1", num_speculative_tokens=3) -> EngineHandle."""
    pytest.importorskip("vllm")
    pool = EnginePool(models)
    yield pool
    pool.close()
