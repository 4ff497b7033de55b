"""Predicted against measured acceptance: as JSON, and as a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from ..acceptance import (
    DraftCounts,
    acceptance_length,
    acceptance_length_interval,
    conditional_acceptance,
)

Record = dict[str, Any]


@dataclass(frozen=True)
class Judged:
    """One prompt: counts predicted along the plain text, and those of the engine."""

    predicted: DraftCounts
    measured: DraftCounts
    same_text: bool


def summary(judged: Sequence[Judged]) -> Record:
    """Figures over some prompts; None where nothing was drafted."""
    predicted = [j.predicted for j in judged]
    measured = [j.measured for j in judged]
    length = acceptance_length(_total(predicted))
    engine = acceptance_length(_total(measured))
    rates = conditional_acceptance(_total(predicted))
    engine_rates = conditional_acceptance(_total(measured))
    return {
        "prompts": len(judged),
        "same_text": sum(j.same_text for j in judged),
        "predicted_acceptance_length": length,
        "predicted_interval": acceptance_length_interval(predicted),
        "measured_acceptance_length": engine,
        "measured_interval": acceptance_length_interval(measured),
        "relative_difference": length / engine - 1 if length and engine else None,
        "n_alpha": [rate.value for rate in rates],
        "n_alpha_intervals": [[rate.low, rate.high] for rate in rates],
        "measured_n_alpha": [rate.value for rate in engine_rates],
        "measured_n_alpha_intervals": [[r.low, r.high] for r in engine_rates],
    }


def make_results(
    judged: Mapping[str, Sequence[Judged]], settings: Mapping[str, Any]
) -> Record:
    """The JSON of `eval`: all prompts together, and by prompt file."""
    together = [j for file in judged.values() for j in file]
    return {
        **settings,
        **summary(together),
        "by_prompts": {file: summary(part) for file, part in judged.items()},
    }


def results_table(results: Record) -> Table:
    """Predicted and measured side by side, a pair of rows for each prompt file."""
    table = Table(title=_conditions(results))
    table.add_column("prompts")
    table.add_column("")
    table.add_column("acceptance length", justify="right")
    depths = range(len(results["n_alpha"]))
    for depth in depths:
        table.add_column(f"{depth}-alpha", justify="right")
    parts = dict(results["by_prompts"])
    if len(parts) > 1:
        parts["all"] = results
    for name, part in parts.items():
        heading = f"{name} ({part['prompts']})"
        table.add_row(heading, "predicted", *_cells(part, "predicted", "n_alpha"))
        table.add_row("", "measured", *_cells(part, "measured", "measured_n_alpha"))
        if part["relative_difference"] is not None:
            table.add_row("", "difference", f"{part['relative_difference']:+.1%}")
        table.add_section()
    return table


def _cells(part: Record, kind: str, alphas: str) -> list[str]:
    length = part[f"{kind}_acceptance_length"]
    if length is None:
        return ["-"]
    low, high = part[f"{kind}_interval"]
    cells = [f"{length:.3f} ({low:.2f}..{high:.2f})"]
    for rate, (low, high) in zip(
        part[alphas], part[f"{alphas}_intervals"], strict=True
    ):
        cells.append("-" if rate is None else f"{rate:.2f} ({low:.2f}..{high:.2f})")
    return cells


def _conditions(results: Record) -> str:
    return (
        f"a chain of {results['draft_tokens']} draft tokens, temperature "
        f"{results['temperature']:g}, up to {results['max_tokens']} new tokens, "
        f"{results['dtype']}; 95% intervals"
    )


def _total(counts: Sequence[DraftCounts]) -> DraftCounts:
    return sum(counts, DraftCounts())
