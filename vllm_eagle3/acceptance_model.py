"""How likely draft nodes are to be accepted, learnt from what the target accepted.

EAGLE-2 (section 3) ranks nodes by the head's confidence, the product of its
probabilities along a node's path, and rests on it being calibrated. It is not exactly,
and how far off depends on the head, the text and the temperature. So confidence is
mapped to the share that was accepted at that confidence, and each request gets a factor
of its own, pulled to 1 while little has been seen of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

# Edges of the bins of confidence, as cumulative log-probability.
_EDGES = np.log([0.002, 0.005, 0.01, 0.02, 0.04, 0.07, 0.1, 0.15, 0.2, 0.27, 0.35])
_EDGES = np.append(_EDGES, np.log([0.43, 0.52, 0.62, 0.72, 0.82, 0.91, 0.97]))
_LOWEST = np.log(1e-4)
# Centres between the edges; the last is certainty.
_CENTRES = np.concatenate([[_EDGES[0] - 1], (_EDGES[:-1] + _EDGES[1:]) / 2, [0.0]])
_PRIOR_TRIALS = 8.0  # observations that "confidence is right" is worth, in each bin
_MEMORY = 2000.0  # observations a bin remembers
_REQUEST_PRIOR = 4.0  # accepted tokens that "this request is like all" is worth
_REQUEST_MEMORY = 64.0
_FACTOR_RANGE = (0.25, 2.0)


@dataclass
class _Seen:
    accepted: float = 0.0
    expected: float = 0.0


@dataclass
class AcceptanceModel:
    """Confidence to probability of acceptance, for all requests and for each.

    Attributes:
        trials, accepted: [bins], decaying counts of nodes that were verified.
        confidence: [bins], sum of their confidences.
    """

    trials: np.ndarray = field(default_factory=lambda: np.zeros(len(_CENTRES)))
    accepted: np.ndarray = field(default_factory=lambda: np.zeros(len(_CENTRES)))
    confidence: np.ndarray = field(default_factory=lambda: np.zeros(len(_CENTRES)))
    _requests: dict[str, _Seen] = field(default_factory=dict)

    def predict(self, scores: np.ndarray) -> np.ndarray:
        """Probability of acceptance by cumulative log-probability, for a typical text.

        Never rises from a parent to its child, as scores do not.
        """
        return np.interp(np.maximum(scores, _LOWEST), _CENTRES, self._curve())

    def factor(self, req_id: str) -> float:
        """What a request's probabilities are multiplied with."""
        seen = self._requests.get(req_id)
        if seen is None:
            return 1.0
        ratio = (seen.accepted + _REQUEST_PRIOR) / (seen.expected + _REQUEST_PRIOR)
        return float(np.clip(ratio, *_FACTOR_RANGE))

    def observe(
        self,
        req_ids: Sequence[str],
        scores: Sequence[np.ndarray],
        accepted: Sequence[np.ndarray],
    ) -> None:
        """Learn from the nodes of a step that were verified.

        Args:
            req_ids: requests that had any.
            scores, accepted: [num_nodes] of each, log-probability and bool.
        """
        if not req_ids:
            return
        first = np.cumsum([0] + [len(each) for each in scores[:-1]])
        flat, hits = np.concatenate(scores), np.concatenate(accepted)
        expected = np.add.reduceat(self.predict(flat), first)
        counts = np.add.reduceat(hits.astype(float), first)
        for req_id, more, hoped in zip(req_ids, counts, expected, strict=True):
            seen = self._requests.setdefault(req_id, _Seen())
            if seen.expected > _REQUEST_MEMORY:
                seen.accepted, seen.expected = seen.accepted / 2, seen.expected / 2
            seen.accepted += float(more)
            seen.expected += float(hoped)
        bins, size = np.searchsorted(_EDGES, flat), len(_CENTRES)
        self.trials += np.bincount(bins, minlength=size)
        self.accepted += np.bincount(bins, hits, minlength=size)
        self.confidence += np.bincount(bins, np.exp(flat), minlength=size)
        full = self.trials > _MEMORY
        for memory in (self.accepted, self.confidence, self.trials):
            memory[full] /= 2

    def forget(self, req_id: str) -> None:
        """The request has ended."""
        self._requests.pop(req_id, None)

    def error(self) -> float:
        """Expected calibration error of the raw confidence (Guo et al. 2017, eq. 3)."""
        total = self.trials.sum()
        return float(np.abs(self.accepted - self.confidence).sum() / max(total, 1))

    def _curve(self) -> np.ndarray:
        """[bins], probability at the centres; more confidence never means less."""
        prior = np.exp(_CENTRES)
        share = (self.accepted + _PRIOR_TRIALS * prior) / (self.trials + _PRIOR_TRIALS)
        return np.maximum.accumulate(share)
