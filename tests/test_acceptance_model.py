"""Confidence becomes probability; each request gets its own factor, with care."""

from __future__ import annotations

import numpy as np
import pytest

from vllm_eagle3.acceptance_model import AcceptanceModel


def trained(truth: float, count: int = 3000, req_id: str = "all") -> AcceptanceModel:
    """A model that has seen a head whose nodes are accepted `truth` times as often as
    it is confident."""
    rng, model = np.random.default_rng(0), AcceptanceModel()
    for _ in range(count):
        scores = np.log(rng.uniform(0.01, 1.0, 4))
        accepted = rng.random(4) < truth * np.exp(scores)
        model.observe([req_id], [scores], [accepted])
    return model


def test_before_anything_was_seen_confidence_is_believed() -> None:
    confidence = np.array([0.05, 0.3, 0.6, 0.9])
    predicted = AcceptanceModel().predict(np.log(confidence))
    assert predicted == pytest.approx(confidence, rel=0.1)


@pytest.mark.parametrize("truth", [1.0, 0.6])
def test_confidence_is_corrected(truth: float) -> None:
    confidence = np.array([0.1, 0.25, 0.5, 0.75])
    predicted = trained(truth).predict(np.log(confidence))
    assert predicted == pytest.approx(truth * confidence, abs=0.05)


def test_a_child_is_never_likelier_than_its_parent() -> None:
    model = AcceptanceModel()
    # Middling confidence was always right, high confidence never.
    for confidence, right in ((0.5, True), (0.9, False)):
        for _ in range(100):
            model.observe(["a"], [np.log([confidence])], [np.array([right])])
    predicted = model.predict(np.log(np.linspace(0.001, 1, 500)))
    assert (np.diff(predicted) >= 0).all()


def test_a_request_unlike_the_others_is_corrected_little_by_little() -> None:
    model = trained(1.0)
    assert model.factor("new") == 1.0
    factors = []
    for _ in range(20):
        model.observe(["new"], [np.log([0.5, 0.4])], [np.zeros(2, dtype=bool)])
        factors.append(model.factor("new"))
    assert 0.7 < factors[0] < 1.0
    assert factors == sorted(factors, reverse=True)
    assert factors[-1] < 0.4
    model.forget("new")
    assert model.factor("new") == 1.0


def test_each_request_of_a_step_is_credited_with_its_own_nodes() -> None:
    model = AcceptanceModel()
    lengths = {"a": 3, "b": 1, "c": 2}
    scores = [np.log(np.full(length, 0.5)) for length in lengths.values()]
    accepted = [np.full(length, req_id == "c") for req_id, length in lengths.items()]
    model.observe(list(lengths), scores, accepted)
    assert model.factor("c") > 1.0
    assert model.factor("a") < model.factor("b") < 1.0
    assert model.trials.sum() == 6 and model.accepted.sum() == 2
    model.observe([], [], [])
    assert model.trials.sum() == 6


def test_error_of_the_confidence() -> None:
    assert trained(1.0).error() < 0.05
    # Mean confidence is about a half, so 0.4 of it is too much.
    assert trained(0.6).error() == pytest.approx(0.2, abs=0.05)
