import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_eagle3.acceptance import (
    DraftCounts,
    acceptance_length,
    acceptance_length_error,
    conditional_acceptance,
    wilson_rate,
)

COUNTS = DraftCounts(
    drafts=10, draft_tokens=30, accepted_tokens=12, accepted_per_depth=(8, 3, 1)
)


def test_acceptance_length_counts_the_token_of_the_target_itself() -> None:
    assert acceptance_length(COUNTS) == pytest.approx(2.2)


def test_acceptance_length_is_unknown_where_nothing_was_drafted() -> None:
    assert acceptance_length(DraftCounts()) is None


def test_error_of_the_acceptance_length_is_that_of_a_mean() -> None:
    accepted = [0, 0, 1, 2, 2, 2, 3, 1, 0, 3]  # of ten drafts
    reached = tuple(sum(a > depth for a in accepted) for depth in range(3))
    counts = DraftCounts(10, 30, sum(accepted), reached)
    error = statistics.pstdev(accepted) / 10**0.5
    assert acceptance_length_error(counts) == pytest.approx(error)
    assert acceptance_length_error(DraftCounts()) is None


def test_conditional_acceptance_divides_by_drafts_that_got_that_far() -> None:
    rates = [rate.value for rate in conditional_acceptance(COUNTS)]
    assert rates == pytest.approx([8 / 10, 3 / 8, 1 / 3])


def test_conditional_acceptance_of_a_depth_never_reached_is_unknown() -> None:
    counts = DraftCounts(4, 8, 0, (0, 0))
    first, second = conditional_acceptance(counts)
    assert (first.value, second.value) == (0.0, None)
    assert (second.low, second.high) == (0.0, 1.0)


def test_difference_is_what_happened_in_between() -> None:
    assert (COUNTS + COUNTS) - COUNTS == COUNTS


def test_difference_to_an_engine_that_had_not_drafted_yet() -> None:
    assert COUNTS - DraftCounts() == COUNTS


def test_wilson_interval_agrees_with_scipy() -> None:
    stats = pytest.importorskip("scipy.stats")
    for successes, trials in ((0, 5), (3, 7), (50, 100), (9, 9)):
        expected = stats.binomtest(successes, trials).proportion_ci(
            confidence_level=0.9, method="wilson"
        )
        rate = wilson_rate(successes, trials, confidence=0.9)
        assert (rate.low, rate.high) == pytest.approx((expected.low, expected.high))


@given(st.integers(0, 2000), st.integers(0, 2000))
def test_wilson_interval_holds_the_rate_and_stays_in_range(a: int, b: int) -> None:
    rate = wilson_rate(min(a, b), max(a, b))
    assert 0.0 <= rate.low <= rate.high <= 1.0
    if rate.value is not None:
        assert rate.low <= rate.value <= rate.high


@pytest.mark.parametrize(
    ("successes", "trials", "confidence", "message"),
    [
        (3, 2, 0.95, "successes: got 3"),
        (-1, 2, 0.95, "successes: got -1"),
        (1, 2, 1.0, "confidence: got 1.0"),
        (1, 2, math.nan, "confidence: got nan"),
    ],
)
def test_wilson_refuses(
    successes: int, trials: int, confidence: float, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        wilson_rate(successes, trials, confidence)
