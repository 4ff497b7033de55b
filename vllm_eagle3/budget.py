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

Where all requests may take sampled drafts, trees whose shape is fixed before they are
drawn are planned too (`sampled_places`). They are verified whole: leaving out a node
for what was drawn would change the law of the text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from .acceptance_model import AcceptanceModel
from .draft_samples import MIN_SAMPLES, DraftSamples
from .drafter import TreeShape
from .policy import BudgetLimits, DraftPlan, ScoredDrafts, Verdict
from .sampled_places import SampledPlaces
from .step_cost import KNOTS, StepCost, StepWork

# A new way must promise this much more than the present one; and drafting more than no
# drafting, which is what is known best and never worse than the engine alone.
HYSTERESIS = 1.02
SAFETY = 1.02
# Part of the engine's time that may be spent on trying what looks worse.
EXPLORATION = 0.005
_WORTH_TRYING = 0.8  # in parts of the best rate
_MAX_BACKOFF = 16
_EVALUATE_EVERY = 8  # steps
_EVALUATE_PLAIN_EVERY = 32  # nothing is learnt of drafts meanwhile
_ALIKE = 8  # a batch is like one whose size differs by no more than this part
_FIRST_CONTINUATION = 0.5
# Plain steps in a row: the first of them still verifies drafts of the step before.
_PLAIN_TRY = 3
# Plain steps that are seen at a batch size before anything is drafted there. What a
# step without drafts takes is what all else is compared with; inferred from steps that
# drafted, it was overestimated, and nothing then showed the error.
_PLAIN_STEPS = 4


class DraftBudget:
    """The policy; it owns what was learnt of cost and acceptance."""

    def __init__(self, limits: BudgetLimits) -> None:
        self.limits = limits
        self.cost = StepCost()
        self.acceptance = AcceptanceModel()
        shapes = [limits.chain] + ([limits.tree] if limits.tree else [])
        self._samples = {shape.top_k: DraftSamples(shape) for shape in shapes}
        self._places = SampledPlaces([s for shape in shapes for s in _sizes_of(shape)])
        self._plan = DraftPlan(limits.chain)
        self._levels = float(limits.chain.depth)  # grown, on average
        self._continuation = _FIRST_CONTINUATION
        self._bias = 1.0  # expected over confident
        self._steps = 0
        self._best_rate = 0.0  # tokens a second of one request
        self._evaluated_at = (0, 0, False)  # step, requests, whether they may sample
        self._best_of_kind: dict[str, tuple[float, DraftPlan]] = {}
        self._backoff = 1
        self._next_try = 0
        self._tries: list[DraftPlan] = []
        self._plain_steps = np.zeros(len(KNOTS), dtype=int)  # seen, by rows

    def observe_step(self, work: StepWork, seconds: float) -> None:
        """Learn from the duration of a step."""
        self.cost.observe(work, seconds)
        if work.head_passes == self._plain_passes and not work.levels:
            # Also beside prompts: a busy engine has few steps without any.
            self._plain_steps[_nearest_knot(work.rows - work.prompt_rows)] += 1
        if work.head_passes and work.levels:
            self._levels += 0.1 * (work.levels - self._levels)

    def observe_verdicts(self, verdicts: Sequence[Verdict]) -> None:
        """Learn which of a step's verified nodes were accepted."""
        ranked = [verdict for verdict in verdicts if not verdict.sampled]
        self.acceptance.observe(
            [verdict.req_id for verdict in ranked],
            [verdict.scores for verdict in ranked],
            [verdict.accepted for verdict in ranked],
        )
        for verdict in verdicts:
            if verdict.sampled:
                self._places.observe(verdict.parents, verdict.accepted)

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
        branches = np.append(0, drafts.branches[allowed][order].cumsum())
        seconds = self._seconds(rows, num_reqs, context, self._plan)
        seconds = seconds + branches * self.cost.rates.branch
        rate = (num_reqs + gains) / seconds
        if self._plan.shape is None:
            self._ask_again(gains, rows, context)
        kept = np.zeros(len(order), dtype=bool)
        kept[order[: rate.argmax()]] = True
        chosen = np.zeros_like(allowed)
        chosen[allowed] = kept
        return chosen

    def plan(
        self,
        num_reqs: int,
        context: int,
        waiting: int = 0,
        may_sample: bool = False,
    ) -> DraftPlan:
        """What to draft for `num_reqs` requests after the coming step.

        Args:
            context: tokens in the KV cache, all requests together.
            waiting: rows that the head has to be run on before it drafts.
            may_sample: all these requests may take sampled drafts.
        """
        self._steps += 1
        if not self.cost.is_known or not self._samples[1].are_enough:
            # In turn, so that the cost of both is seen; first what is never far off.
            drafting = self._steps % (2 * _PLAIN_TRY) < _PLAIN_TRY
            return DraftPlan(self.limits.chain if drafting else None)
        if self._plain_steps[_nearest_knot(num_reqs)] < _PLAIN_STEPS:
            return DraftPlan(None)
        self._consider(num_reqs, context, may_sample)
        self._tries = [plan for plan in self._tries if may_sample or not plan.sampled]
        if not self._tries and self._steps >= self._next_try:
            self._tries = self._worth_trying(num_reqs)
            self._schedule_try(num_reqs, context, waiting)
        return self._tries.pop() if self._tries else self._plan

    def _ask_again(self, gains: np.ndarray, rows: np.ndarray, context: int) -> None:
        """A try that would have paid is followed by another at once."""
        num_reqs, plan = int(rows[0]), DraftPlan(self.limits.chain)
        drafting = (num_reqs + gains) / self._seconds(rows, num_reqs, context, plan)
        plain = num_reqs / self._seconds(num_reqs, num_reqs, context, self._plan)
        if drafting.max() > SAFETY * plain:
            self._tries, self._backoff = [plan], 1

    def _consider(self, num_reqs: int, context: int, may_sample: bool) -> None:
        """Look for a better plan, now and then and when the batch has changed."""
        step, reqs_before, sampled_before = self._evaluated_at
        every = _EVALUATE_EVERY if self._plan.shape else _EVALUATE_PLAIN_EVERY
        is_alike = abs(num_reqs - reqs_before) <= reqs_before // _ALIKE
        if is_alike and may_sample == sampled_before and self._steps - step < every:
            return
        self._evaluated_at = (self._steps, num_reqs, may_sample)
        # Where it pays to end growth depends on the rate, which depends on that end.
        plain = self._rate(None, num_reqs, context, 0.0)
        rate = max(plain, num_reqs * self._best_rate)
        rates = {
            DraftPlan(shape): self._rate(shape, num_reqs, context, rate)
            for shape in self._candidates()
        }
        if may_sample:
            rates |= self._sampled_rates(num_reqs, context)
        best = self._best(rates)
        if best.kind != self._plan.kind:
            self._backoff = 1
        self._plan = self._adaptive(best, rates[best], num_reqs, context)
        self._best_rate = rates[best] / num_reqs
        self._best_of_kind = {}
        for plan, found in rates.items():
            part = found / rates[best]
            if part > self._best_of_kind.get(plan.kind, (0.0,))[0]:
                self._best_of_kind[plan.kind] = part, plan

    def _best(self, rates: dict[DraftPlan, float]) -> DraftPlan:
        present, none = replace(self._plan, min_masses=()), DraftPlan(None)

        def favoured(plan: DraftPlan) -> float:
            return rates[plan] * (HYSTERESIS if plan == present else 1.0)

        plain = rates[none] * SAFETY * (HYSTERESIS if present == none else 1.0)
        best = max((plan for plan in rates if plan.shape), key=favoured, default=none)
        return best if rates[best] > plain else none

    def _sampled_rates(self, num_reqs: int, context: int) -> dict[DraftPlan, float]:
        """Expected tokens per second of every size of sampled drafts."""
        sizes = self._places
        rows = num_reqs * (1 + sizes.rows)
        seconds = self.cost.seconds(
            rows,
            context=context,
            head_passes=1,
            levels=sizes.levels,
            head_rows=rows + num_reqs * sizes.head_rows,
            branches=num_reqs * sizes.branches,
        )
        rates = num_reqs * (1 + sizes.gains) / seconds
        plans = [DraftPlan(limits, sampled=True) for limits in sizes.limits]
        return dict(zip(plans, rates.tolist(), strict=True))

    def _candidates(self) -> list[TreeShape | None]:
        """No drafts, and every depth of each kind that has been tried enough."""
        shapes: list[TreeShape | None] = [None]
        for samples in self._samples.values():
            if samples.are_enough:
                shapes += _depths_of(samples.shape)
        return shapes

    def _rate(
        self, shape: TreeShape | None, num_reqs: int, context: int, rate: float
    ) -> float:
        """Expected tokens per second, when growth ends as it pays at `rate`."""
        plan = DraftPlan(shape)
        if shape is None:
            return num_reqs / float(self._seconds(num_reqs, num_reqs, context, plan))
        gains, branches, depths = self._samples[shape.top_k].replay(
            shape.depth, num_reqs, self._min_masses(shape, rate, num_reqs, context)
        )
        tokens = num_reqs + gains
        rows = num_reqs + np.arange(gains.shape[1])
        seconds = self._seconds(rows, num_reqs, context, plan, levels=0)
        seconds = seconds + branches * self.cost.rates.branch
        seconds = seconds + (depths - 1)[:, None] * self._level(shape, num_reqs)
        each = np.arange(len(tokens)), (tokens / seconds).argmax(axis=1)
        return float(tokens[each].sum() / seconds[each].sum())

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
            passes = self._plain_passes
            head_rows = num_reqs * passes
            return self.cost.seconds(
                rows, context=context, head_passes=passes, head_rows=head_rows
            )
        if levels is None:
            levels = min(self._levels, plan.shape.depth - 1)
        level_rows = levels * num_reqs * plan.shape.top_k
        # The head's first pass runs over all rows that were verified.
        return np.asarray(rows) * self.cost.rates.head_row + self.cost.seconds(
            rows, context=context, head_passes=1, levels=levels, head_rows=level_rows
        )

    @property
    def _plain_passes(self) -> int:
        """First passes of the head in a step that drafts nothing."""
        return 0 if self.limits.head_waits else 1

    def _level(self, shape: TreeShape, num_reqs: int) -> float:
        """Seconds of growing one level further."""
        rates = self.cost.rates
        return rates.level + num_reqs * shape.top_k * rates.head_row

    def _min_masses(
        self, shape: TreeShape, rate: float, num_reqs: int, context: int
    ) -> np.ndarray:
        """Expected accepted nodes of a level below which the next does not pay.

        A level costs the head's pass. A chain's also makes the step longer that
        verifies it; a tree is verified with as many nodes however deep they lie.
        """
        levels = np.arange(1, shape.depth)
        seconds = np.full(len(levels), self._level(shape, num_reqs))
        if shape.top_k == 1:
            rows = num_reqs * np.arange(1, shape.depth + 2)
            verify = self._seconds(rows, num_reqs, context, DraftPlan(shape), levels=0)
            seconds += verify[levels + 1] - np.minimum.accumulate(verify)[levels]
        return rate * seconds / self._continuation

    def _adaptive(
        self, plan: DraftPlan, rate: float, num_reqs: int, context: int
    ) -> DraftPlan:
        """The plan with an end of growth by the head's raw confidence."""
        if plan.shape is None or plan.sampled:
            return plan
        masses = self._min_masses(plan.shape, rate, num_reqs, context) / self._bias
        return replace(plan, min_masses=tuple(masses.tolist()))

    def _worth_trying(self, num_reqs: int) -> list[DraftPlan]:
        """What the present plan teaches nothing about, and may have become better."""
        drafting = self._plan.shape is not None
        tries = [DraftPlan(None)] * _PLAIN_TRY if drafting else []
        none = 0.0, DraftPlan(None)
        for samples in self._samples.values():
            plan = DraftPlan(samples.shape)
            if drafting and not samples.are_enough:
                tries += [plan] * -(-MIN_SAMPLES // num_reqs)
            elif self._best_of_kind.get(plan.kind, none)[0] > _WORTH_TRYING:
                tries.append(plan)
        part, sampled = self._best_of_kind.get("sampled", none)
        if part > _WORTH_TRYING and not self._plan.sampled:
            tries.append(sampled)
        return tries or [DraftPlan(self.limits.chain)]

    def _schedule_try(self, num_reqs: int, context: int, waiting: int) -> None:
        """Set the next try so far off that all tries cost little."""
        step = float(self._seconds(num_reqs, num_reqs, context, self._plan))
        lost = waiting * self.cost.rates.head_row / step
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
            self._samples[drafts.top_k].add(expected, drafts.depths, drafts.branches)
            return
        self._learn_continuation(expected)
        length = self.limits.chain.depth
        self._samples[1].add(
            _continue_chains(expected[:, :length], length, self._continuation),
            np.broadcast_to(np.arange(1, length + 1), (len(expected), length)),
            np.zeros((len(expected), length), dtype=bool),
        )

    def _learn_continuation(self, chains: np.ndarray) -> None:
        """How likely a node of a chain is when its parent is accepted."""
        parents = chains[:, :-1][chains[:, 1:] > 0].sum()
        if parents > 0:
            ratio = chains[:, 1:].sum() / parents
            self._continuation += 0.05 * (ratio - self._continuation)


def _nearest_knot(rows: int) -> int:
    return int(np.abs(KNOTS - rows).argmin())


def _sizes_of(shape: TreeShape) -> list[TreeShape]:
    """The shape at each depth, and trees with fewer nodes too."""
    if shape.top_k == 1:
        return _depths_of(shape)
    nodes = {n for n in (2, 3, 4, 6, 8, 12, 16, 24, 32, 48) if n < shape.num_nodes}
    return [
        replace(each, num_nodes=n)
        for n in sorted({*nodes, shape.num_nodes})
        for each in _depths_of(shape)
    ]


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
    continued = np.zeros((len(chains), length))
    continued[:, : chains.shape[1]] = chains
    for depth in range(1, length):
        above, here = continued[:, depth - 1], continued[:, depth]
        np.copyto(here, continuation * above, where=here == 0)
    return continued
