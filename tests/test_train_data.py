"""Rows: reading, what is refused with which words, batches, the draft vocabulary."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
import torch

from vllm_eagle3.train.data import (
    Row,
    collate,
    count_reply_tokens,
    make_batches,
    read_rows,
    split_rows,
    usable_rows,
)


def row(length: int, start: int = 2) -> Row:
    return Row("chat", tuple(range(length)), ((start, length, 0.0),))


def test_reads_plain_and_gzip_alike(tmp_path: Path) -> None:
    line = json.dumps({"kind": "qa", "ids": [1, 2, 3, 4], "spans": [[2, 4, 0.7]]})
    plain, packed = tmp_path / "a.jsonl", tmp_path / "b.jsonl.gz"
    plain.write_text(line + "\n\n")
    with gzip.open(packed, "wt") as file:
        file.write(line)
    first, second = read_rows([plain, packed])
    assert first == second == Row("qa", (1, 2, 3, 4), ((2, 4, 0.7),))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "want {"),
        ('{"ids": [1, 2]}', "'spans'"),
        ('{"ids": [1, 2], "spans": [[0, 2, 1]]}', "does not lie inside"),
        ('{"ids": [1, 2], "spans": [[1, 3, 1]]}', "does not lie inside"),
    ],
)
def test_malformed_row_is_refused_with_file_and_line(
    tmp_path: Path, line: str, message: str
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"ids": [1, 2, 3], "spans": []}\n' + line + "\n")
    with pytest.raises(ValueError, match=r"rows\.jsonl:2") as caught:
        read_rows([path])
    assert message in str(caught.value)


def test_missing_file_names_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="data regen"):
        read_rows([tmp_path / "none.jsonl"])


def test_skipped_rows_are_counted_by_reason() -> None:
    rows = [row(5), row(50), Row("chat", (1, 2, 3), ())]
    kept, skipped = usable_rows(rows, max_length=20)
    assert kept == [rows[0]]
    assert skipped == {"longer than 20 tokens": 1, "no reply of at least two tokens": 1}


def test_nothing_to_supervise_stops_before_the_first_step() -> None:
    with pytest.raises(ValueError, match="none of 1 is usable"):
        usable_rows([Row("chat", (1, 2, 3), ())], max_length=20)


def test_every_row_is_in_exactly_one_batch_and_batches_fit() -> None:
    rows = [row(n) for n in (3, 9, 4, 30, 12, 5, 8, 16)]
    batches = make_batches(rows, tokens_per_batch=40, seed=1)
    assert sorted(r.ids for b in batches for r in b) == sorted(r.ids for r in rows)
    assert all(len(b) * max(len(r.ids) for r in b) <= 40 for b in batches)
    assert batches == make_batches(rows, tokens_per_batch=40, seed=1)
    assert batches != make_batches(rows, tokens_per_batch=40, seed=2)


def test_collate_numbers_replies_within_a_row() -> None:
    two = Row("chat", (1, 2, 3, 4, 5, 6), ((1, 3, 0.0), (5, 6, 1.0)))
    batch = collate([two, row(4)])
    assert batch.span_ids.tolist() == [[0, 1, 1, 0, 0, 2], [0, 0, 1, 1, 0, 0]]
    assert batch.lengths.tolist() == [6, 4] and batch.num_tokens == 10


def test_only_reply_tokens_are_counted() -> None:
    counts = count_reply_tokens([Row("", (0, 1, 2, 2, 3), ((2, 5, 0.0),))], 5)
    assert torch.equal(counts, torch.tensor([0, 0, 2, 1, 0]))


def test_split_keeps_every_row_on_one_side() -> None:
    rows = [row(n) for n in range(4, 14)]
    train, held_out = split_rows(rows, 3, seed=0)
    assert len(held_out) == 3 and not set(train) & set(held_out)
    assert set(train) | set(held_out) == set(rows)
    with pytest.raises(ValueError, match=r"want 1\.\.9"):
        split_rows(rows, 10, seed=0)
