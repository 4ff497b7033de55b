"""Replies written by the target: token identity, order, and going on after a stop."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from vllm_eagle3.acceptance import DraftCounts
from vllm_eagle3.engine import Generation, Sampling
from vllm_eagle3.train.command import read_temperatures
from vllm_eagle3.train.regen import Ask, write_replies

ASKS = [Ask((7, n), Sampling(0.6, 8), "qa") for n in range(10)]


class Echo:
    """An engine that answers [7, n] with n + 1 times n; stops after `limit` prompts."""

    def __init__(self, limit: int = 10**6) -> None:
        self.limit = limit
        self.answered: list[int] = []

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling
    ) -> list[Generation]:
        raise NotImplementedError

    def stream(
        self, requests: Iterable[tuple[Sequence[int], Sampling]]
    ) -> Iterator[tuple[int, Generation]]:
        # Pairs end in the wrong order, as they may in an engine.
        for pair in batched(enumerate(requests), 2):
            for number, (ids, _) in pair[::-1]:
                if len(self.answered) >= self.limit:
                    raise KeyboardInterrupt
                self.answered.append(ids[1])
                yield number, Generation((ids[1],) * (ids[1] + 1))

    def metrics(self) -> DraftCounts:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError


def write(engine: Echo, out: Path) -> int:
    return write_replies(engine, ASKS, out, lambda *_: None)


def batched(items: Iterable[Any], size: int) -> Iterator[list[Any]]:
    rest = iter(items)
    while batch := list(islice(rest, size)):
        yield batch


def rows(out: Path) -> list[dict]:
    return [json.loads(line) for line in out.read_text().splitlines()]


def test_rows_hold_prompt_and_reply_ids_as_the_engine_made_them(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    assert write(Echo(), out) == sum(range(1, 11))
    assert rows(out)[3] == {
        "kind": "qa",
        "ids": [7, 2, 2, 2, 2],
        "spans": [[2, 5, 0.6]],
    }
    assert sorted(row["ids"][1] for row in rows(out)) == list(range(10))


def test_stopped_run_goes_on_without_loss_or_repetition(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    with pytest.raises(KeyboardInterrupt):
        write(Echo(limit=4), out)
    with out.open("a") as file:
        file.write('{"kind": "qa", "ids": [7')  # torn by a kill
    again = Echo()
    write(again, out)
    assert sorted(again.answered) == list(range(4, 10))
    assert sorted(row["ids"][1] for row in rows(out)) == list(range(10))


def test_rows_of_other_prompts_are_never_mixed_in(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    out.write_text('{"kind": "qa", "ids": [9, 9, 9], "spans": []}\n')
    with pytest.raises(ValueError, match=r"rows\.jsonl: 1 rows are of other prompts"):
        write(Echo(), out)
    assert len(rows(out)) == 1


@pytest.mark.parametrize("text", ["", "0,warm", "-1", "0;1", "nan"])
def test_temperatures_that_cannot_be_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"temperature: got .*want numbers >= 0"):
        read_temperatures(text)
    assert read_temperatures("0,0.7") == [0.0, 0.7]
