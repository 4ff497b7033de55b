"""A whole run on a tiny target: it learns, resumes, and exports what serving loads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.train_runs import config, write_rows
from vllm_eagle3.head_io import read_head
from vllm_eagle3.train.train_command import run_train
from vllm_eagle3.train.trainer import Trainer

Models = Callable[[str], Path]


@pytest.fixture(scope="module")
def rows(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rows(models, tmp_path_factory.mktemp("rows") / "rows.jsonl")


def test_run_learns_and_exports_a_head_that_fits(
    models: Models, rows: Path, tmp_path: Path
) -> None:
    lengths: list[float] = []

    def keep(record: dict[str, Any]) -> None:
        if record["event"] == "eval":
            lengths.append(record["acceptance_length"])

    predicted = Trainer(config(models, rows, tmp_path, epochs=20.0), keep).train()
    # The held-out rows repeat texts of the training rows, so they can be learnt.
    assert lengths[0] < 1.5 < 2.0 < predicted.acceptance_length
    loaded = read_head(tmp_path / "head", models("f1"))
    assert loaded.config.tap_ids == (1, 3, 5) and len(loaded.vocab) == 256


def test_stopped_run_resumes_to_the_same_weights(
    models: Models, rows: Path, tmp_path: Path
) -> None:
    whole = Trainer(config(models, rows, tmp_path / "a"), lambda _: None)
    whole.train()
    first = Trainer(config(models, rows, tmp_path / "b"), stop_after(9))
    with pytest.raises(KeyboardInterrupt):
        first.train()
    second = Trainer(config(models, rows, tmp_path / "b"), lambda _: None)
    second.train()
    assert second.step == whole.step > 12
    for ours, theirs in zip(
        second.head.parameters(), whole.head.parameters(), strict=True
    ):
        assert torch.equal(ours, theirs)


def stop_after(step: int) -> Callable[[dict[str, Any]], None]:
    def report(record: dict[str, Any]) -> None:
        if record["event"] == "eval" and record["step"] >= step:
            raise KeyboardInterrupt

    return report


def test_checkpoint_of_another_configuration_is_refused(
    models: Models, rows: Path, tmp_path: Path
) -> None:
    with pytest.raises(KeyboardInterrupt):
        Trainer(config(models, rows, tmp_path), stop_after(12)).train()
    other = Trainer(config(models, rows, tmp_path, learning_rate=1e-3), lambda _: None)
    with pytest.raises(ValueError, match=r"learning_rate was 0\.003, is 0\.001"):
        other.train()


def test_unknown_key_in_the_file_is_named_with_the_known_ones(tmp_path: Path) -> None:
    from rich.console import Console

    file = tmp_path / "run.yaml"
    file.write_text("target: x\nrows: [a]\nout: o\nlearning_rat: 1\n")
    with pytest.raises(ValueError, match="learning_rat: unknown key") as caught:
        run_train(file, Console())
    assert "learning_rate" in str(caught.value)
