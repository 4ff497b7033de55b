"""Plans are judged by going through past drafts as the engine would."""

from __future__ import annotations

import numpy as np
import pytest

from vllm_eagle3.draft_samples import MIN_SAMPLES, DraftSamples
from vllm_eagle3.drafter import TreeShape


def chains(count: int, length: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    probabilities = rng.random((count, length)).cumprod(axis=1)
    depths = np.tile(np.arange(1, length + 1), (count, 1))
    return probabilities, depths, np.zeros((count, length), dtype=bool)


def test_replayed_chains_end_where_an_engine_would_end_them() -> None:
    values, depths, branches = chains(24, 4)
    samples = DraftSamples(TreeShape.chain(4))
    samples.add(values, depths, branches)
    gains, branches, grown = samples.replay(4, num_reqs=2, min_masses=(0.9, 0.6, 0.3))
    assert gains.shape == (12, 9) and grown.shape == (12,)
    for step, pair in enumerate(values.reshape(12, 2, 4)):
        depth = 1
        while depth < 4 and pair[:, depth - 1].sum() >= (0.9, 0.6, 0.3)[depth - 1]:
            depth += 1
        best = sorted(pair[:, :depth].ravel(), reverse=True)
        assert grown[step] == depth
        assert gains[step, 0] == 0
        assert gains[step, 1 : 2 * depth + 1] == pytest.approx(np.cumsum(best))
        assert gains[step, -1] == pytest.approx(sum(best))
    assert 1 < grown.mean() < 4
    assert branches.shape == gains.shape and not branches.any()


def test_the_mass_of_a_tree_s_level_is_that_of_the_nodes_that_grow_on() -> None:
    samples = DraftSamples(TreeShape(6, 2, 3))
    values = np.array([[0.5, 0.3, 0.3, 0.2, 0.1, 0.0]] * MIN_SAMPLES)
    branches = np.array([[False, True, False, True, False, False]] * MIN_SAMPLES)
    samples.add(values, np.array([[1, 1, 2, 2, 2, 0]] * MIN_SAMPLES), branches)
    assert (samples.replay(3, 1, (0.79, 0.49))[2] == 3).all()
    assert (samples.replay(3, 1, (0.79, 0.51))[2] == 2).all()
    _, branches, grown = samples.replay(3, 1, (0.81, 0.0))
    assert (grown == 1).all()
    # Of the likeliest two nodes the second is a branch.
    assert (branches[:, :3] == [0, 0, 1]).all()


def test_old_drafts_are_forgotten_and_larger_batches_repeat_the_few() -> None:
    samples = DraftSamples(TreeShape.chain(4))
    samples.add(*chains(10, 4))
    assert not samples.are_enough
    samples.add(
        np.full((500, 2), 0.5), np.array([[1, 2]] * 500), np.zeros((500, 2), dtype=bool)
    )
    assert samples.are_enough and len(samples) == 80
    gains, _, _ = samples.replay(1, num_reqs=200, min_masses=())
    assert gains.shape == (1, 801)
    assert gains[0, -1] == pytest.approx(100)
