"""`scale`: nested data, points that go on, a fit that finds a known line, the grid."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from tests.models import random_llama
from vllm_eagle3.evaluation import scale, scale_command
from vllm_eagle3.evaluation.scale import curve_points, run_point
from vllm_eagle3.evaluation.scale_command import ScaleOptions, run_scale_command
from vllm_eagle3.evaluation.scale_report import fit_log_linear
from vllm_eagle3.train.config import read_config
from vllm_eagle3.train.start import read_run_data, read_target_config

Models = Callable[[str], Path]
NO_ENGINE = "no:engine"


@pytest.fixture(scope="module")
def config(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small run on F1's own greedy replies of two kinds."""
    from transformers import AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("scale")
    model: Any = AutoModelForCausalLM.from_pretrained(models("f1"), dtype=torch.float32)
    with (folder / "rows.jsonl").open("w") as file:
        for number, prompt in enumerate(random_llama.known_prompts()[:6] * 3):
            ids = model.generate(
                torch.tensor([prompt]), max_new_tokens=24, do_sample=False
            )[0].tolist()
            spans = [[len(prompt), len(ids), 0.0]]
            row = {"kind": "ab"[number % 2], "ids": ids, "spans": spans}
            file.write(json.dumps(row) + "\n")
    path = folder / "run.yaml"
    path.write_text(
        f"target: {models('f1')}\nrows: [{folder / 'rows.jsonl'}]\nout: unused\n"
        "draft_vocab_size: 256\nnum_steps: 3\nepochs: 6\nlearning_rate: 3.0e-3\n"
        "tokens_per_batch: 256\nheld_out_rows: 4\ndraft_tokens: 3\n"
        f"features_dir: {folder / 'features'}\n"
    )
    return path


def run(options: ScaleOptions) -> dict[str, Any]:
    return run_scale_command(options, NO_ENGINE, Console(quiet=True))


def test_curve_is_trained_reported_and_not_trained_again(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ScaleOptions(config, tmp_path / "out", fractions="1,1/4,1/2")
    results = run(options)
    tokens = [point["reply_tokens"] for point in results["curve"]]
    assert tokens == sorted(set(tokens)) and len(tokens) == 3
    lengths = [p["predicted"]["acceptance_length"] for p in results["curve"]]
    # The held-out rows repeat texts of the training rows: all data know them all.
    assert lengths[-1] > lengths[0] >= 1
    fit = results["fits"]["predicted"]
    assert fit["per_doubling"] > 0 and fit["interval"][0] < fit["per_doubling"]
    assert {"predicted, a", "predicted, b"} <= set(results["fits"])
    assert (tmp_path / "out" / "scale.png").read_bytes().startswith(b"\x89PNG")
    with (tmp_path / "out" / "scale.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [float(row["predicted"]) for row in rows] == lengths
    assert [len(row["0-alpha"]) > 0 for row in rows] == [True] * 3

    def no_training(*_: Any, **__: Any) -> None:
        raise AssertionError("a point that is done was trained again")

    monkeypatch.setattr(scale, "Trainer", no_training)
    assert run(options) == results
    with pytest.raises(ValueError, match="choose another --out"):
        run(replace(options, overrides=("epochs=7",)))


def test_smaller_subsets_lie_inside_larger_ones_and_the_rest_is_equal(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, Any] = {}

    class Seen:
        def __init__(self, settings: Any, report: Any, data: Any) -> None:
            seen[settings.out] = (settings, data)

        def train(self) -> None:
            raise KeyboardInterrupt

    monkeypatch.setattr(scale, "Trainer", Seen)
    base = read_config(config)
    data = read_run_data(base, read_target_config(base))
    fractions = [Fraction(1, 2), Fraction(1, 4), Fraction(1)]
    points = curve_points(base, tmp_path, fractions, [0, 1], "steps")
    for point in points:
        with pytest.raises(KeyboardInterrupt):
            run_point(point, data, print)
    quarter, half, whole = (
        seen[point.config.out] for point in points if point.config.seed == 1
    )
    assert quarter[1].train == half[1].train[: len(quarter[1].train)]
    assert half[1].train == whole[1].train[: len(half[1].train)]
    assert whole[1].train == data.train
    assert quarter[1].held_out == half[1].held_out == data.held_out
    # As many steps everywhere, and one draft vocabulary.
    assert [s[0].epochs for s in (quarter, half, whole)] == [24, 12, 6]
    assert torch.equal(quarter[1].reply_counts, whole[1].reply_counts)


def test_grid_has_every_combination_once(config: Path, tmp_path: Path) -> None:
    options = ScaleOptions(
        config, tmp_path / "out", curve=False, grid=True, grid_fraction="1"
    )
    results = run(replace(options, overrides=("epochs=1",)))
    cells = {(p["taps"], p["steps"], p["feature_loss"]) for p in results["grid"]}
    assert len(results["grid"]) == len(cells) == 12
    assert results["grid"][0]["name"] == "grid-fused-3step-plain"
    for point in results["grid"]:
        assert point["config"]["num_steps"] == point["steps"]
        assert (point["config"]["loss"]["feature_weight"] > 0) == point["feature_loss"]
        assert len(point["predicted"]["n_alpha"]) == 3
    # Different trainings: were a switch without effect, cells would coincide.
    lengths = [
        point["predicted"]["sampled_acceptance_length"] for point in results["grid"]
    ]
    assert len(set(lengths)) == 12
    assert (tmp_path / "out" / "grid.png").read_bytes().startswith(b"\x89PNG")


def test_engine_is_asked_where_prompts_are_given(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def evaluate(options: Any, engine: str, console: Console) -> dict[str, Any]:
        assert engine == NO_ENGINE and options.prompts == ("p.jsonl",)
        assert (Path(options.head) / "config.json").is_file()
        asked.append(options.head)
        return {"measured_acceptance_length": 1.5, "measured_interval": [1.4, 1.6]}

    monkeypatch.setattr(scale_command, "evaluate", evaluate)
    options = ScaleOptions(
        config, tmp_path / "out", fractions="1/2,1", overrides=("epochs=1",)
    )
    assert "measured" not in run(options)["fits"]
    # Points that were trained without are measured afterwards.
    results = run(replace(options, prompts=("p.jsonl",)))
    assert len(asked) == 2 and results["fits"]["measured"]["at_all"] == 1.5


def test_fit_finds_a_line_and_its_interval_covers_it() -> None:
    tokens = [1000 * 2**k for k in range(5)]
    exact = fit_log_linear(tokens, [2 + 0.1 * k for k in range(5)])
    assert exact is not None and exact.interval is not None
    assert exact.per_doubling == pytest.approx(0.1)
    assert exact.at_all == pytest.approx(2.4)
    noisy = fit_log_linear(tokens, [2.03, 2.08, 2.21, 2.28, 2.41])
    assert noisy is not None and noisy.interval is not None
    assert noisy.interval[0] < 0.1 < noisy.interval[1]
    assert fit_log_linear([100, 100], [1.5, 1.6]) is None
    two = fit_log_linear([100, 400], [1.5, 1.7])
    assert two is not None and two.interval is None
    assert math.isclose(two.per_doubling, 0.1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"fractions": "1/8,2"}, "fractions: got '2'"),
        ({"fractions": "1/0"}, "fractions: got '1/0'"),
        ({"seeds": "0,x"}, "seeds: got '0,x'"),
        ({"same": "tokens"}, "want epochs or steps"),
        ({"curve": False}, "neither curve nor grid"),
        ({"overrides": ("epoch=1",)}, "epoch: unknown key"),
    ],
)
def test_bad_options_are_named(
    config: Path, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        run(replace(ScaleOptions(config, tmp_path / "out"), **change))
    assert not (tmp_path / "out").exists()
