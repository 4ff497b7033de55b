"""The figures of `scale`: a fit of the curve, CSV, JSON and plots."""

from __future__ import annotations

import csv
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..bench.results import write_json

Record = dict[str, Any]


@dataclass(frozen=True)
class Fit:
    """acceptance length = at_all + per_doubling * log2(tokens / all tokens).

    A straight line in the logarithm of the data, as Scylla (arXiv 2505.07858) finds.
    The interval is of `per_doubling`; None with fewer than three points.
    """

    at_all: float
    per_doubling: float
    interval: tuple[float, float] | None
    points: int


def fit_log_linear(
    tokens: Sequence[float], lengths: Sequence[float], confidence: float = 0.95
) -> Fit | None:
    """Least squares over all points; None where the amount of data never differs."""
    if len(set(tokens)) < 2:
        return None
    from scipy import stats

    doublings = [math.log2(t / max(tokens)) for t in tokens]
    line = stats.linregress(doublings, lengths)
    interval = None
    if len(tokens) > 2:
        reach = stats.t.ppf((1 + confidence) / 2, len(tokens) - 2) * line.stderr
        interval = (float(line.slope - reach), float(line.slope + reach))
    return Fit(float(line.intercept), float(line.slope), interval, len(tokens))


def write_report(out: Path, curve: Sequence[Record], grid: Sequence[Record]) -> Record:
    """Write scale.json, scale.csv and the plots; return the JSON's content."""
    results: Record = {"curve": list(curve), "fits": fits(curve), "grid": list(grid)}
    write_json(out / "scale.json", results)
    _write_csv(out / "scale.csv", [*curve, *grid])
    if curve:
        _plot_curve(out / "scale.png", curve)
    if grid:
        _plot_grid(out / "grid.png", grid)
    return results


def fits(curve: Sequence[Record]) -> Record:
    """Fits of the predicted and measured acceptance length, and per domain."""
    series: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for point in curve:
        tokens = point["reply_tokens"]
        series["predicted"].append((tokens, point["predicted"]["acceptance_length"]))
        if "measured" in point:
            length = point["measured"]["measured_acceptance_length"]
            series["measured"].append((tokens, length))
        for kind, (length, *_) in point["by_kind"].items():
            series[f"predicted, {kind or '-'}"].append((tokens, length))
    found = {
        name: fit_log_linear([t for t, _ in pairs], [length for _, length in pairs])
        for name, pairs in series.items()
    }
    return {name: asdict(fit) for name, fit in found.items() if fit is not None}


_COLUMNS = (
    *("name", "fraction", "seed", "taps", "steps", "feature_loss", "rows"),
    *("reply_tokens", "predicted", "predicted_low", "predicted_high"),
    *("measured", "measured_low", "measured_high"),
)


def _write_csv(path: Path, points: Sequence[Record]) -> None:
    depths = max((len(p["predicted"]["n_alpha"]) for p in points), default=0)
    alphas = [f"{depth}-alpha" for depth in range(depths)]
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, [*_COLUMNS, *alphas], extrasaction="ignore")
        writer.writeheader()
        for point in points:
            writer.writerow(_csv_row(point, alphas))


def _csv_row(point: Record, alphas: Sequence[str]) -> Record:
    predicted, measured = point["predicted"], point.get("measured", {})
    low, high = predicted["interval"]
    row = point | {
        "predicted": predicted["acceptance_length"],
        "predicted_low": low,
        "predicted_high": high,
        "measured": measured.get("measured_acceptance_length"),
        **dict(zip(alphas, predicted["n_alpha"], strict=False)),
    }
    if measured:
        low, high = measured["measured_interval"]
        row |= {"measured_low": low, "measured_high": high}
    return row


def _plot_curve(path: Path, curve: Sequence[Record]) -> None:
    figure, axes = _figure()
    tokens = [point["reply_tokens"] for point in curve]
    parts = {"predicted, held-out rows": [p["predicted"] for p in curve]}
    if all("measured" in point for point in curve):
        parts["measured in the engine"] = [
            {
                "acceptance_length": point["measured"]["measured_acceptance_length"],
                "interval": point["measured"]["measured_interval"],
            }
            for point in curve
        ]
    for label, points in parts.items():
        lengths = [point["acceptance_length"] for point in points]
        ends = [point["interval"] for point in points]
        bars = [
            [length - low for length, (low, _) in zip(lengths, ends, strict=True)],
            [high - length for length, (_, high) in zip(lengths, ends, strict=True)],
        ]
        drawn = axes.errorbar(tokens, lengths, bars, fmt="o", capsize=3, label=label)
        if fit := fit_log_linear(tokens, lengths):
            ends_of_line = [min(tokens), max(tokens)]
            line = [
                fit.at_all + fit.per_doubling * math.log2(t / max(tokens))
                for t in ends_of_line
            ]
            axes.plot(ends_of_line, line, "--", color=drawn[0].get_color())
    axes.set_xscale("log", base=2)
    axes.set_xlabel("reply tokens trained on")
    axes.set_ylabel("acceptance length")
    axes.legend()
    figure.savefig(path)


def _plot_grid(path: Path, grid: Sequence[Record]) -> None:
    figure, axes = _figure()
    markers = {"fused": "o-", "top": "s--", "none": "^:"}
    for point in grid:
        alphas = point["predicted"]["n_alpha"]
        loss = "with" if point["feature_loss"] else "no"
        plural = "s" * (point["steps"] > 1)
        label = (
            f"{point['taps']} taps, {point['steps']} step{plural}, {loss} feature loss"
        )
        axes.plot(range(len(alphas)), alphas, markers[point["taps"]], label=label)
    axes.set_xticks(range(max(len(p["predicted"]["n_alpha"]) for p in grid)))
    axes.set_xlabel("n: features of its own that the head has read")
    axes.set_ylabel("n-alpha")
    axes.legend(fontsize=6)
    figure.savefig(path)


def _figure() -> tuple[Any, Any]:
    # Not pyplot: it looks for a screen and keeps every figure alive.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), dpi=150, layout="constrained")
    return figure, figure.subplots()
