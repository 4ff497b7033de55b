"""Predicted acceptance: the walk that serving takes, intervals, domains."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from vllm_eagle3.head_io import read_head
from vllm_eagle3.train.data import Row
from vllm_eagle3.train.evaluate import (
    PredictedAcceptance,
    RowAcceptance,
    Walk,
    WalkStatistics,
    predict_acceptance,
    walk,
)
from vllm_eagle3.train.features import TargetFeatures

Models = Callable[[str], Path]


def test_the_drawn_text_is_walked_as_serving_would() -> None:
    # Accepted at each start: 2 0 1 0 3 0 0 0 (a row of chances each).
    counts = [2, 0, 1, 0, 3, 0, 0, 0]
    accept = [[1.0] * n + [0.0] * (3 - n) for n in counts]
    # Steps start at 0, 3, 4, and end: 2 + 0 + 3 accepted, not the mean over starts.
    assert walk(accept) == Walk(3.0, (2.0, 2.0, 1.0))
    found = WalkStatistics([walk(accept)])
    assert found.acceptance_length == pytest.approx(1 + 5 / 3)
    assert found.cumulative == pytest.approx((2 / 3, 2 / 3, 1 / 3))
    assert found.n_alpha == pytest.approx((2 / 3, 1.0, 0.5))


def test_chances_give_the_mean_of_many_walks() -> None:
    rng = random.Random(3)
    starts, depths, trials = 30, 4, 20_000
    accept = [[rng.random() for _ in range(depths)] for _ in range(starts)]
    steps, reached = 0, [0] * depths
    for _ in range(trials):
        i = 0
        while i < starts:
            steps += 1
            accepted = 0
            while accepted < depths and rng.random() < accept[i][accepted]:
                reached[accepted] += 1
                accepted += 1
            i += accepted + 1
    expected = walk(accept)
    assert expected.steps == pytest.approx(steps / trials, rel=0.01)
    means = [count / trials for count in reached]
    assert expected.reached == pytest.approx(means, rel=0.02)


def test_intervals_shrink_with_rows_and_hold_the_value() -> None:
    rng = random.Random(1)
    walks = [Walk(10.0, (rng.uniform(2, 8), 1.0)) for _ in range(400)]
    few, many = WalkStatistics(walks[:20]), WalkStatistics(walks)
    widths = []
    for part in (few, many):
        low, high = part.length_interval()
        assert low < part.acceptance_length < high
        for (lowest, highest), alpha in zip(
            part.n_alpha_intervals(), part.n_alpha, strict=True
        ):
            assert lowest <= alpha <= highest
        widths.append(high - low)
    assert widths[1] < 0.4 * widths[0]


def test_domains_are_kept_apart() -> None:
    good, bad = Walk(10.0, (9.0,)), Walk(10.0, (1.0,))
    rows = tuple(
        RowAcceptance(kind, w, w) for kind, w in (("code", good), ("chat", bad)) * 3
    )
    by_kind = PredictedAcceptance(rows).by_kind()
    assert list(by_kind) == ["chat", "code"]
    assert by_kind["code"].acceptance_length == pytest.approx(1.9)
    assert by_kind["chat"].sampled.acceptance_length == pytest.approx(1.1)


@pytest.fixture(scope="module")
def greedy_rows(models: Models) -> list[Row]:
    """F2's own greedy texts (its law is a formula, H2 knows it, H4 half of it)."""
    from transformers import AutoModelForCausalLM

    target = AutoModelForCausalLM.from_pretrained(models("f2"), dtype=torch.float32)
    rows = []
    for first in range(40, 52):
        ids = target.generate(
            torch.tensor([[3, first]]), max_new_tokens=30, do_sample=False
        )[0].tolist()
        rows.append(Row("x", tuple(ids), ((2, len(ids), 0.0),)))
    return rows


@pytest.mark.parametrize(("name", "knows_all"), [("h2", True), ("h4", False)])
def test_known_heads_are_judged_as_they_are(
    models: Models, greedy_rows: list[Row], name: str, knows_all: bool
) -> None:
    loaded = read_head(models(name), models("f2"), torch.float32)
    target = TargetFeatures(
        models("f2"), loaded.config.tap_ids, loaded.vocab, torch.float32
    )
    found = predict_acceptance(
        loaded.head, target, loaded.vocab, greedy_rows, 3, 512, precision="fp32"
    )
    assert len(found.rows) == len(greedy_rows) and found.greedy.steps > 50
    if knows_all:
        # Refusals can only come from the ends of the texts.
        assert found.n_alpha[0] == pytest.approx(1.0)
        assert found.acceptance_length > 3.5
        assert found.sampled.n_alpha[0] == pytest.approx(1.0, abs=1e-3)
    else:
        assert 0.1 < found.n_alpha[0] < 0.9
        assert found.acceptance_length < 3
