"""Fixtures of the head tests: a small target, and heads written for it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.models.head_variants import (
    TARGET_CONFIG,
    VARIANTS,
    make_head,
    write_small_target,
)
from vllm_eagle3.head_io import write_head

SaveHead = Callable[..., Path]


@pytest.fixture(scope="module")
def small_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_small_target(tmp_path_factory.mktemp("target"))


@pytest.fixture
def save_head(tmp_path: Path) -> SaveHead:
    """A function that writes a variant's head and returns its folder."""

    def save(variant: str = "plain", layout: str = "safeailab") -> Path:
        head, vocab = make_head(**VARIANTS[variant])
        write_head(tmp_path / "head", head, vocab, layout, TARGET_CONFIG)
        return tmp_path / "head"

    return save
