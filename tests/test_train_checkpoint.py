"""Checkpoints: whole or absent, also on a full disk."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from vllm_eagle3.train import checkpoint


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """Writing past `size` fails in the middle, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def state(step: int) -> dict:
    return {"step": step, "head": {"w": torch.full((50_000,), float(step))}}


def test_comes_back_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.pt"
    assert checkpoint.load(path) is None
    checkpoint.save(path, state(1))
    checkpoint.save(path, state(2))
    loaded = checkpoint.load(path)
    assert loaded is not None and loaded["step"] == 2
    assert torch.equal(loaded["head"]["w"], state(2)["head"]["w"])
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint.pt"]


@pytest.mark.parametrize("has_one", [True, False])
def test_full_disk_keeps_the_last_good_one_and_says_so(
    tmp_path: Path, has_one: bool
) -> None:
    path = tmp_path / "checkpoint.pt"
    if has_one:
        checkpoint.save(path, state(1))
    words = "last good one is" if has_one else "there is none yet"
    with (
        files_of_at_most(100_000),
        pytest.raises(ValueError, match=f"checkpoint of step 2 .* {words}"),
    ):
        checkpoint.save(path, state(2))
    loaded = checkpoint.load(path)
    assert (loaded["step"] == 1) if loaded is not None else not has_one
    assert not path.with_suffix(".partial").exists()


def test_another_run_is_named_field_by_field(tmp_path: Path) -> None:
    theirs = {"identity": {"seed": 0, "epochs": 2.0}}
    with pytest.raises(ValueError, match="seed was 0, is 1") as caught:
        checkpoint.require_same(tmp_path, theirs, {"seed": 1, "epochs": 2.0})
    assert "epochs" not in str(caught.value)
