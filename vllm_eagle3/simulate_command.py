"""The command `simulate`: predicted speed-up of `auto` by batch size.

A prediction can be scored against what `bench` measured, on other prompts than those of
the record.
"""

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
        against: `results.json` of a benchmark, to be predicted.
        out: JSON file to write.
    """

    record: Path
    curve: Path | None = None
    batch: str = "1,2,4,8,16,32,64"
    num_speculative_tokens: int = 16
    steps: int = 500
    context: int = 256
    against: Path | None = None
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
    sizes = _sizes(options.batch)
    measured = None if options.against is None else read_speed_ups(options.against)
    found = {
        batch: compare(curve, traces, limits, batch, options.steps, options.context)
        for batch in sizes
    }
    rows = [_row(batch, each) for batch, each in found.items()]
    table = _table(f"{curve.name}, {len(traces)} drafts")
    for row in rows:
        table.add_row(*map(str, row.values()))
    console.print(table)
    fields = {"curve": curve.model_dump(), "drafts": len(traces), "batches": rows}
    if measured is not None:
        scored = _score(found, measured)
        fields["scored"] = scored
        console.print(_score_table(scored))
    if options.out is not None:
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


def read_speed_ups(path: Path) -> dict[tuple[str, int], float]:
    """(method, batch) -> its speed-up over off at temperature 0, of `results.json`.

    Raises:
        ValueError: no such file, or not one of a benchmark with such speed-ups.
    """
    try:
        runs = json.loads(path.read_text("utf-8"))["runs"]
        found = {
            (run["method"], run["batch"]): run["speed_up"]
            for run in runs
            if run["method"] != "off"
            and run["temperature"] == 0
            and run.get("speed_up") is not None
        }
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"against: got {path}, want the results.json of a benchmark: {error}"
        ) from error
    if not found:
        raise ValueError(
            f"against: {path} has no speed-up over off at temperature 0; run bench "
            "with --temperature 0, and with more --repeats if they were too noisy"
        )
    return found


def _score(
    found: dict[int, Comparison], measured: dict[tuple[str, int], float]
) -> list[dict[str, float | str]]:
    """Predicted beside measured, for each method that was both."""
    scored: list[dict[str, float | str]] = []
    for (method, batch), speed_up in sorted(measured.items()):
        if batch not in found:
            continue
        runs = found[batch].fixed | {"auto": found[batch].auto}
        run = runs.get(method.removeprefix("ours:"))
        if run is None:
            continue
        predicted = run.tokens_per_s / found[batch].fixed["off"].tokens_per_s
        scored.append(
            {
                "method": method,
                "batch": batch,
                "predicted": round(predicted, 3),
                "measured": round(speed_up, 3),
                "difference": round(predicted / speed_up - 1, 3),
            }
        )
    return scored


def _score_table(scored: list[dict[str, float | str]]) -> Table:
    table = Table(title="speed-up over off, temperature 0")
    for name in ("method", "batch", "predicted", "measured", "difference"):
        table.add_column(name, justify="right")
    for row in scored:
        shown = {**row, "difference": f"{row['difference']:+.1%}"}
        table.add_row(*map(str, shown.values()))
    return table


def _sizes(text: str) -> Sequence[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and int(part) > 0 for part in parts):
        raise ValueError(f"batch: got {text!r}, want sizes such as 1,4,16")
    return [int(part) for part in parts]
