"""Acceptance does not depend on caches, pieces of prompts, company, or what is asked.

Greedy and in float32 the text is the same, so the drafts are, too: a head that missed a
cached or preempted part of its prompt would accept less.
"""

from __future__ import annotations

import random
from typing import Any

import pytest

from tests.engine_run import EngineHandle
from tests.tree_engine import counter, tree_settings

pytest.importorskip("vllm")
pytestmark = pytest.mark.engine

SHAPES: dict[str, dict[str, Any]] = {
    "chain": {"num_speculative_tokens": 5},
    "tree": tree_settings(4, 5, 12),
}
ROOMY: dict[str, Any] = {"block_size": 32, "max_model_len": 256}
SETTINGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "one at a time": ({"max_num_seqs": 1}, {}),
    "prompts in pieces": ({"max_num_batched_tokens": 256}, {}),
    "cached prompts": ({"enable_prefix_caching": True}, {}),
    "preempted": ({"num_gpu_blocks_override": 40}, {}),
    "log-probabilities": ({}, {"logprobs": 2}),
    "top-p and min-p": ({}, {"min_p": 0.05, "top_p": 0.99}),
}
# Requests differ by how many of their last drafts are cut off at their end.
TOLERANCE = 0.01


def prompts() -> list[list[int]]:
    """Different lengths, from the middle of one block to the fourth."""
    draw = random.Random(5)
    return [
        [draw.randrange(3, 97) for _ in range(draw.randrange(8, 120))]
        for _ in range(24)
    ]


def acceptance_length(handle: EngineHandle, **asked: Any) -> float:
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True, **asked)
    before = _counts(handle)
    handle.run(prompts(), params)
    drafts, accepted = (b - a for a, b in zip(before, _counts(handle), strict=True))
    return 1 + accepted / drafts


def _counts(handle: EngineHandle) -> tuple[float, float]:
    names = ("num_drafts", "num_accepted_tokens")
    return tuple(counter(handle, f"vllm:spec_decode_{name}") for name in names)  # type: ignore[return-value]


@pytest.fixture(scope="module")
def usual(engine: Any) -> dict[str, float]:
    return {
        shape: acceptance_length(engine("f3", "h2", **ROOMY, **options))
        for shape, options in SHAPES.items()
    }


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("setting", SETTINGS)
def test_acceptance_length_stays(
    engine: Any, usual: dict[str, float], setting: str, shape: str
) -> None:
    settings, asked = SETTINGS[setting]
    handle = engine("f3", "h2", **ROOMY | settings, **SHAPES[shape])
    first = acceptance_length(handle, **asked)
    again = acceptance_length(handle, **asked)
    assert usual[shape] > 1.5
    assert first == pytest.approx(usual[shape], rel=TOLERANCE)
    assert again == pytest.approx(usual[shape], rel=TOLERANCE)
    if setting == "cached prompts":
        assert counter(handle, "vllm:prefix_cache_hits") > 0
    if setting == "preempted":
        assert counter(handle, "vllm:num_preemptions") > 0
