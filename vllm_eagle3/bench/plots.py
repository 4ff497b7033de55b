"""The plots of a benchmark, made from results.json: one function a figure."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import Any

from vllm_eagle3.bench.statistics import crossover
from vllm_eagle3.bench.tables import (
    STEP_PARTS,
    Record,
    distinct,
    smallest_batch,
    speculative,
)
from vllm_eagle3.bench.workload import MIXED

_WIDTH, _HEIGHT = 7.5, 4.2  # inches of one panel
_BAR = 0.3
_DPI = 120
_ASIDE = 1.02


def draw_all(results: Record) -> dict[str, bytes]:
    """Name -> PNG of every figure that the results hold data for.

    Raises:
        ValueError: matplotlib is not installed.
    """
    drawn = {name: draw(results) for name, draw in _FIGURES.items()}
    return {name: _png(figure) for name, figure in drawn.items() if figure is not None}


def _panels(titles: Sequence[str]) -> tuple[Any, list[Any]]:
    """A figure with one panel a title, side by side."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ValueError(
            "plots: matplotlib is not installed; pip install 'vllm-eagle3[plots]'"
        ) from error
    # Without pyplot there is no backend to choose and no state to clean up.
    figure = Figure(figsize=(_WIDTH * len(titles), _HEIGHT), layout="constrained")
    panels = list(figure.subplots(1, len(titles), squeeze=False)[0])
    for panel, title in zip(panels, titles, strict=True):
        panel.set_title(title)
        panel.grid(alpha=0.3)
    return figure, panels


def _png(figure: Any) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=_DPI)
    return buffer.getvalue()


def _by_temperature(runs: Sequence[Record]) -> dict[str, list[Record]]:
    return {
        f"temperature {value:g}": [run for run in runs if run["temperature"] == value]
        for value in distinct(runs, "temperature")
    }


def draw_speed_up(results: Record) -> Any:
    """Speed-up by batch size with intervals; a star marks where a gain ends."""
    known = [r for r in speculative(results["runs"]) if r.get("speed_up") is not None]
    if not known:
        return None
    groups = _by_temperature(known)
    figure, panels = _panels(list(groups))
    for panel, runs in zip(panels, groups.values(), strict=True):
        panel.axhline(1, color="black", linewidth=1, label="off")
        for index, method in enumerate(distinct(runs, "method")):
            some = [run for run in runs if run["method"] == method]
            _draw_speed_ups(panel, index, method, some)
        panel.set_xscale("log", base=2)
        sizes = distinct(runs, "batch")
        panel.set_xticks(sizes, [str(size) for size in sizes])
        panel.set_xlabel("batch size")
        panel.set_ylabel("speed-up over off")
        panel.legend(fontsize="small")
    return figure


def _draw_speed_ups(
    panel: Any, index: int, method: str, runs: Sequence[Record]
) -> None:
    color = f"C{index}"
    sizes = [run["batch"] for run in runs]
    # Side by side, so that intervals do not cover each other.
    places = [size * _ASIDE**index for size in sizes]
    speed_ups = [run["speed_up"] for run in runs]
    below = [run["speed_up"] - run["speed_up_interval"][0] for run in runs]
    above = [run["speed_up_interval"][1] - run["speed_up"] for run in runs]
    panel.errorbar(
        *(places, speed_ups, [below, above]),
        **{"fmt": "o-", "capsize": 3, "color": color, "label": method},
    )
    end = crossover(sizes, speed_ups)
    if end is not None:
        panel.plot([end], [1], marker="*", markersize=14, color=color)
        panel.annotate(
            f"{end:.0f}", (end, 1), (0, 8), textcoords="offset points", color=color
        )


def draw_acceptance_by_depth(results: Record) -> Any:
    """Acceptance at each depth given acceptance before it, with intervals."""
    some = smallest_batch(results["runs"])
    runs = [r for r in speculative(some) if r["conditional_acceptance"]]
    if not runs:
        return None
    groups = _by_temperature(runs)
    figure, panels = _panels([f"{name}, batch {runs[0]['batch']}" for name in groups])
    for panel, members in zip(panels, groups.values(), strict=True):
        for run in members:
            rates = [r for r in run["conditional_acceptance"] if r["rate"] is not None]
            depths = list(range(1, len(rates) + 1))
            values = [entry["rate"] for entry in rates]
            below = [entry["rate"] - entry["low"] for entry in rates]
            above = [entry["high"] - entry["rate"] for entry in rates]
            panel.errorbar(
                *(depths, values, [below, above]),
                **{"fmt": "o-", "capsize": 3, "label": run["method"]},
            )
        panel.set_ylim(0, 1)
        panel.set_xlabel("depth of the draft token")
        panel.set_ylabel("accepted, if all before it were")
        panel.legend(fontsize="small")
    return figure


def draw_acceptance_by_task(results: Record) -> Any:
    """Acceptance length of each method on each task."""
    some = speculative(smallest_batch(results["runs"]))
    runs = [run for run in some if set(run["tasks"]) != {MIXED}]
    if not runs:
        return None
    groups = _by_temperature(runs)
    figure, panels = _panels([f"{name}, batch {runs[0]['batch']}" for name in groups])
    for panel, members in zip(panels, groups.values(), strict=True):
        tasks = list(members[0]["tasks"])
        width = 0.8 / len(members)
        for index, run in enumerate(members):
            lengths = [run["tasks"][task]["acceptance_length"] or 0 for task in tasks]
            places = [
                place + (index + 0.5) * width - 0.4 for place in range(len(tasks))
            ]
            panel.bar(places, lengths, width, label=run["method"])
        panel.axhline(1, color="black", linewidth=1)
        panel.set_xticks(range(len(tasks)), tasks, rotation=30, ha="right")
        panel.set_ylabel("acceptance length (tokens a step)")
        panel.legend(fontsize="small")
    return figure


def draw_step_times(results: Record) -> Any:
    """Milliseconds of a mean step, split into its parts."""
    runs = [run for run in results["runs"] if run.get("step")]
    if not runs:
        return None
    groups = _by_temperature(runs)
    figure, panels = _panels(list(groups))
    for panel, members in zip(panels, groups.values(), strict=True):
        names = [f"{run['method']}, batch {run['batch']}" for run in members]
        start = [0.0] * len(members)
        for part in STEP_PARTS:
            lengths = [run["step"][part] for run in members]
            panel.barh(names, lengths, left=start, label=part)
            start = [a + b for a, b in zip(start, lengths, strict=True)]
        panel.invert_yaxis()
        panel.set_xlabel("milliseconds a step")
        panel.legend(fontsize="small", ncols=4, loc="upper center")
        # Room for the legend above the first bar.
        panel.set_ylim(top=-1.6)
    rows = max(map(len, groups.values()))
    figure.set_figheight(max(_HEIGHT, _BAR * rows + 1))
    return figure


def draw_reliability(results: Record) -> Any:
    """What the head promised against what was accepted; the diagonal is calibrated."""
    entries = results.get("reliability", [])
    if not entries:
        return None
    titles = [
        f"temperature {entry['temperature']:g}, expected calibration error "
        f"{entry['expected_calibration_error']:.3f}"
        for entry in entries
    ]
    figure, panels = _panels(titles)
    for panel, entry in zip(panels, entries, strict=True):
        predicted = [part["predicted"] for part in entry["bins"]]
        accepted = [part["accepted"] for part in entry["bins"]]
        most = max(part["nodes"] for part in entry["bins"])
        areas = [30 + 300 * part["nodes"] / most for part in entry["bins"]]
        panel.plot([0, 1], [0, 1], color="black", linewidth=1, label="calibrated")
        panel.plot(predicted, accepted, color="C0", linewidth=1)
        panel.scatter(predicted, accepted, areas, label="area: number of nodes")
        panel.set_xlabel("the head's probability of the draft token")
        panel.set_ylabel("accepted share")
        panel.legend(fontsize="small")
    return figure


_FIGURES: dict[str, Callable[[Record], Any]] = {
    "speed_up_by_batch": draw_speed_up,
    "acceptance_by_depth": draw_acceptance_by_depth,
    "acceptance_by_task": draw_acceptance_by_task,
    "step_times": draw_step_times,
    "reliability": draw_reliability,
}
