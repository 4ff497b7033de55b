"""Benchmark items are dropped from rows and prompts, and nothing else is."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from vllm_eagle3.train.overlap import Excluded, drop_overlapping

QUESTION = "one two three four five six seven eight nine ten eleven twelve thirteen end"


@pytest.fixture
def excluded(tmp_path: Path) -> Excluded:
    file = tmp_path / "benchmark.jsonl"
    turns = [QUESTION, "and in short"]
    file.write_text(json.dumps({"turns": turns}) + "\n")
    return Excluded([file])


def decode(ids: Sequence[int]) -> str:
    return " ".join(QUESTION.split()[i] if i < 14 else "other" for i in ids)


def test_thirteen_words_in_a_row_are_shared_whatever_their_case(
    excluded: Excluded,
) -> None:
    words = QUESTION.split()
    assert excluded.share(["So: " + ", ".join(words[1:]).upper() + "!"])
    assert not excluded.share([" ".join(words[:12]) + " stop " + words[12]])
    assert not excluded.share(["and in short"])


def test_items_too_short_to_compare_are_counted(excluded: Excluded) -> None:
    assert (excluded.num_items, excluded.num_short) == (2, 1)


def test_rows_and_prompts_are_copied_as_they_are(
    excluded: Excluded, tmp_path: Path
) -> None:
    row = {"kind": "x", "ids": [20, *range(13)], "spans": [], "extra": 1}
    clean = {"spans": [], "ids": [20, *range(12)], "kind": "y"}
    prompt = {"messages": [{"role": "user", "content": "Say: " + QUESTION}]}
    fine = {"messages": [{"role": "user", "content": "Say hello"}]}
    source, out = tmp_path / "mixed.jsonl.gz", tmp_path / "out.jsonl"
    with gzip.open(source, "wt") as lines:
        lines.write("\n".join(map(json.dumps, (row, clean, prompt, fine))))
    result = drop_overlapping(source, out, excluded, decode)
    assert (result.kept, result.dropped) == (2, 2)
    assert [json.loads(line) for line in out.read_text().splitlines()] == [clean, fine]


def test_a_bad_line_is_named_and_nothing_is_written(
    excluded: Excluded, tmp_path: Path
) -> None:
    source, out = tmp_path / "rows.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"ids": [1]}\n{"no": 1}\n')
    with pytest.raises(ValueError, match=r"rows\.jsonl:2.*want one of"):
        drop_overlapping(source, out, excluded, decode)
    assert not out.exists()
