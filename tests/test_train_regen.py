"""Replies written by the target: token identity, order, and going on after a stop."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from vllm_eagle3.acceptance import DraftCounts
from vllm_eagle3.engine import Generation, Sampling
from vllm_eagle3.train import regen
from vllm_eagle3.train.regen import write_replies

PROMPTS = [[7, n] for n in range(10)]
SAMPLING = Sampling(0.6, 8)


class Echo:
    """An engine that answers [7, n] with n + 1 times n; stops after `limit` prompts."""

    def __init__(self, limit: int = 10**6) -> None:
        self.limit = limit
        self.answered: list[int] = []

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling
    ) -> list[Generation]:
        if len(self.answered) >= self.limit:
            raise KeyboardInterrupt
        self.answered += [ids[1] for ids in prompts]
        return [Generation((ids[1],) * (ids[1] + 1)) for ids in prompts]

    def metrics(self) -> DraftCounts:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(regen, "BATCH", 4)


def write(engine: Echo, out: Path) -> int:
    return write_replies(engine, PROMPTS, SAMPLING, "qa", out, lambda *_: None)


def rows(out: Path) -> list[dict]:
    return [json.loads(line) for line in out.read_text().splitlines()]


def test_rows_hold_prompt_and_reply_ids_as_the_engine_made_them(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    assert write(Echo(), out) == sum(range(1, 11))
    assert rows(out)[2] == {
        "kind": "qa",
        "ids": [7, 2, 2, 2, 2],
        "spans": [[2, 5, 0.6]],
    }
    assert [row["ids"][1] for row in rows(out)] == list(range(10))


def test_stopped_run_goes_on_without_loss_or_repetition(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    with pytest.raises(KeyboardInterrupt):
        write(Echo(limit=4), out)
    with out.open("a") as file:
        file.write('{"kind": "qa", "ids": [7')  # torn by a kill
    again = Echo()
    write(again, out)
    assert again.answered == list(range(4, 10))
    assert [row["ids"][1] for row in rows(out)] == list(range(10))


def test_rows_of_other_prompts_are_never_mixed_in(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    out.write_text('{"kind": "qa", "ids": [9, 9, 9], "spans": []}\n')
    with pytest.raises(ValueError, match=r"rows\.jsonl:1: a row of other prompts"):
        write(Echo(), out)
    assert len(rows(out)) == 1
