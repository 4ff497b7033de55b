"""Acceptance figures of speculative decoding, from counters.

Words as in vLLM. One *draft* is one speculation of one request in one step. It
proposes draft tokens at depths 0, 1, 2, ...; the target accepts a prefix of them and
always adds one token of its own (recovered or bonus), so that

    acceptance length = 1 + accepted tokens / drafts      (tokens per target pass)

n-alpha is the probability that the draft token at depth n is accepted, given that
all shallower ones were (EAGLE, section 4.1: acceptance rate when the draft model has
read n features of its own).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np


@dataclass(frozen=True)
class DraftCounts:
    """Counters of one engine, or their difference over a stretch of work."""

    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    # [num_depths]: drafts whose accepted path reaches beyond that depth
    accepted_per_depth: tuple[int, ...] = ()

    def __add__(self, other: DraftCounts) -> DraftCounts:
        return self._combine(other, 1)

    def __sub__(self, other: DraftCounts) -> DraftCounts:
        """What happened since `other` was read from the same engine."""
        return self._combine(other, -1)

    def _combine(self, other: DraftCounts, sign: int) -> DraftCounts:
        depths = max(len(self.accepted_per_depth), len(other.accepted_per_depth))
        mine = _padded(self.accepted_per_depth, depths)
        others = _padded(other.accepted_per_depth, depths)
        return DraftCounts(
            drafts=self.drafts + sign * other.drafts,
            draft_tokens=self.draft_tokens + sign * other.draft_tokens,
            accepted_tokens=self.accepted_tokens + sign * other.accepted_tokens,
            accepted_per_depth=tuple(
                a + sign * b for a, b in zip(mine, others, strict=True)
            ),
        )


def _padded(values: tuple[int, ...], length: int) -> tuple[int, ...]:
    return values + (0,) * (length - len(values))


@dataclass(frozen=True)
class Rate:
    """A share of successes with its Wilson interval; `value` is None at no trials."""

    successes: int
    trials: int
    low: float
    high: float

    @property
    def value(self) -> float | None:
        return self.successes / self.trials if self.trials else None


def acceptance_length(counts: DraftCounts) -> float | None:
    """Tokens per target pass, 1 + accepted / drafts; None where nothing was drafted."""
    if counts.drafts == 0:
        return None
    return 1 + counts.accepted_tokens / counts.drafts


def acceptance_length_error(counts: DraftCounts) -> float | None:
    """Standard error of the acceptance length, drafts taken as independent.

    The mean square of the number of accepted tokens comes from its tail,
    E[a^2] = sum over depths d of (2 d + 1) P(a > d). None where nothing was drafted.
    """
    if counts.drafts == 0:
        return None
    tail = [accepted / counts.drafts for accepted in counts.accepted_per_depth]
    mean_square = sum((2 * depth + 1) * p for depth, p in enumerate(tail))
    return math.sqrt(max(0.0, mean_square - sum(tail) ** 2) / counts.drafts)


def conditional_acceptance(
    counts: DraftCounts, confidence: float = 0.95
) -> tuple[Rate, ...]:
    """n-alpha for each depth n: accepted at n, of those accepted at all of 0..n-1.

    Counters do not say how many drafts were cut short (end of the length limit, full
    batch), so a depth that was reached but not proposed counts as a refusal: the rate
    is a lower bound, and exact when every draft has full length.
    """
    reached = (counts.drafts, *counts.accepted_per_depth)
    return tuple(
        wilson_rate(accepted, trials, confidence)
        for accepted, trials in zip(counts.accepted_per_depth, reached, strict=False)
    )


def wilson_rate(successes: int, trials: int, confidence: float = 0.95) -> Rate:
    """A rate with its Wilson score interval (Wilson 1927), two-sided.

    With no trials nothing is known: the interval is 0..1.

    Raises:
        ValueError: successes outside 0..trials, or confidence outside (0, 1).
    """
    if not 0 <= successes <= trials:
        raise ValueError(f"successes: got {successes}, want 0..{trials} (the trials)")
    if not 0 < confidence < 1:
        raise ValueError(f"confidence: got {confidence}, want between 0 and 1")
    if trials == 0:
        return Rate(0, 0, 0.0, 1.0)
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    share, shrink = successes / trials, 1 + z * z / trials
    centre = (share + z * z / (2 * trials)) / shrink
    half = math.sqrt(share * (1 - share) / trials + (z / (2 * trials)) ** 2)
    half *= z / shrink
    # At the ends the bound is 0 or 1 exactly; rounding must not step over it.
    low = 0.0 if successes == 0 else max(0.0, centre - half)
    high = 1.0 if successes == trials else min(1.0, centre + half)
    return Rate(successes, trials, low, high)


def acceptance_length_interval(
    samples: Sequence[DraftCounts], confidence: float = 0.95, resamples: int = 2000
) -> tuple[float, float] | None:
    """Interval of the acceptance length over independent texts; None at no drafts.

    A percentile bootstrap (Efron 1979) that draws whole texts, because the steps of
    one text resemble each other. Its draws are fixed, so that a figure repeats.

    Args:
        samples: counters of each text.
    """
    accepted = np.array([counts.accepted_tokens for counts in samples])
    drafts = np.array([counts.drafts for counts in samples])
    if drafts.sum() == 0:
        return None
    draws = np.random.default_rng(0).integers(
        len(samples), size=(resamples, len(samples))
    )
    totals = drafts[draws].sum(1)
    lengths = 1 + accepted[draws].sum(1)[totals > 0] / totals[totals > 0]
    tails = (1 - confidence) / 2
    low, high = np.quantile(lengths, [tails, 1 - tails])
    return float(low), float(high)
