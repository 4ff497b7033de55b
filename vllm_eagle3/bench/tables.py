"""The tables of a benchmark, made from results.json, for Markdown and the HTML page."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from vllm_eagle3.bench.report import identity_text, speed_up_text
from vllm_eagle3.bench.statistics import crossover
from vllm_eagle3.bench.workload import MIXED

Record = dict[str, Any]
STEP_PARTS = ("draft", "verify", "commit", "rest")


@dataclass(frozen=True)
class TextTable:
    """A table as text; every row has as many cells as the header."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def markdown(self) -> str:
        lines = [self.header, ("---",) * len(self.header), *self.rows]
        table = "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
        return f"**{self.title}**\n\n{table}\n"


def all_tables(results: Record) -> list[TextTable]:
    """Every table that the results hold figures for."""
    runs = results["runs"]
    tables = []
    for temperature in distinct(runs, "temperature"):
        some = [run for run in runs if run["temperature"] == temperature]
        tables += [_speed_ups(some), _ends(some), _tasks(some), _depths(some)]
        tables += [_step_times(some), _texts(some)]
    tables.append(_reliability(results))
    return [table for table in tables if table.rows]


def distinct(runs: Iterable[Record], key: str) -> list[Any]:
    """The values of a field, in the order in which they come."""
    return list(dict.fromkeys(run[key] for run in runs))


def speculative(runs: Iterable[Record]) -> list[Record]:
    return [run for run in runs if "counts" in run]


def smallest_batch(runs: Sequence[Record]) -> list[Record]:
    """The runs at the smallest batch: there each batch holds one task."""
    smallest = min(run["batch"] for run in runs)
    return [run for run in runs if run["batch"] == smallest]


def gain_ends(runs: Sequence[Record]) -> str:
    """Where a method's runs, one a batch size, stop being faster than off."""
    known = [run for run in runs if run.get("speed_up") is not None]
    if not known:
        return "not known: too few repeats"
    sizes = [run["batch"] for run in known]
    speed_ups = [run["speed_up"] for run in known]
    end = crossover(sizes, speed_ups)
    if end is not None:
        return f"at a batch of about {end:.0f}"
    measured = f"{min(sizes)} to {max(sizes)}"
    if min(sizes) == max(sizes):
        measured = str(sizes[0])
    pays = speed_ups[sizes.index(max(sizes))] > 1
    return f"not by {max(sizes)}" if pays else f"pays at none of {measured}"


def _at(runs: Iterable[Record]) -> str:
    """The setting of runs at one temperature and batch, for a title."""
    first = next(iter(runs))
    return f"temperature {first['temperature']:g}, batch {first['batch']}"


def _speed_ups(runs: Sequence[Record]) -> TextTable:
    sizes = distinct(runs, "batch")
    rows = []
    for method in distinct(runs, "method"):
        cells = {r["batch"]: _speed_cell(r) for r in runs if r["method"] == method}
        rows.append((method, *(cells.get(size, "-") for size in sizes)))
    return TextTable(
        f"Speed-up over off by batch size, temperature {runs[0]['temperature']:g} "
        "(off: tokens/s; in brackets the 95% interval)",
        ("method", *map(str, sizes)),
        tuple(rows),
    )


def _speed_cell(run: Record) -> str:
    if run["method"] == "off":
        return f"{run['tokens_per_s']:.1f}"
    return speed_up_text(run)


def _ends(runs: Sequence[Record]) -> TextTable:
    rows = tuple(
        (method, gain_ends([r for r in runs if r["method"] == method]))
        for method in distinct(speculative(runs), "method")
    )
    several = len(distinct(runs, "batch")) > 1
    return TextTable(
        f"Where the advantage ends, temperature {runs[0]['temperature']:g}",
        ("method", "faster than off until"),
        rows if several else (),
    )


def _tasks(runs: Sequence[Record]) -> TextTable:
    some = smallest_batch(runs)
    tasks = [task for task in some[0]["tasks"] if task != MIXED]
    rows = tuple(
        (run["method"], *(_task_cell(run["tasks"][task]) for task in tasks))
        for run in speculative(some)
    )
    return TextTable(
        f"Acceptance length by task, and the speed-up, {_at(some)}",
        ("method", *tasks),
        rows if tasks else (),
    )


def _task_cell(task: Record) -> str:
    length = task["acceptance_length"]
    text = "-" if length is None else f"{length:.2f}"
    if task.get("speed_up") is not None:
        text += f" ({task['speed_up']:.2f}x)"
    return text


def _depths(runs: Sequence[Record]) -> TextTable:
    some = smallest_batch(runs)
    drafting = [run for run in speculative(some) if run["conditional_acceptance"]]
    deepest = max((len(r["conditional_acceptance"]) for r in drafting), default=0)
    rows = []
    for run in drafting:
        rates = [entry["rate"] for entry in run["conditional_acceptance"]]
        rates += [None] * (deepest - len(rates))
        cells = ("-" if rate is None else f"{rate:.2f}" for rate in rates)
        rows.append((run["method"], *cells))
    return TextTable(
        f"Acceptance at each depth, given acceptance before it, {_at(some)}",
        ("method", *map(str, range(1, deepest + 1))),
        tuple(rows),
    )


def _step_times(runs: Sequence[Record]) -> TextTable:
    rows = []
    for run in runs:
        if step := run.get("step"):
            parts = (f"{step[part]:.2f}" for part in STEP_PARTS)
            total = sum(step[part] for part in STEP_PARTS)
            rows.append((run["method"], str(run["batch"]), *parts, f"{total:.2f}"))
    return TextTable(
        f"Milliseconds of a step, temperature {runs[0]['temperature']:g}",
        ("method", "batch", *STEP_PARTS, "total"),
        tuple(rows),
    )


def _texts(runs: Sequence[Record]) -> TextTable:
    rows = tuple(
        (run["method"], str(run["batch"]), identity_text(run))
        for run in speculative(runs)
        if run.get("identical") is not None
    )
    return TextTable(
        f"Requests with the same tokens as off, temperature {runs[0]['temperature']:g}",
        ("method", "batch", "same"),
        rows,
    )


def _reliability(results: Record) -> TextTable:
    rows = tuple(
        (
            f"{entry['temperature']:g}",
            str(sum(part["nodes"] for part in entry["bins"])),
            f"{entry['expected_calibration_error']:.3f}",
        )
        for entry in results.get("reliability", [])
    )
    return TextTable(
        "Confidence of the head against acceptance",
        ("temperature", "draft nodes judged", "expected calibration error"),
        rows,
    )
