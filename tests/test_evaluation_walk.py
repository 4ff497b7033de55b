"""Counting along a text: by hand, and against a loop that emits token by token."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_eagle3.acceptance import (
    DraftCounts,
    acceptance_length,
    acceptance_length_interval,
)
from vllm_eagle3.evaluation.walk import walk


def test_example_of_the_module() -> None:
    # Prompt at 0..1, reply a..f at 2..7; drafts begin at the index before the token
    # that is known last: after a at 1, after d at 4.
    hits = torch.zeros(9, 2, dtype=torch.bool)
    hits[1] = True
    hits[4, 0] = True
    counts = walk(hits, 2, 6)
    assert counts == DraftCounts(2, 4, 3, (2, 1))
    assert acceptance_length(counts) == 2.5


def test_a_step_is_counted_beyond_the_end_of_the_reply() -> None:
    hits = torch.ones(12, 4, dtype=torch.bool)
    assert walk(hits, 3, 3) == DraftCounts(1, 4, 4, (1, 1, 1, 1))


def test_a_reply_of_one_token_needs_no_step() -> None:
    assert walk(torch.ones(4, 2, dtype=torch.bool), 2, 1) == DraftCounts(
        0, 0, 0, (0, 0)
    )


def test_a_hit_behind_a_miss_is_not_accepted() -> None:
    hits = torch.tensor([[False, True]] * 6)
    assert walk(hits, 1, 3) == DraftCounts(2, 4, 0, (0, 0))


@given(st.integers(0, 2**32), st.integers(1, 5), st.integers(1, 30))
def test_equals_an_engine_that_emits_token_by_token(
    seed: int, num_drafts: int, num_reply: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    hits = torch.rand(4 + num_reply + num_drafts, num_drafts, generator=generator) < 0.6
    emitted, drafts, accepted = 1, 0, 0
    while emitted < num_reply:
        start = 3 + emitted - 1
        drafts, emitted = drafts + 1, emitted + 1
        for depth in range(num_drafts):
            if not hits[start, depth]:
                break
            accepted, emitted = accepted + 1, emitted + 1
    counts = walk(hits, 4, num_reply)
    assert (counts.drafts, counts.accepted_tokens) == (drafts, accepted)


def test_interval_covers_the_figure_and_shrinks_with_more_texts() -> None:
    texts = [DraftCounts(10, 20, n, (n, 0)) for n in (2, 5, 8, 4)]
    low, high = acceptance_length_interval(texts) or (0, 0)
    assert low < 1 + 19 / 40 < high
    narrow = acceptance_length_interval(texts * 25) or (0, 0)
    assert narrow[1] - narrow[0] < (high - low) / 3
    assert acceptance_length_interval(texts) == pytest.approx((low, high))


def test_nothing_drafted_has_no_interval() -> None:
    assert acceptance_length_interval([DraftCounts()]) is None
