"""What more data buys, and what each part of the method does: many small trainings.

    curve   nested subsets of one data set, the same held-out rows, the same draft
            vocabulary: only the amount of data differs
    grid    {feature loss on, off} x {1, n steps of training-time test}
            x {fused taps, top tap, none} at one amount of data

Each point is a run of the trainer in a folder of its own. A point that is done is
read, one that was stopped goes on, so the whole can be stopped at any time.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import product
from pathlib import Path
from typing import Any, Literal

from ..bench.results import write_json
from ..train.config import LossConfig, TrainConfig
from ..train.data import fingerprint
from ..train.start import RunData
from ..train.trainer import Trainer

Record = dict[str, Any]
Same = Literal["epochs", "steps"]
# Acceptance of an exported head in the engine; see `scale_command`.
Measure = Callable[[Path], Record]
# EAGLE-1 weighs its feature regression ten times its cross-entropy.
FEATURE_WEIGHT = 10.0


@dataclass(frozen=True)
class Point:
    """One training: `config.out` is its folder, `labels` say what it stands for."""

    name: str
    config: TrainConfig
    fraction: Fraction
    labels: Record


def curve_points(
    base: TrainConfig,
    out: Path,
    fractions: Sequence[Fraction],
    seeds: Sequence[int],
    same: Same,
) -> list[Point]:
    """Points of the curve, from little data to all.

    Args:
        same: `epochs`: each row is seen as often, so less data is less training;
            `steps`: as much training everywhere, so less data is seen more often.
    """
    points = []
    for fraction, seed in product(sorted(set(fractions)), seeds):
        name = f"data-{fraction.numerator}_{fraction.denominator}-seed{seed}"
        epochs = base.epochs / float(fraction) if same == "steps" else base.epochs
        changes = {"epochs": epochs, "seed": seed}
        points.append(_point(base, out, name, fraction, changes, {}))
    return points


def grid_points(
    base: TrainConfig, out: Path, fraction: Fraction, feature_weight: float
) -> list[Point]:
    """Points of the ablation grid; that of the paper is the first."""
    points = []
    for taps, steps, weight in product(
        ("fused", "top", "none"), (base.num_steps, 1), (0.0, feature_weight)
    ):
        labels = {"taps": taps, "steps": steps, "feature_loss": weight > 0}
        name = f"grid-{taps}-{steps}step-{'feature' if weight else 'plain'}"
        changes = {
            "taps": taps,
            "num_steps": steps,
            # The preset of the reference has no feature loss to switch on.
            "loss": LossConfig(kind=base.loss.kind, feature_weight=weight),
        }
        points.append(_point(base, out, name, fraction, changes, labels))
    return points


def _point(
    base: TrainConfig,
    out: Path,
    name: str,
    fraction: Fraction,
    changes: Record,
    labels: Record,
) -> Point:
    settings = base.model_dump() | changes | {"out": str(out / "points" / name)}
    if base.features_dir is not None:
        # Features depend on the taps, so a choice of taps has a folder of its own.
        taps = settings["taps"]
        label = taps if isinstance(taps, str) else "-".join(map(str, taps))
        settings["features_dir"] = str(Path(base.features_dir) / label)
    return Point(name, TrainConfig.model_validate(settings), fraction, labels)


def run_point(
    point: Point,
    data: RunData,
    report: Callable[[Record], None],
    measure: Measure | None = None,
) -> Record:
    """Train a point, unless it is done; return what came out.

    Args:
        data: all rows; the point takes the first part of those trained on, so that
            smaller subsets lie inside larger ones.
        measure: asked for the engine's acceptance of the exported head.

    Raises:
        ValueError: its folder holds a point of another configuration or other data.
    """
    part = _first(data, point.fraction)
    record = {
        "name": point.name,
        "fraction": float(point.fraction),
        **point.labels,
        "seed": point.config.seed,
        "rows": len(part.train),
        "reply_tokens": part.reply_tokens,
        "data": fingerprint(part.train),
        "config": point.config.model_dump(mode="json", exclude={"out", "features_dir"}),
    }
    path = Path(point.config.out) / "point.json"
    done = _read_done(path, record)
    if done is None:
        best = Trainer(point.config, report, data=part).train()
        done = record | {"predicted": best.summary, "by_kind": _by_kind(path.parent)}
        write_json(path, done)
    if measure is not None and "measured" not in done:
        done = done | {"measured": measure(path.parent / "head")}
        write_json(path, done)
    return done


def _first(data: RunData, fraction: Fraction) -> RunData:
    count = math.ceil(fraction * len(data.train))
    return replace(data, train=data.train[:count])


def _read_done(path: Path, record: Record) -> Record | None:
    if not path.is_file():
        return None
    done: Record = json.loads(path.read_text(encoding="utf-8"))
    wanted = json.loads(json.dumps(record))
    for key, value in wanted.items():
        if done.get(key) != value:
            raise ValueError(
                f"{path}: {key}: the point was run with {done.get(key)}, now wanted is "
                f"{value}; choose another --out, or delete the point's folder"
            )
    return done


def _by_kind(out: Path) -> Record:
    """Acceptance length and interval per domain, where the best head was found."""
    lines = (out / "log.jsonl").read_text(encoding="utf-8").splitlines()
    evals = [r for r in map(json.loads, lines) if r["event"] == "eval"]
    return max(evals, key=lambda record: record["acceptance_length"])["by_kind"]
