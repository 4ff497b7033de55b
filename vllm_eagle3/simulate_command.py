"""The command `simulate`: predicted speed-up of `auto` by batch size."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from .config import Eagle3Options
from .policy import BudgetLimits
from .recording import ACCEPTANCE, STEPS
from .simulate import Comparison, compare, curve_of_steps, read_curve, read_traces


@dataclass(frozen=True)
class SimulateOptions:
    """What to simulate.

    Attributes:
        record: folder of a recorded run: its drafts, and its costs without a curve.
        curve: YAML or JSON file of a cost curve.
        batch: comma-separated batch sizes.
        num_speculative_tokens: as of the engine.
        steps: of each simulated run.
        context: tokens of one request.
        out: JSON file to write.
    """

    record: Path
    curve: Path | None = None
    batch: str = "1,2,4,8,16,32,64"
    num_speculative_tokens: int = 16
    steps: int = 500
    context: int = 256
    out: Path | None = None


def run_simulate_command(options: SimulateOptions, console: Console) -> None:
    """Simulate, show a table, and write it if asked.

    Raises:
        ValueError: a file or an option is wrong.
    """
    curve = (
        curve_of_steps(options.record / STEPS)
        if options.curve is None
        else read_curve(options.curve)
    )
    traces = read_traces(options.record / ACCEPTANCE)
    largest = Eagle3Options().tree_shape(options.num_speculative_tokens)
    assert largest is not None
    limits = BudgetLimits.below(largest)
    table = _table(f"{curve.name}, {len(traces)} drafts")
    rows = []
    for batch in _sizes(options.batch):
        found = compare(curve, traces, limits, batch, options.steps, options.context)
        rows.append(_row(batch, found))
        table.add_row(*map(str, rows[-1].values()))
    console.print(table)
    if options.out is not None:
        fields = {"curve": curve.model_dump(), "drafts": len(traces), "batches": rows}
        options.out.write_text(json.dumps(fields, indent=2) + "\n", "utf-8")


def _table(title: str) -> Table:
    table = Table(title=title)
    for name in ("batch", "off, tokens/s", "auto", "best fixed", "its speed-up"):
        table.add_column(name, justify="right")
    table.add_column("acceptance length", justify="right")
    table.add_column("steps without drafts", justify="right")
    return table


def _row(batch: int, found: Comparison) -> dict[str, float | str]:
    off = found.fixed["off"].tokens_per_s
    best = found.fixed[found.best]
    return {
        "batch": batch,
        "off_tokens_per_s": round(off, 1),
        "auto_speed_up": round(found.speed_up, 3),
        "best_fixed": found.best,
        "best_fixed_speed_up": round(best.tokens_per_s / off, 3),
        "acceptance_length": round(found.auto.acceptance_length, 2),
        "plain_steps": f"{found.auto.plain_steps}/{found.auto.steps}",
    }


def _sizes(text: str) -> Sequence[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and int(part) > 0 for part in parts):
        raise ValueError(f"batch: got {text!r}, want sizes such as 1,4,16")
    return [int(part) for part in parts]
