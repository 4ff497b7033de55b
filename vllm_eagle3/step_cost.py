"""How long a step takes, learnt from the steps of the running engine.

A step verifies `rows` tokens with the target and then runs the head a few times. Its
cost is linear in what it did: piecewise linear in the rows (a memory-bound target
verifies the first few almost for free, a compute-bound one pays for each), plus context
to read, plus branches of trees (each reads its prefix again), plus passes and rows of
the head. Rows of prompts cost a little less or more than others. A Kalman filter tracks
the coefficients, so that nothing has to be calibrated, an engine that drifts is
followed, and batch sizes that were never seen borrow from their neighbours.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

# Rows between which the target's cost is interpolated: 1, 2, 3, 4, 6, 8, 16, ... 4096.
KNOTS = np.sort(np.append(2.0 ** np.arange(13), [3.0, 6.0]))
# From so many rows on more never cost less. Fewer may: a CPU's products of 2 rows take
# longer than those of 4, and a budget that does not see it verifies too little.
_RISING_FROM = 8
_CONTEXT, _BRANCH, _HEAD_PASS, _LEVEL, _HEAD_ROW, _PROMPT = range(
    len(KNOTS), len(KNOTS) + 6
)
_CONTEXT_UNIT = 1000.0  # tokens

# Before anything is known, in parts of a plain step of one row: a one-layer head with
# its output layer beside a target of some tens of layers. Wide, and soon forgotten.
_PRIOR_MEAN = np.concatenate([1 + KNOTS / 100, [0.02, 0.01, 0.05, 0.06, 0.002, 0.0]])
_COMMON_SD = 0.3  # of everything together
_ROW_SD = 0.03  # of every row, and so of what is known from more or fewer rows
_KNOT_SD = 0.5  # from some rows to twice as many
_TERM_SD = (0.02, 0.02, 0.05, 0.06, 0.004, 0.02)

_NOISE = 0.1  # of a step's time
_DRIFT = (
    0.02  # a step, of everything together: other work on the machine comes and goes
)
_FORGETTING = 1e-3  # part of the prior uncertainty that comes back with every step
_CLIP = 3.0  # standard deviations that one step may count for
# A step further off than this is a compilation or a pause, unless so many follow each
# other that they must be the new truth.
_OUTLIER = 4.0
_MAX_OUTLIERS = 8
_FIRST_STEPS = 3


@dataclass
class HeadWork:
    """What the head did in a step.

    Attributes:
        passes: over new tokens.
        levels: further passes, one for each level that grew.
        rows: of all passes.
        caught_up: rows that had waited, in passes that are not counted here.
        waiting: rows that it will have to be run on before it drafts again.
    """

    passes: int = 0
    levels: int = 0
    rows: int = 0
    caught_up: int = 0
    waiting: int = 0


@dataclass(frozen=True)
class StepWork:
    """What one step did.

    Attributes:
        rows: of the target: roots and draft nodes of all requests, and rows of prompts.
        context: tokens in the KV cache, all requests together.
        head_passes: first passes of the head, over new tokens; 0 where it waits.
        levels: further passes of the head, one for each level that grew.
        head_rows: rows of all passes of the head.
        branches: of the trees that are verified, all requests together.
        prompt_rows: rows of prompts but for the last one of each, which is a root.
    """

    rows: int
    context: int = 0
    head_passes: int = 0
    levels: int = 0
    head_rows: int = 0
    branches: int = 0
    prompt_rows: int = 0


@dataclass(frozen=True)
class _Rates:
    """Seconds of the parts of a step; none below zero.

    Attributes:
        target: [knots], of the target over so many rows.
        context: of a thousand tokens in the cache.
        branch, head_pass, level, head_row: as in `StepWork`, of one each.
    """

    target: np.ndarray
    context: float
    branch: float
    head_pass: float
    level: float
    head_row: float


class StepCost:
    """Seconds of a step: `observe` steps, then ask for `seconds`."""

    def __init__(self) -> None:
        self._forget()

    def _forget(self) -> None:
        self._mean = np.zeros(0)  # [terms], empty while nothing is known
        self._covariance = np.zeros((0, 0))
        self._prior = np.zeros((0, 0))
        self._first: list[tuple[np.ndarray, float]] = []
        self._num_outliers = 0
        self._rates: _Rates | None = None

    @property
    def is_known(self) -> bool:
        """Whether enough steps were seen to say anything."""
        return self._mean.size > 0

    def observe(self, work: StepWork, seconds: float) -> None:
        """Learn from a step."""
        terms = _terms(work)
        if not self.is_known:
            self._first.append((terms, seconds))
            if len(self._first) == _FIRST_STEPS:
                self._start()
            return
        ratio = seconds / float(terms @ self._mean)
        if 1 / _OUTLIER < ratio < _OUTLIER:
            self._num_outliers = 0
            self._update(terms, seconds)
            return
        # A long prompt's step may well be off, and says little of others.
        self._num_outliers += not work.prompt_rows
        if self._num_outliers >= _MAX_OUTLIERS:
            self._forget()

    def seconds(
        self,
        rows: np.ndarray | float,  # any shape, also of the result
        *,
        context: float = 0,
        head_passes: float = 0,
        levels: np.ndarray | float = 0,  # these three like rows
        head_rows: np.ndarray | float = 0,
        branches: np.ndarray | float = 0,
    ) -> np.ndarray:
        """Seconds of steps that may differ in what is given as arrays."""
        known = self.rates
        beside = (
            context / _CONTEXT_UNIT * known.context
            + head_passes * known.head_pass
            + levels * known.level
            + head_rows * known.head_row
        )
        verify = np.interp(rows, KNOTS, known.target)
        return verify + np.asarray(branches) * known.branch + beside

    @property
    def rates(self) -> _Rates:
        """What the filter knows, made once after each of its steps."""
        assert self.is_known, "asked before enough steps were seen"
        if self._rates is None:
            target = self._mean[: len(KNOTS)].copy()
            rising = target[KNOTS >= _RISING_FROM]
            target[KNOTS >= _RISING_FROM] = np.maximum.accumulate(rising)
            beside = np.maximum(self._mean[len(KNOTS) : _PROMPT], 0).tolist()
            self._rates = _Rates(target, *beside)
        return self._rates

    def _start(self) -> None:
        """Set the scale by the quickest of the first steps; the others may compile."""
        scale = min(s / float(t @ _PRIOR_MEAN) for t, s in self._first)
        self._mean = scale * _PRIOR_MEAN
        self._prior = scale**2 * _prior_covariance()
        self._covariance = self._prior.copy()
        self._rates = None
        for terms, seconds in self._first:
            if seconds < _OUTLIER * float(terms @ self._mean):
                self._update(terms, seconds)
        self._first = []

    def _update(self, terms: np.ndarray, seconds: float) -> None:
        """One step of the filter: let everything drift, then believe the step."""
        drift = _DRIFT**2 * np.outer(self._mean, self._mean)
        covariance = (1 - _FORGETTING) * self._covariance + _FORGETTING * self._prior
        covariance += drift
        known = covariance @ terms
        variance = float(terms @ known) + (_NOISE * seconds) ** 2
        surprise = seconds - float(terms @ self._mean)
        limit = _CLIP * variance**0.5
        self._mean = self._mean + known / variance * np.clip(surprise, -limit, limit)
        self._covariance = covariance - np.outer(known, known) / variance
        self._rates = None


def _weights(rows: np.ndarray | float) -> np.ndarray:
    """What each knot counts for between two of them, [*rows.shape, knots]."""
    place = np.interp(rows, KNOTS, np.arange(len(KNOTS)))
    distance = np.abs(np.asarray(place)[..., None] - np.arange(len(KNOTS)))
    return np.maximum(1 - distance, 0)


def _terms(work: StepWork) -> np.ndarray:
    """The coefficients' factors, [terms]: weights of two knots, then counts."""
    terms = np.zeros(len(_PRIOR_MEAN))
    terms[: len(KNOTS)] = _weights(work.rows)
    terms[_CONTEXT] = work.context / _CONTEXT_UNIT
    terms[_BRANCH] = work.branches
    terms[_HEAD_PASS], terms[_LEVEL] = work.head_passes, work.levels
    terms[_HEAD_ROW], terms[_PROMPT] = work.head_rows, work.prompt_rows
    return terms


def _prior_covariance() -> np.ndarray:
    """Uncertainty of `_PRIOR_MEAN`: neighbouring knots are alike."""
    knots = np.log2(KNOTS)
    walk = _KNOT_SD**2 * (1 + np.minimum.outer(knots, knots))
    walk += _ROW_SD**2 * np.outer(KNOTS, KNOTS)
    covariance = np.diag(np.square(np.concatenate([np.zeros(len(KNOTS)), _TERM_SD])))
    covariance[: len(KNOTS), : len(KNOTS)] = walk
    return covariance + _COMMON_SD**2 * np.outer(_PRIOR_MEAN, _PRIOR_MEAN)
