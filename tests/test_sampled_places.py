"""What is learnt of sampled trees by place, and what shapes are worth by it."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from vllm_eagle3.drafter import TreeShape
from vllm_eagle3.sampled_drafter import sampled_shape
from vllm_eagle3.sampled_places import SampledPlaces, places_of
from vllm_eagle3.tree_runs import depth_first, num_branches

TREES = [TreeShape(nodes, 4, 3) for nodes in (2, 4, 8, 16)]


def gain(places: SampledPlaces, limits: TreeShape) -> float:
    return float(places.gains[places.limits.index(limits)])


def test_places_are_the_turns_of_a_path() -> None:
    # root -> 0, 3; 0 -> 1, 2; 3 -> 4
    assert places_of((-1, 0, 0, -1, 3)) == ((0,), (0, 0), (0, 1), (1,), (1, 0))


def test_a_place_is_the_same_in_either_order_of_nodes() -> None:
    by_level = np.array([sampled_shape(TREES[-1]).parents])
    order = depth_first(by_level)[0]
    new = np.argsort(order)
    parents = [int(new[p]) if p >= 0 else -1 for p in by_level[0][order]]
    by_depth = places_of(tuple(parents))
    assert list(by_depth) == [places_of(tuple(by_level[0]))[n] for n in order]


def test_rows_levels_and_branches_are_those_of_the_shapes() -> None:
    places = SampledPlaces([TreeShape.chain(3), TREES[-1]])
    tree = sampled_shape(TREES[-1])
    parents = np.array([tree.parents])
    order = depth_first(parents)
    new = np.argsort(order, axis=1)[0]
    moved = np.array([new[p] if p >= 0 else -1 for p in parents[0][order[0]]])
    assert places.rows.tolist() == [3, 16]
    assert places.levels.tolist() == [2, len(tree.children) - 1]
    assert places.head_rows.tolist() == [2, tree.num_parents - 1]
    assert places.branches.tolist() == [0, num_branches(moved)]


def test_at_first_a_larger_shape_promises_more() -> None:
    gains = SampledPlaces(TREES).gains.tolist()
    assert all(small < large for small, large in pairwise(gains))


def test_places_are_learnt_across_shapes() -> None:
    places = SampledPlaces(TREES)
    small = sampled_shape(TREES[1])
    before = gain(places, TREES[-1])
    for _ in range(500):
        places.observe(small.parents, np.zeros(small.num_nodes, dtype=bool))
    assert gain(places, TREES[1]) == pytest.approx(0, abs=0.05)
    # What was refused in the small tree is not expected in the large one.
    assert gain(places, TREES[-1]) < before - 0.6


def test_a_text_that_changes_is_followed() -> None:
    places = SampledPlaces([TreeShape.chain(1)])
    for accepted in (False, True):
        for _ in range(3000):
            places.observe([-1], np.array([accepted]))
        assert gain(places, TreeShape.chain(1)) == pytest.approx(
            float(accepted), abs=0.1
        )


def test_first_nodes_of_a_tree_and_strange_places_are_taken() -> None:
    places = SampledPlaces([TreeShape.chain(2)])
    places.observe([-1], np.array([True]))
    places.observe([-1, -1, -1], np.array([False, False, True]))
    assert 0 < gain(places, TreeShape.chain(2)) < 1
