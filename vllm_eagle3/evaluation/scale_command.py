"""The command `scale`: run the points one after the other, then report."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

from rich.console import Console
from rich.table import Table

from ..train.config import read_config
from ..train.start import read_run_data, read_target_config
from ..train.train_command import resolve
from .command import EvalOptions, evaluate
from .scale import (
    FEATURE_WEIGHT,
    Point,
    Record,
    Same,
    curve_points,
    grid_points,
    run_point,
)
from .scale_report import write_report

FRACTIONS = "1/8,1/4,1/2,1"


@dataclass(frozen=True)
class ScaleOptions:
    """The options of `vllm-eagle3 scale`, as typed.

    `prompts` are measured in the engine at every point; none leaves that out.
    """

    config: Path
    out: Path
    overrides: tuple[str, ...] = ()
    curve: bool = True
    grid: bool = False
    fractions: str = FRACTIONS
    seeds: str = "0"
    same: str = "epochs"
    grid_fraction: str = "1/4"
    feature_weight: float = FEATURE_WEIGHT
    prompts: tuple[str, ...] = ()
    limit: int | None = None
    max_tokens: int = 96


def run_scale_command(options: ScaleOptions, engine: str, console: Console) -> Record:
    """Run all points that are not done, write the report and print it.

    Args:
        engine: `module:class`, see `bench.worker`; used where prompts are given.

    Raises:
        ValueError: a bad option or configuration, or an `out` of other points.
        WorkerError: an engine failed.
    """
    curve, grid = _points(options)
    base = (curve or grid)[0].config
    data = read_run_data(base, read_target_config(base))
    options.out.mkdir(parents=True, exist_ok=True)
    records: dict[str, Record] = {}
    for number, point in enumerate([*curve, *grid], 1):
        console.print(f"point {number} of {len(curve) + len(grid)}: {point.name}")

        def measure(head: Path, target: str = point.config.target) -> Record:
            return _measure(options, target, head, engine, console)

        records[point.name] = run_point(
            point, data, lambda _: None, measure if options.prompts else None
        )
        length = records[point.name]["predicted"]["acceptance_length"]
        console.print(f"  acceptance length {length:.3f}, predicted")
    results = write_report(
        options.out,
        [records[point.name] for point in curve],
        [records[point.name] for point in grid],
    )
    console.print(_table(results))
    return results


def _points(options: ScaleOptions) -> tuple[list[Point], list[Point]]:
    if options.same not in ("epochs", "steps"):
        raise ValueError(f"same: got {options.same!r}, want epochs or steps")
    if not (options.curve or options.grid):
        raise ValueError("scale: got neither curve nor grid, want at least one")
    base = resolve(read_config(options.config, options.overrides))
    fractions = [_fraction(text) for text in options.fractions.split(",")]
    same: Same = "steps" if options.same == "steps" else "epochs"
    curve = grid = []
    if options.curve:
        seeds = _seeds(options.seeds)
        curve = curve_points(base, options.out, fractions, seeds, same)
    if options.grid:
        fraction = _fraction(options.grid_fraction)
        grid = grid_points(base, options.out, fraction, options.feature_weight)
    return curve, grid


def _fraction(text: str) -> Fraction:
    try:
        fraction = Fraction(text.strip())
    except (ValueError, ZeroDivisionError):
        fraction = Fraction(0)
    if not 0 < fraction <= 1:
        raise ValueError(
            f"fractions: got {text!r}, want parts of the data, as in 1/8,1/2,1"
        )
    return fraction


def _seeds(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() for part in parts):
        raise ValueError(f"seeds: got {text!r}, want whole numbers, as in 0,1,2")
    return [int(part) for part in dict.fromkeys(parts)]


def _measure(
    options: ScaleOptions, target: str, head: Path, engine: str, console: Console
) -> Record:
    measured = evaluate(
        EvalOptions(
            target=target,
            head=str(head),
            prompts=options.prompts,
            limit=options.limit,
            max_tokens=options.max_tokens,
        ),
        engine,
        console,
    )
    length = measured["measured_acceptance_length"]
    console.print(f"  acceptance length {length:.3f}, measured in the engine")
    return measured


def _table(results: Record) -> Table:
    table = Table("what", "acceptance length", "a doubling of the data", "95% interval")
    for name, fit in results["fits"].items():
        ends = fit["interval"]
        table.add_row(
            name,
            f"{fit['at_all']:.3f} with all data",
            f"{fit['per_doubling']:+.3f}",
            "-" if ends is None else f"{ends[0]:+.3f}..{ends[1]:+.3f}",
        )
    for point in results["grid"]:
        length = point["predicted"]["acceptance_length"]
        table.add_row(point["name"], f"{length:.3f}", "", "")
    return table
