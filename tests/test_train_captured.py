"""Features that an engine computed: the same states, the same training."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import save_file

from tests.train_runs import config, values, write_rows
from vllm_eagle3.engine import ENGINE
from vllm_eagle3.evaluation.capturing import capturing
from vllm_eagle3.train.captured import CapturedFeatures
from vllm_eagle3.train.data import Row, collate, read_rows
from vllm_eagle3.train.features import TargetFeatures
from vllm_eagle3.train.train_command import run_train
from vllm_eagle3.train.trainer import Trainer
from vllm_eagle3.vocab import DraftVocab

Models = Callable[[str], Path]
TAPS = (1, 3, 5)


class ByTransformers:
    """Answers as an engine does, with a plain forward of each prompt alone."""

    def __init__(self, target: TargetFeatures) -> None:
        self.target = target
        self.lengths: list[int] = []

    def capture(self, prompts: Sequence[Sequence[int]], path: Path) -> None:
        tensors = {}
        for number, ids in enumerate(prompts):
            self.lengths.append(len(ids))
            batch = collate([Row("x", tuple(ids), ())])
            taps, last = self.target.states(batch)
            tensors |= {f"{number}.taps": taps[0], f"{number}.last": last[0]}
        save_file({name: t.clone() for name, t in tensors.items()}, path)


def _reading(models: Models) -> tuple[Any, ...]:
    vocab = DraftVocab(torch.arange(0, 512, 2), 512)
    return models("f1"), TAPS, vocab, torch.float32


@pytest.fixture(scope="module")
def rows(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rows(models, tmp_path_factory.mktemp("rows") / "rows.jsonl")


def test_rows_of_unlike_lengths_find_their_states(models: Models, rows: Path) -> None:
    plain = TargetFeatures(*_reading(models))
    engine = ByTransformers(plain)
    captured = CapturedFeatures(engine, *_reading(models))
    long, short = read_rows([rows])[:2]
    short = Row("x", short.ids[:9], ((5, 9, 0.0),))
    batch = collate([short, long])
    found, wanted = captured.read(batch), plain.read(batch)
    # The last token of a row is not asked for: nothing is learnt from it.
    assert engine.lengths == [len(short.ids) - 1, len(long.ids) - 1]
    for row, length in enumerate(engine.lengths):
        one, other = (r.taps[row, :length] for r in (found, wanted))
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)
    for name in ("last", "mass"):
        one, other = getattr(found, name), getattr(wanted, name)
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)
    assert torch.equal(found.best, wanted.best)


def test_nobody_to_start_an_engine_is_said(
    models: Models, rows: Path, tmp_path: Path
) -> None:
    asked = config(models, rows, tmp_path, features="vllm")
    with pytest.raises(ValueError, match="features: got vllm where no engine"):
        Trainer(asked, lambda _: None)


@pytest.mark.engine
def test_a_head_learns_from_an_engine_as_from_transformers(
    models: Models, rows: Path, tmp_path: Path
) -> None:
    pytest.importorskip("vllm")
    ends = {}
    for features in ("transformers", "vllm"):
        out = tmp_path / features
        run = tmp_path / f"{features}.yaml"
        asked = values(models, rows, out, features=features, precision="fp32")
        run.write_text(json.dumps(asked))
        with capturing(ENGINE) as start_capture:
            run_train(run, Console(quiet=True), start_capture=start_capture)
        log = [json.loads(line) for line in (out / "log.jsonl").open()]
        ends[features] = next(r for r in reversed(log) if r["event"] == "eval")
    one, other = ends["transformers"], ends["vllm"]
    assert one["step"] == other["step"] > 5
    assert other["acceptance_length"] > 1.2
    assert other["acceptance_length"] == pytest.approx(
        one["acceptance_length"], rel=0.05
    )
