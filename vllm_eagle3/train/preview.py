"""Show rows as the trainer sees them: which tokens are predicted, which only read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from .data import Row, collate
from .packing import Packing

# Replies of a row take these in turn.
_COLOURS = ("green", "cyan", "yellow", "magenta", "blue")


def supervised(row: Row) -> list[bool]:
    """Per token, whether a first draft step is trained to predict it.

    The first token of a reply is the target's own: serving drafts after it.
    """
    marks = [False] * len(row.ids)
    packing = Packing(collate([row]).span_ids)
    for start in packing.token[packing.starts].tolist():
        marks[start + 2] = True
    return marks


def show_row(row: Row, tokenizer: Any, console: Console) -> None:
    """Print a row: supervised tokens coloured by reply, all others dim."""
    text = Text()
    marks = supervised(row)
    for begin, end, number in _stretches(row):
        style = "dim" if number is None else _COLOURS[number % len(_COLOURS)]
        if number is not None:
            text.append(f"[T={row.spans[number][2]:g}]", style=f"reverse {style}")
        for place in range(begin, end):
            shown = tokenizer.decode(row.ids[place : place + 1])
            text.append(shown, style=style if marks[place] else "dim")
    console.print(text)


def _stretches(row: Row) -> list[tuple[int, int, int | None]]:
    """[start, end) of replies, with their number, and of what is between them."""
    stretches: list[tuple[int, int, int | None]] = []
    done = 0
    for number, (start, end, _) in enumerate(row.spans):
        stretches += [(done, start, None), (start, end, number)]
        done = end
    return [*stretches, (done, len(row.ids), None)]


def counts_table(rows: Sequence[Row], skipped: dict[str, int]) -> Table:
    """Rows, tokens and supervised tokens by kind and temperature; what is skipped."""
    num_rows, tokens, predicted = Counter[str](), Counter[str](), Counter[str]()
    for row in rows:
        temperatures = "/".join(f"{t:g}" for t in sorted({s[2] for s in row.spans}))
        key = f"{row.kind or '-'}, T={temperatures}"
        num_rows[key] += 1
        tokens[key] += len(row.ids)
        predicted[key] += sum(supervised(row))
    table = Table()
    table.add_column("rows of kind, temperature")
    for heading in ("rows", "tokens", "supervised", "share"):
        table.add_column(heading, justify="right")
    for key, count in num_rows.most_common():
        share = f"{predicted[key] / tokens[key]:.0%}"
        table.add_row(
            key, f"{count:,}", f"{tokens[key]:,}", f"{predicted[key]:,}", share
        )
    table.add_section()
    total, all_tokens = predicted.total(), tokens.total()
    share = f"{total / all_tokens:.0%}"
    table.add_row("all", f"{len(rows):,}", f"{all_tokens:,}", f"{total:,}", share)
    for reason, count in skipped.items():
        table.add_row(f"skipped: {reason}", f"{count:,}")
    return table
