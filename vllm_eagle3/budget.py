"""How much to draft and to verify: the choice that makes tokens come fastest.

Twice a step, in the scheduler, for all requests together:

    choose   which nodes of the trees that were drafted the target verifies next
    plan     what the head drafts after that: a chain, a tree, or nothing

Both maximise expected tokens per second, sum over requests of (1 + probabilities of
the nodes), over the seconds of a step (`step_cost`). A node's probability comes from
the head's confidence (`acceptance_model`), so nodes go to the requests where they pay.
Where nothing pays nothing is drafted, and drafting is tried at growing intervals.

A tree's best nodes by probability always form a tree, as no child is likelier than its
parent; so does any first part of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from .acceptance_model import AcceptanceModel
from .config import AUTO_CHAIN
from .drafter import TreeShape
from .step_cost import StepCost, StepWork

# A new way must promise this much more than the present one; and drafting more than no
# drafting, which is what is known best and never worse than the engine alone.
HYSTERESIS = 1.02
SAFETY = 1.02
# Part of the engine's time that may be spent on trying what looks worse.
EXPLORATION = 0.005
_WORTH_TRYING = 0.8  # in parts of the best rate
_MAX_BACKOFF = 16
_EVALUATE_EVERY = 8  # steps
_SAMPLED_NODES = 320  # of past drafts that a plan is judged by
_MIN_SAMPLES = 8  # drafts of a kind before it is judged at all
_FIRST_CONTINUATION = 0.5


@dataclass(frozen=True)
class DraftPlan:
    """What the head drafts after a step.

    Attributes:
        shape: limits of each request's tree; None means that nothing is drafted.
        min_mass: growth ends when the confidences of the last level's best nodes, of
            all requests together, sum to less.
    """

    shape: TreeShape | None
    min_mass: float = 0.0


@dataclass(frozen=True)
class BudgetLimits:
    """Between what a budget may choose.

    Attributes:
        chain: the longest chain.
        tree: the largest tree; None where the engine cannot hold trees.
        head_waits: a step without drafts may leave the head out and catch up later.
    """

    chain: TreeShape
    tree: TreeShape | None = None
    head_waits: bool = True

    @classmethod
    def below(cls, largest: TreeShape, head_waits: bool = True) -> BudgetLimits:
        """All that fits into the largest shape of an engine."""
        chain = TreeShape.chain(min(AUTO_CHAIN, largest.num_nodes))
        return cls(chain, largest if largest.top_k > 1 else None, head_waits)


@dataclass(frozen=True)
class ScoredDrafts:
    """Drafts of a step as the head scored them, padded to the widest.

    Attributes:
        req_ids: one for each row.
        scores: [num_reqs, num_nodes], log-probability of the path; -inf is padding.
        depths: [num_reqs, num_nodes], 1 for children of the root.
        max_nodes: [num_reqs], most nodes that a request may have verified.
        top_k: children a node had; 1 for chains.
    """

    req_ids: list[str]
    scores: np.ndarray
    depths: np.ndarray
    max_nodes: np.ndarray
    top_k: int = 1


@dataclass
class _Samples:
    """Past drafts of one kind: their nodes' probabilities, and the depths of those."""

    shape: TreeShape
    drafts: deque[tuple[np.ndarray, np.ndarray]] = field(default_factory=deque)

    def add(self, probabilities: np.ndarray, depths: np.ndarray) -> None:
        limit = max(_SAMPLED_NODES // self.shape.num_nodes, _MIN_SAMPLES)
        for draft in zip(probabilities[-limit:], depths[-limit:], strict=True):
            self.drafts.append(draft)
        while len(self.drafts) > limit:
            self.drafts.popleft()

    def gains(self, depth: int) -> tuple[np.ndarray, np.ndarray]:
        """Nodes and expected accepted nodes a request, best nodes first, from none on.

        Args:
            depth: of the deepest nodes that count.
        """
        values = np.concatenate([p[d <= depth] for p, d in self.drafts])
        best = np.sort(values[values > 0])[::-1]
        num_nodes = np.arange(len(best) + 1) / len(self.drafts)
        return num_nodes, np.append(0, best.cumsum()) / len(self.drafts)


class Policy(Protocol):
    """What an engine asks and tells; `DraftBudget` explains each."""

    def plan(self, num_reqs: int, context: int) -> DraftPlan: ...

    def choose(self, drafts: ScoredDrafts, context: int) -> np.ndarray: ...

    def observe_step(self, work: StepWork, seconds: float) -> None: ...

    def observe_verdict(
        self,
        req_id: str,
        parents: Sequence[int],
        scores: np.ndarray,
        accepted: np.ndarray,
    ) -> None: ...

    def forget(self, req_id: str) -> None: ...

    def confidence_error(self) -> float: ...


class DraftBudget:
    """The policy; it owns what was learnt of cost and acceptance."""

    def __init__(self, limits: BudgetLimits) -> None:
        self.limits = limits
        self.cost = StepCost()
        self.acceptance = AcceptanceModel()
        shapes = [limits.chain] + ([limits.tree] if limits.tree else [])
        self._samples = {shape.top_k: _Samples(shape) for shape in shapes}
        self._plan = DraftPlan(limits.chain)
        self._levels = float(limits.chain.depth)  # grown, on average
        self._continuation = _FIRST_CONTINUATION
        self._bias = 1.0  # expected over confident
        self._steps = 0
        self._evaluated_at = (0, 0)  # step, requests
        self._best_of_kind: dict[int, float] = {}  # rate, in parts of the best
        self._backoff = 1
        self._next_try = 0
        self._tries: list[DraftPlan] = []

    def observe_step(self, work: StepWork, seconds: float) -> None:
        """Learn from the duration of a step that prefilled nothing."""
        self.cost.observe(work, seconds)
        if work.head_passes and work.levels:
            self._levels += 0.1 * (work.levels - self._levels)

    def observe_verdict(
        self,
        req_id: str,
        parents: Sequence[int],
        scores: np.ndarray,
        accepted: np.ndarray,
    ) -> None:
        """Learn which of one request's verified nodes were accepted (bool)."""
        self.acceptance.observe(req_id, scores, accepted)

    def confidence_error(self) -> float:
        """Expected calibration error of the head's confidence."""
        return self.acceptance.error()

    def forget(self, req_id: str) -> None:
        """A request has ended."""
        self.acceptance.forget(req_id)

    def choose(self, drafts: ScoredDrafts, context: int) -> np.ndarray:
        """Which nodes to verify, bool [num_reqs, num_nodes].

        Args:
            context: tokens in the KV cache, all requests together.
        """
        expected = self._expected(drafts)
        self._remember(drafts, expected)
        allowed = (expected > 0) & (_rank(expected) < drafts.max_nodes[:, None])
        if not self.cost.is_known:
            return allowed
        # Parents stand before their children, and a stable sort keeps them so.
        order = np.argsort(-expected[allowed], kind="stable")
        num_reqs = len(drafts.req_ids)
        gains = np.append(0, expected[allowed][order].cumsum())
        rows = num_reqs + np.arange(len(gains))
        rate = (num_reqs + gains) / self._seconds(rows, num_reqs, context, self._plan)
        if self._plan.shape is None:
            self._ask_again(gains, rows, context)
        kept = np.zeros(len(order), dtype=bool)
        kept[order[: rate.argmax()]] = True
        chosen = np.zeros_like(allowed)
        chosen[allowed] = kept
        return chosen

    def plan(self, num_reqs: int, context: int) -> DraftPlan:
        """What to draft for `num_reqs` requests after the coming step."""
        self._steps += 1
        if not self.cost.is_known or len(self._samples[1].drafts) < _MIN_SAMPLES:
            # In turn, so that the cost of both is seen.
            return DraftPlan(self.limits.chain if self._steps % 2 else None)
        self._consider(num_reqs, context)
        if not self._tries and self._steps >= self._next_try:
            self._tries = self._worth_trying(num_reqs)
            self._schedule_try(num_reqs, context)
        return self._tries.pop() if self._tries else self._plan

    def _ask_again(self, gains: np.ndarray, rows: np.ndarray, context: int) -> None:
        """A try that would have paid is followed by another at once."""
        num_reqs, plan = int(rows[0]), DraftPlan(self.limits.chain)
        drafting = (num_reqs + gains) / self._seconds(rows, num_reqs, context, plan)
        plain = num_reqs / self._seconds(num_reqs, num_reqs, context, self._plan)
        if drafting.max() > SAFETY * plain:
            self._tries, self._backoff = [plan], 1

    def _consider(self, num_reqs: int, context: int) -> None:
        """Look for a better plan, now and then and when the batch has changed."""
        step, before = self._evaluated_at
        if num_reqs == before and self._steps - step < _EVALUATE_EVERY:
            return
        self._evaluated_at = (self._steps, num_reqs)
        rates = {
            shape: self._rate(shape, num_reqs, context) for shape in self._candidates()
        }
        best, present = self._best(rates), self._plan.shape
        if _kind(best) != _kind(present):
            self._backoff = 1
        mass = self._min_mass(best, rates[best], num_reqs, context) if best else 0.0
        self._plan = DraftPlan(best, mass)
        self._best_of_kind = {
            kind: max(r for s, r in rates.items() if _kind(s) == kind) / rates[best]
            for kind in {_kind(shape) for shape in rates}
        }

    def _best(self, rates: dict[TreeShape | None, float]) -> TreeShape | None:
        present = self._plan.shape

        def favoured(shape: TreeShape | None) -> float:
            return rates[shape] * (HYSTERESIS if shape == present else 1.0)

        plain = rates[None] * SAFETY * (HYSTERESIS if present is None else 1.0)
        best = max((shape for shape in rates if shape), key=favoured, default=None)
        return best if best is not None and rates[best] > plain else None

    def _candidates(self) -> list[TreeShape | None]:
        """No drafts, and every depth of each kind that has been tried enough."""
        shapes: list[TreeShape | None] = [None]
        for samples in self._samples.values():
            if len(samples.drafts) >= _MIN_SAMPLES:
                shapes += _depths_of(samples.shape)
        return shapes

    def _rate(self, shape: TreeShape | None, num_reqs: int, context: int) -> float:
        """Expected tokens per second."""
        plan = DraftPlan(shape)
        if shape is None:
            return num_reqs / float(self._seconds(num_reqs, num_reqs, context, plan))
        nodes, gains = self._samples[shape.top_k].gains(shape.depth)
        rows = num_reqs * (1 + nodes)
        seconds = self._seconds(rows, num_reqs, context, plan, shape.depth - 1)
        return float((num_reqs * (1 + gains) / seconds).max())

    def _seconds(
        self,
        rows: np.ndarray | float,
        num_reqs: int,
        context: int,
        plan: DraftPlan,
        levels: float | None = None,
    ) -> np.ndarray:
        """Seconds of steps with `rows` rows that draft by `plan`."""
        if plan.shape is None:
            passes = 0 if self.limits.head_waits else 1
            head_rows = num_reqs * passes
            return self.cost.seconds(
                rows, context=context, head_passes=passes, head_rows=head_rows
            )
        if levels is None:
            levels = min(self._levels, plan.shape.depth - 1)
        level_rows = levels * num_reqs * plan.shape.top_k
        # The head's first pass runs over all rows that were verified.
        per_row = self.cost.seconds(1, head_rows=1) - self.cost.seconds(1)
        return np.asarray(rows) * per_row + self.cost.seconds(
            rows, context=context, head_passes=1, levels=levels, head_rows=level_rows
        )

    def _min_mass(
        self, shape: TreeShape, rate: float, num_reqs: int, context: int
    ) -> float:
        """Confidence below which a further level costs more than it brings."""
        plan = DraftPlan(shape)
        one, two = (
            float(self._seconds(num_reqs, num_reqs, context, plan, levels))
            for levels in (1, 2)
        )
        return rate * (two - one) / (self._continuation * self._bias)

    def _worth_trying(self, num_reqs: int) -> list[DraftPlan]:
        """What the present plan teaches nothing about, and may have become better."""
        drafting = self._plan.shape is not None
        tries = [DraftPlan(None)] if drafting else []
        for kind, samples in self._samples.items():
            unknown = len(samples.drafts) < _MIN_SAMPLES
            if unknown and drafting:
                tries += [DraftPlan(samples.shape)] * max(1, _MIN_SAMPLES // num_reqs)
            elif self._best_of_kind.get(kind, 0.0) > _WORTH_TRYING:
                tries.append(DraftPlan(samples.shape))
        return tries or [DraftPlan(self.limits.chain)]

    def _schedule_try(self, num_reqs: int, context: int) -> None:
        """Set the next try so far off that all tries cost little."""
        step = float(self._seconds(num_reqs, num_reqs, context, self._plan))
        lost = 0.0
        for plan in self._tries:
            seconds = float(self._seconds(num_reqs, num_reqs, context, plan))
            lost += max(abs(seconds - step) / step, 0.1)
        interval = int(lost / EXPLORATION) * self._backoff
        self._backoff = min(2 * self._backoff, _MAX_BACKOFF)
        self._next_try = self._steps + max(interval, _EVALUATE_EVERY)

    def _expected(self, drafts: ScoredDrafts) -> np.ndarray:
        """Probability of each node, [num_reqs, num_nodes]; 0 for padding."""
        factors = np.array([self.acceptance.factor(r) for r in drafts.req_ids])
        expected = self.acceptance.predict(drafts.scores) * factors[:, None]
        return np.where(np.isfinite(drafts.scores), expected.clip(max=1.0), 0.0)

    def _remember(self, drafts: ScoredDrafts, expected: np.ndarray) -> None:
        """Keep drafts as samples, and what they say of going one level deeper."""
        real = np.isfinite(drafts.scores)
        if not real.any():
            return
        confident = np.exp(drafts.scores, where=real, out=np.zeros_like(expected))
        self._bias += 0.05 * (expected.sum() / confident.sum() - self._bias)
        if drafts.top_k > 1:
            self._samples[drafts.top_k].add(expected, drafts.depths)
            return
        self._learn_continuation(expected)
        length = self.limits.chain.depth
        self._samples[1].add(
            _continue_chains(expected[:, :length], length, self._continuation),
            np.tile(np.arange(1, length + 1), (len(expected), 1)),
        )

    def _learn_continuation(self, chains: np.ndarray) -> None:
        """How likely a node of a chain is when its parent is accepted."""
        parents = chains[:, :-1][chains[:, 1:] > 0].sum()
        if parents > 0:
            ratio = chains[:, 1:].sum() / parents
            self._continuation += 0.05 * (ratio - self._continuation)


def _kind(shape: TreeShape | None) -> int:
    """0 for no drafts, 1 for chains, more for trees."""
    return 0 if shape is None else shape.top_k


def _depths_of(shape: TreeShape) -> list[TreeShape]:
    """The shape cut at each depth."""
    if shape.top_k == 1:
        return [TreeShape.chain(depth) for depth in range(1, shape.depth + 1)]
    return [replace(shape, depth=depth) for depth in range(1, shape.depth + 1)]


def _rank(values: np.ndarray) -> np.ndarray:
    """[rows, columns] -> place of each value in its row, 0 for the largest."""
    order = np.argsort(-values, axis=1, kind="stable")
    return np.argsort(order, axis=1)


def _continue_chains(
    chains: np.ndarray, length: int, continuation: float
) -> np.ndarray:
    """Chains that ended early as they would go on, [num_reqs, length]."""
    chains = np.pad(chains, ((0, 0), (0, length - chains.shape[1])))
    for depth in range(1, length):
        missing = chains[:, depth] == 0
        chains[missing, depth] = chains[missing, depth - 1] * continuation
    return chains
