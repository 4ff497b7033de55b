"""The commands `data preview` and `data dedup`, which need no engine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from .. import embedded
from .data import read_rows, usable_rows
from .overlap import GRAM, Excluded, Overlap, drop_overlapping
from .preview import counts_table, show_row


def run_data_preview(
    files: Sequence[str], target: str, limit: int, max_length: int, console: Console
) -> None:
    """Show the first `limit` rows in colour, then the counts of all.

    Raises:
        ValueError: a file that is missing or malformed, or ids of another target.
    """
    rows, skipped = usable_rows(read_rows(files), max_length)
    tokenizer = _tokenizer(target)
    highest = max(max(row.ids) for row in rows)
    if highest >= len(tokenizer):
        raise ValueError(
            f"rows: token id {highest}, but the target's tokenizer ends at "
            f"{len(tokenizer) - 1}; the rows are of another target"
        )
    for row in rows[:limit]:
        console.rule(f"{row.kind or 'row'}, {len(row.ids)} tokens")
        show_row(row, tokenizer, console)
    console.print(counts_table(rows, skipped))


def run_data_dedup(
    source: Path, exclude: Sequence[str], out: Path, target: str, console: Console
) -> Overlap:
    """Copy `source` without what shares words with the prompts of `exclude`.

    Raises:
        ValueError: a file that is missing or malformed, or `out` that is `source`.
    """
    if out.exists() and out.samefile(source):
        raise ValueError(f"out: got {out}, which is read; name another file")
    excluded = Excluded(exclude)
    result = drop_overlapping(source, out, excluded, _tokenizer(target).decode)
    console.print(
        f"{out}: {result.kept} kept, {result.dropped} dropped that share {GRAM} words "
        f"in a row with one of {excluded.num_items} benchmark texts "
        f"({excluded.num_short} of them are too short to compare)"
    )
    return result


def _tokenizer(target: str) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(embedded.resolve_target(target)))
