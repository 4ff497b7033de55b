"""Rows: whole conversations as token ids, and the spans that the target wrote.

A row is what the engine really saw and produced: prompt ids and generated ids, never
re-tokenized text. Only the target's own replies (`spans`) are supervised, so the loss
mask needs no template, no regular expression and no offsets.

One JSON object a line, plain or gzip:
    {"kind": "chat", "ids": [1, 9690, ...], "spans": [[57, 191, 0.6], ...]}
with spans as [start, end, temperature], end exclusive.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch


@dataclass(frozen=True)
class Row:
    """One conversation: ids [length] and the spans [start, end) of the replies.

    `where` is its file and line, for messages.
    """

    kind: str
    ids: tuple[int, ...]
    spans: tuple[tuple[int, int, float], ...]
    where: str = field(default="", compare=False)

    @property
    def num_reply_tokens(self) -> int:
        return sum(end - start for start, end, _ in self.spans)


@dataclass(frozen=True)
class Batch:
    """Rows of like length, padded on the right.

    `span_ids` is 0 on padding and on everything the target did not write, and counts
    replies from 1 within a row, so that two positions are in the same reply exactly
    when their ids are equal and not 0.
    """

    ids: torch.Tensor  # [rows, tokens], int64
    span_ids: torch.Tensor  # [rows, tokens], int64
    lengths: torch.Tensor  # [rows], int64
    rows: tuple[Row, ...]

    @property
    def num_tokens(self) -> int:
        return int(self.lengths.sum())


def read_rows(paths: Iterable[Path | str]) -> list[Row]:
    """Read row files.

    Raises:
        ValueError: naming file, line and field of the first malformed row.
    """
    return [row for path in paths for row in _read_file(Path(path))]


def _read_file(path: Path) -> Iterator[Row]:
    if not path.is_file():
        raise ValueError(f"rows: no file {path}; write one with `data regen`")
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                yield _parse_row(line, f"{path}:{number}")


def _parse_row(line: str, where: str) -> Row:
    try:
        record = json.loads(line)
        ids = tuple(int(i) for i in record["ids"])
        spans = tuple((int(s[0]), int(s[1]), float(s[2])) for s in record["spans"])
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise ValueError(
            f'{where}: want {{"ids": [...], "spans": [[start, end, temperature]]}}, '
            f"got {line[:60]!r} ({error})"
        ) from error
    for start, end, _ in spans:
        if not 0 < start < end <= len(ids):
            raise ValueError(
                f"{where}: span [{start}, {end}) does not lie inside the "
                f"{len(ids)} ids, after at least one prompt token"
            )
    return Row(str(record.get("kind", "")), ids, spans, where)


def require_ids_of_target(rows: Iterable[Row], vocab_size: int) -> None:
    """Refuse rows that were made with another tokenizer, where the ids show it.

    Raises:
        ValueError: the first id that the target does not have, and where.
    """
    for row in rows:
        if min(row.ids) < 0 or max(row.ids) >= vocab_size:
            bad = next(i for i in row.ids if not 0 <= i < vocab_size)
            raise ValueError(
                f"rows: {row.where or row.kind}: id {bad}, but the target's "
                f"vocabulary has {vocab_size}; the rows were made with another "
                "tokenizer, so let this target write its own (data regen)"
            )


def usable_rows(
    rows: Sequence[Row], max_length: int
) -> tuple[list[Row], dict[str, int]]:
    """Keep rows that fit and teach; return them with the skipped counts by reason."""
    kept, skipped = [], Counter[str]()
    for row in rows:
        if not row.spans or row.num_reply_tokens < 2:
            skipped["no reply of at least two tokens"] += 1
        elif len(row.ids) > max_length:
            skipped[f"longer than {max_length} tokens"] += 1
        else:
            kept.append(row)
    if not kept:
        raise ValueError(
            f"rows: none of {len(rows)} is usable ({dict(skipped) or 'no rows'}); "
            "check the spans, or raise max_length"
        )
    return kept, dict(skipped)


def fingerprint(rows: Iterable[Row]) -> str:
    """What a run's data are: equal for equal ids and spans in equal order."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(repr((row.ids, row.spans)).encode())
    return digest.hexdigest()[:16]


def count_reply_tokens(rows: Iterable[Row], vocab_size: int) -> torch.Tensor:
    """Occurrences of each target id inside the replies, int64 [vocab_size]."""
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for row in rows:
        for start, end, _ in row.spans:
            ids = torch.tensor(row.ids[start:end])
            counts += torch.bincount(ids, minlength=vocab_size)
    return counts


def split_rows(
    rows: Sequence[Row], num_held_out: int, seed: int
) -> tuple[list[Row], list[Row]]:
    """Shuffle by `seed` and split into (train, held out)."""
    if not 0 < num_held_out < len(rows):
        raise ValueError(
            f"held_out: got {num_held_out}, want 1..{len(rows) - 1} of {len(rows)} rows"
        )
    order = list(rows)
    random.Random(seed).shuffle(order)
    return order[num_held_out:], order[:num_held_out]


def make_batches(
    rows: Sequence[Row], tokens_per_batch: int, seed: int
) -> list[list[Row]]:
    """Group rows of like length up to a padded size, in an order fixed by `seed`."""
    rng = random.Random(seed)
    # Jitter keeps company changing between epochs at little padding.
    by_length = sorted(rows, key=lambda r: len(r.ids) * (1 + 0.1 * rng.random()))
    batches: list[list[Row]] = [[]]
    for row in by_length:
        longest = max([len(row.ids), *(len(r.ids) for r in batches[-1])])
        if batches[-1] and longest * (len(batches[-1]) + 1) > tokens_per_batch:
            batches.append([])
        batches[-1].append(row)
    rng.shuffle(batches)
    return batches if rows else []


def collate(rows: Sequence[Row]) -> Batch:
    """Pad rows into tensors."""
    tokens = max(len(row.ids) for row in rows)
    ids = torch.zeros(len(rows), tokens, dtype=torch.int64)
    span_ids = torch.zeros_like(ids)
    for r, row in enumerate(rows):
        ids[r, : len(row.ids)] = torch.tensor(row.ids)
        for number, (start, end, _) in enumerate(row.spans, 1):
            span_ids[r, start:end] = number
    lengths = torch.tensor([len(row.ids) for row in rows])
    return Batch(ids, span_ids, lengths, tuple(rows))
