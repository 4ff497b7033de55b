"""Is one method faster than another? Paired ratios with bootstrap intervals.

Both methods run the same batches of prompts, one right after the other, several times
over: cell [repeat, batch] of one is paired with the same cell of the other, so that
drift of the machine falls out of the ratio. The speed-up is the median over repeats of
the ratio of tokens per second, and its interval a percentile bootstrap (Efron 1979)
with the percentiles that few units need (Hesterberg 2015, "expanded"):

    5 repeats or more    repeats are drawn: what this machine's noise does to the ratio
    fewer                batches are drawn, all repeats of a batch together: the noise,
                         and how much prompts differ

With few repeats and few batches, or with an interval that is too wide, there is no
speed-up to report, only the number of repeats that would give one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import NormalDist

import numpy as np

CONFIDENCE = 0.95
MIN_REPEATS = 5
MIN_BATCHES = 8
# Of the ratio itself, for an interval that does not rest on repeats.
MAX_RELATIVE_WIDTH = 0.25
_DRAWS = 4000
_SEED = 0


@dataclass(frozen=True)
class Cells:
    """One method's measurements; both [num_repeats, num_batches]."""

    seconds: np.ndarray
    new_tokens: np.ndarray

    @classmethod
    def of(
        cls, seconds: Sequence[Sequence[float]], new_tokens: Sequence[Sequence[int]]
    ) -> Cells:
        return cls(np.array(seconds, dtype=float), np.array(new_tokens, dtype=float))

    def columns(self, batches: Sequence[int]) -> Cells:
        """Only these batches."""
        return Cells(self.seconds[:, batches], self.new_tokens[:, batches])

    def tokens_per_s(self, batches: np.ndarray) -> np.ndarray:
        """[num_repeats, num_draws] for batches drawn as [num_draws, num_batches]."""
        tokens, seconds = self.new_tokens[:, batches], self.seconds[:, batches]
        speeds: np.ndarray = tokens.sum(-1) / seconds.sum(-1)
        return speeds


@dataclass(frozen=True)
class SpeedUp:
    """A ratio of speeds with its interval, or how many repeats it would take.

    `value`, `low` and `high` are None where `repeats_needed` is a number.
    """

    value: float | None
    low: float | None
    high: float | None
    repeats_needed: int | None = None


def speed_up(mine: Cells, plain: Cells) -> SpeedUp:
    """How many times as fast as `plain`; see the module for what is drawn."""
    repeats, batches = mine.seconds.shape
    every_batch = np.arange(batches)[None]
    ratios = (mine.tokens_per_s(every_batch) / plain.tokens_per_s(every_batch))[:, 0]
    value = float(np.median(ratios))
    generator = np.random.default_rng(_SEED)
    if repeats >= MIN_REPEATS:
        drawn = ratios[generator.integers(repeats, size=(_DRAWS, repeats))]
        return SpeedUp(value, *_interval(np.median(drawn, axis=1), repeats))
    if batches < MIN_BATCHES:
        return SpeedUp(None, None, None, MIN_REPEATS)
    draws = generator.integers(batches, size=(_DRAWS, batches))
    drawn = np.median(mine.tokens_per_s(draws) / plain.tokens_per_s(draws), axis=0)
    low, high = _interval(drawn, batches)
    width = (high - low) / value
    if width > MAX_RELATIVE_WIDTH:
        # Intervals shrink with the root of what is averaged.
        more = math.ceil(repeats * (width / MAX_RELATIVE_WIDTH) ** 2)
        return SpeedUp(None, None, None, max(MIN_REPEATS, more))
    return SpeedUp(value, low, high)


def _interval(draws: np.ndarray, num_units: int) -> tuple[float, float]:
    """Percentiles of `draws`, as far out as Student's t of `num_units` goes."""
    tail = 100 * NormalDist().cdf(
        -_student(num_units - 1) * math.sqrt(num_units / (num_units - 1))
    )
    low, high = np.percentile(draws, [tail, 100 - tail])
    return float(low), float(high)


def _student(freedom: int) -> float:
    """The two-sided quantile of Student's t (Abramowitz and Stegun, 26.7.5)."""
    z = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
    first = (z**3 + z) / (4 * freedom)
    second = (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
    return z + first + second


def crossover(batches: Sequence[int], speed_ups: Sequence[float]) -> float | None:
    """The batch size where a gain ends: the last fall through 1, on a log scale.

    None where the speed-up is above 1, or below it, at every size.
    """
    points = sorted(zip(batches, speed_ups, strict=True))
    falls = [
        (left, right) for left, right in pairwise(points) if left[1] > 1 >= right[1]
    ]
    if not falls:
        return None
    (batch, above), (next_batch, below) = falls[-1]
    share = (above - 1) / (above - below)
    return float(batch * (next_batch / batch) ** share)
