"""Fixtures shared by all tests: small models built once, and one engine at a time."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path

# Before anything imports vLLM or transformers.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
# Tiny models are quickest on one thread, and other work may share the machine.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest

from tests.engine_run import EnginePool
from tests.models import builders
from tests.models.head_fixtures import save_head, small_target  # noqa: F401


@pytest.fixture(scope="session")
def models(pytestconfig: pytest.Config) -> Callable[[str], Path]:
    """models("f1") -> folder of that fixture, kept between sessions."""
    root = Path(pytestconfig.cache.mkdir("models")) / builders.digest()
    return lambda name: builders.build(root, name)


@pytest.fixture(scope="session")
def engine(models: Callable[[str], Path]) -> Iterator[EnginePool]:
    """engine("f1", "h1", num_speculative_tokens=3) -> EngineHandle."""
    pytest.importorskip("vllm")
    pool = EnginePool(models)
    yield pool
    pool.close()


@pytest.fixture
def warnings() -> Iterator[list[str]]:
    """What the package warns of."""
    messages: list[str] = []

    def keep(record: logging.LogRecord) -> bool:
        if record.levelno >= logging.WARNING:
            messages.append(record.getMessage())
        return True

    # A filter, because vLLM sets up logging with every engine and drops handlers.
    logger = logging.getLogger("vllm.vllm_eagle3")
    logger.addFilter(keep)
    yield messages
    logger.removeFilter(keep)
