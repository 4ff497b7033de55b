"""Scratch blocks: how many, and what is said when there is no room for them."""

from __future__ import annotations

import pytest

from vllm_eagle3.drafter import TreeShape
from vllm_eagle3.scratch import (
    MAX_BRANCHES,
    require_room,
    scratch_blocks,
    scratch_branches,
)

MIB = 1 << 20


def test_branches_are_bounded_however_many_requests() -> None:
    shape = TreeShape(16, 4, 6)
    assert scratch_branches(shape, 1) == 15
    assert scratch_branches(shape, 1000) == MAX_BRANCHES
    assert scratch_blocks(shape, 1, block_size=32) == 15 * 2


def test_growth_has_two_frontiers_of_a_small_wide_tree() -> None:
    assert scratch_branches(TreeShape(4, 8, 2), 1) == 16


def test_room_for_trees_and_one_request_is_enough() -> None:
    require_room(available=100 * MIB, scratch=60 * MIB, longest=40 * MIB)


def test_too_little_memory_without_trees_is_left_to_vllm() -> None:
    require_room(available=30 * MIB, scratch=60 * MIB, longest=40 * MIB)


def test_trees_that_leave_too_little_are_refused_with_the_remedy() -> None:
    with pytest.raises(ValueError) as refusal:
        require_room(available=90 * MIB, scratch=60 * MIB, longest=40 * MIB)
    message = str(refusal.value)
    assert "trees need 60 MiB" in message
    assert "leaves 30 of 90" in message
    for remedy in ("num_speculative_tokens", "VLLM_CPU_KVCACHE_SPACE", '"chain"'):
        assert remedy in message
