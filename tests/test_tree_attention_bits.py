"""Ancestor bits: the drawn tree, the 64th node, and agreement with DraftTree."""

from __future__ import annotations

import pytest
import torch

from tests.tree_cases import chain, deep, random_tree, wide
from vllm_eagle3.tree import DraftTree
from vllm_eagle3.tree_bits import ancestor_bits, unpack_bits, visible_keys

DRAWN = torch.tensor([[-1, -1, 0, 0]])  # the tree that tree_bits.py draws


def test_drawn_tree_has_the_drawn_bits() -> None:
    assert ancestor_bits(DRAWN).tolist() == [[0b0001, 0b0010, 0b0101, 0b1001]]


def test_drawn_tree_has_the_drawn_rows() -> None:
    visible, first = visible_keys(ancestor_bits(DRAWN)[0], 2, None)
    assert first == 0
    assert visible.int().tolist() == [
        [1, 1, 1, 0, 0, 0, 0],
        [1, 1, 1, 1, 0, 0, 0],
        [1, 1, 1, 0, 1, 0, 0],
        [1, 1, 1, 1, 0, 1, 0],
        [1, 1, 1, 1, 0, 0, 1],
    ]


def test_window_counts_positions_not_rows() -> None:
    # Root at position 2, nodes 0 and 1 at 3, nodes 2 and 3 at 4; a window of 2 shows
    # a row its own position and the one before.
    visible, first = visible_keys(ancestor_bits(DRAWN)[0], 2, 2)
    assert first == 1
    assert visible.int().tolist() == [
        [1, 1, 0, 0, 0, 0],
        [0, 1, 1, 0, 0, 0],
        [0, 1, 0, 1, 0, 0],
        [0, 0, 1, 0, 1, 0],
        [0, 0, 1, 0, 0, 1],
    ]


@pytest.mark.parametrize("num_nodes", [0, 1, 2, 3, 33, 64])
def test_bits_are_the_ancestor_mask(num_nodes: int) -> None:
    trees = [chain(num_nodes), wide(num_nodes), deep(num_nodes)]
    trees += [random_tree(num_nodes, seed) for seed in range(20)]
    parents = torch.tensor(trees, dtype=torch.int64)
    tree = DraftTree(parents, parents, parents.float())
    bits = ancestor_bits(parents)
    assert bits.dtype == torch.int64 and bits.shape == parents.shape
    assert torch.equal(unpack_bits(bits), tree.ancestor_mask())


def test_all_64_bits_are_used() -> None:
    assert int(ancestor_bits(torch.tensor([chain(64)]))[0, 63]) == -1


def test_more_than_64_nodes_are_refused() -> None:
    with pytest.raises(ValueError, match="got 65 nodes, want at most 64"):
        ancestor_bits(torch.tensor([chain(65)]))
