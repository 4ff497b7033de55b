"""What a run begins with: heads of every kind, and data or heads that do not fit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.train_runs import config, write_rows
from vllm_eagle3.head_io import read_head, require_fitting_head
from vllm_eagle3.train.evaluate import predict_acceptance
from vllm_eagle3.train.plan import make_plan, show_plan
from vllm_eagle3.train.start import read_run_data, read_target_config
from vllm_eagle3.train.trainer import Trainer

Models = Callable[[str], Path]
BRIEF = {"epochs": 2.0, "evaluate_every": 100}


@pytest.fixture(scope="module")
def rows(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rows(models, tmp_path_factory.mktemp("rows") / "rows.jsonl")


@pytest.mark.parametrize(
    ("changes", "tap_ids"),
    [
        ({"taps": "top", "loss": {"kind": "lk_hybrid"}}, (6,)),
        ({"taps": "none", "loss": {"preset": "reference"}}, (0,)),
        (
            {"fc_norm": True, "norm_output": True, "loss": {"feature_weight": 1.0}},
            (1, 3, 5),
        ),
        ({"taps": "fused", "hidden_size": 64}, (1, 3, 6)),
    ],
    ids=["top, LK", "none, reference", "3.1, feature loss", "own width"],
)
def test_every_kind_of_head_learns_and_fits_its_target(
    models: Models,
    rows: Path,
    tmp_path: Path,
    changes: dict[str, Any],
    tap_ids: tuple[int, ...],
) -> None:
    records: list[dict[str, Any]] = []
    run = config(models, rows, tmp_path, **BRIEF | {"epochs": 8.0} | changes)
    trainer = Trainer(run, records.append)
    trainer.train()
    losses = [r["loss"] for r in records if r["event"] == "step"]
    assert len(losses) >= 2 and losses[-1] < losses[0]
    require_fitting_head(tmp_path / "head", models("f1"))
    loaded = read_head(tmp_path / "head", models("f1"), torch.float32)
    assert loaded.config.tap_ids == tap_ids
    assert loaded.config.fc_norm == run.fc_norm
    # What is on disk is what was judged, up to rounding to bfloat16.
    found = predict_acceptance(
        loaded.head,
        trainer.begun.features,
        loaded.vocab,
        trainer.data.held_out,
        run.draft_tokens,
        512,
    )
    assert trainer.best is not None
    expected = trainer.best.acceptance_length
    assert found.acceptance_length == pytest.approx(expected, rel=0.1)


def test_head_of_its_own_width_brings_its_embedding(
    models: Models, rows: Path, tmp_path: Path
) -> None:
    trainer = Trainer(
        config(models, rows, tmp_path, **BRIEF, hidden_size=64), lambda _: None
    )
    trainer.train()
    loaded = read_head(tmp_path / "head", models("f1"))
    assert (loaded.config.hidden_size, loaded.config.target_hidden_size) == (64, 128)
    assert loaded.embed_tokens is not None
    assert trainer.begun.embedding is not None
    assert torch.equal(loaded.embed_tokens, trainer.begun.embedding)
    # The directions kept are orthogonal, and carry more than their share.
    full = trainer.begun.target.embedding.float()
    assert loaded.embed_tokens.float().norm() > (64 / 128) ** 0.5 * full.norm()


def test_widths_that_no_head_can_have_are_refused(
    models: Models, rows: Path, tmp_path: Path
) -> None:
    for changes, words in (
        ({"hidden_size": 65}, "hidden_size: got 65, want a multiple of 32"),
        ({"hidden_size": 256}, "at most 128"),
        (
            {"hidden_size": 64, "loss": {"feature_weight": 1}},
            "needs the target",
        ),
    ):
        with pytest.raises(ValueError, match=words):
            Trainer(config(models, rows, tmp_path, **changes), lambda _: None)


def test_rows_of_another_tokenizer_are_refused(models: Models, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    good = {"kind": "x", "ids": [5, 6, 7, 8], "spans": [[1, 4, 0.0]]}
    bad = good | {"ids": [5, 6, 49_000, 8]}
    path.write_text(json.dumps(good) + "\n" + json.dumps(bad) + "\n")
    with pytest.raises(ValueError, match=r"rows\.jsonl:2: id 49000, .* has 512"):
        Trainer(config(models, path, tmp_path / "out"), lambda _: None)


def test_held_out_files_are_judged_by_and_not_trained_on(
    models: Models, rows: Path, tmp_path: Path
) -> None:
    lines = rows.read_text().splitlines()
    judges = tmp_path / "judges.jsonl"
    judges.write_text("\n".join(lines[:2]) + "\n")
    asked = config(models, rows, tmp_path / "out", held_out=[str(judges)])
    data = read_run_data(asked, read_target_config(asked))
    judged = {tuple(json.loads(line)["ids"]) for line in lines[:2]}
    assert {row.ids for row in data.held_out} == judged
    assert data.train and not judged & {row.ids for row in data.train}
    assert data.skipped["held out"] == len(lines) - len(data.train) >= 2
    with pytest.raises(ValueError, match=r"held_out: all \d+ rows of .* are held out"):
        everything = config(models, rows, tmp_path / "out", held_out=[str(rows)])
        read_run_data(everything, read_target_config(everything))


def test_warm_start_from_a_head_of_another_target_is_refused(
    models: Models, rows: Path, tmp_path: Path
) -> None:
    """H2 belongs to F2, whose vocabulary has 128 ids."""
    run = config(models, rows, tmp_path, warm_start=str(models("h2")))
    with pytest.raises(ValueError, match="vocab_size: the head says 128"):
        Trainer(run, lambda _: None)


def test_warm_start_keeps_weights_vocabulary_and_switches(
    models: Models, rows: Path, tmp_path: Path
) -> None:
    first = config(models, rows, tmp_path / "first", **BRIEF)
    Trainer(first, lambda _: None).train()
    head = str(tmp_path / "first/head")
    again = Trainer(
        config(models, rows, tmp_path / "second", **BRIEF, warm_start=head),
        lambda _: None,
    )
    loaded = read_head(head, models("f1"), torch.float32)
    assert torch.equal(again.head.fc.weight, loaded.head.fc.weight)
    assert torch.equal(again.vocab.to_target_ids, loaded.vocab.to_target_ids)
    for changes, words in (
        ({"taps": "top"}, r"taps: got \(6,\)"),
        ({"draft_vocab_size": 128}, "draft_vocab_size: got 128"),
        ({"fc_norm": True}, "fc_norm: got True"),
    ):
        run = config(models, rows, tmp_path / "x", warm_start=head, **changes)
        with pytest.raises(ValueError, match=words):
            Trainer(run, lambda _: None)


def test_loss_that_is_not_a_number_names_the_batch_and_keeps_the_checkpoint(
    models: Models, rows: Path, tmp_path: Path
) -> None:
    run = config(models, rows, tmp_path, epochs=4.0, evaluate_every=3)

    def spoil(record: dict[str, Any]) -> None:
        if record["event"] == "eval":
            with torch.no_grad():
                trainer.head.fc.weight[0, 0] = float("nan")

    trainer = Trainer(run, spoil)
    with pytest.raises(ValueError, match=r"loss is nan at step 3") as caught:
        trainer.train()
    message = str(caught.value)
    assert f"{rows}:" in message and f"{tmp_path}/checkpoint.pt" in message
    state = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    assert state["step"] == 3


def test_gate_is_asked_once_before_the_first_step(
    models: Models, rows: Path, tmp_path: Path
) -> None:
    asked: list[int] = []

    def refuse(_: object, sample: Any) -> None:
        asked.append(len(sample))
        raise ValueError("the captured states do not give the target's logits")

    run = config(models, rows, tmp_path, parity_rows=8, **BRIEF)
    trainer = Trainer(run, lambda _: None, refuse)
    with pytest.raises(ValueError, match="captured states"):
        trainer.train()
    assert asked == [3] and trainer.step == 0


def test_plan_counts_what_the_run_will_do(
    models: Models, rows: Path, tmp_path: Path
) -> None:
    from rich.console import Console

    run = config(models, rows, tmp_path, **BRIEF)
    plan = make_plan(run)
    trainer = Trainer(run, lambda _: None)
    assert plan.data.train == trainer.data.train
    assert plan.parameters == sum(p.numel() for p in trainer.head.parameters())
    # 24 reply tokens a row: 23 first drafts, 22 second and 21 third ones.
    assert plan.positions == 15 * (23 + 22 + 21)
    sizes = dict(plan.curve)
    assert 0 < sizes[256] <= 1 and plan.floor_seconds > 0
    console = Console(record=True, width=100, file=(tmp_path / "shown").open("w"))
    show_plan(plan, console)
    shown = console.export_text()
    for words in ("eta: 3.0", "rows trained on", "256 (chosen)", "features on disk"):
        assert words in shown
    trainer.train()
    size = (tmp_path / "checkpoint.pt").stat().st_size
    assert plan.checkpoint_bytes <= size < 1.1 * plan.checkpoint_bytes + 20_000
