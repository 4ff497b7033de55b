"""A simulator of the budget: its speed-up on hardware that is not here.

It runs the real policy (`budget.DraftBudget`) against a cost curve, which says how long
steps take, and drafts that were recorded with what the target accepted of them. Cost
curves may be measured or published; the fields of their file are those of `CostCurve`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from .budget import DraftBudget
from .drafter import TreeShape
from .policy import BudgetLimits, DraftPlan, Policy, ScoredDrafts, Verdict
from .recording import ACCEPTANCE, STEPS
from .step_cost import KNOTS, StepCost, StepWork
from .tree_runs import have_likelier_siblings
from .validation import explain

WARM_UP = 100  # steps in which a budget gets to know the machine


class CostCurve(BaseModel):
    """How long steps take on some machine, in milliseconds.

    Attributes:
        name: of machine and model, for reports.
        verify_ms: [rows, ms] pairs; the target over that many rows, and all that a step
            does beside. Interpolated, and extrapolated by the last two.
        context_ms: a thousand tokens of context more.
        branch_ms: a branch of a tree, beside its rows.
        head_pass_ms, level_ms, head_row_ms: the head's first pass, a further level, and
            a row of either.
        noise: standard deviation of a step's time, in parts of it.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = ""
    verify_ms: tuple[tuple[float, float], ...] = Field(min_length=2)
    context_ms: float = Field(default=0.0, ge=0)
    branch_ms: float = Field(default=0.0, ge=0)
    head_pass_ms: float = Field(ge=0)
    level_ms: float = Field(ge=0)
    head_row_ms: float = Field(default=0.0, ge=0)
    noise: float = Field(default=0.0, ge=0)

    @model_validator(mode="after")
    def _rows_rise(self) -> CostCurve:
        rows = [pair[0] for pair in self.verify_ms]
        if any(b <= a for a, b in pairwise(rows)) or rows[0] < 1:
            raise ValueError(f"verify_ms: got rows {rows}, want them rising from 1 on")
        return self

    def seconds(self, work: StepWork) -> float:
        """Seconds of a step, without noise."""
        rows, ms = np.array(self.verify_ms).T
        verify = float(np.interp(work.rows, rows, ms))
        if work.rows > rows[-1]:
            slope = (ms[-1] - ms[-2]) / (rows[-1] - rows[-2])
            verify += max(slope, 0.0) * (work.rows - rows[-1])
        head = work.head_passes * self.head_pass_ms + work.levels * self.level_ms
        head += work.head_rows * self.head_row_ms
        verify += work.branches * self.branch_ms
        return (verify + head + work.context / 1000 * self.context_ms) / 1000


@dataclass(frozen=True)
class TracedDraft:
    """One draft as it was verified, all nodes of it.

    Attributes:
        scores: [num_nodes], log-probability of each node's path.
        depths: [num_nodes], 1 for children of the root.
        parents: [num_nodes], -1 for the root.
        accepted: [num_nodes], bool.
    """

    scores: np.ndarray
    depths: np.ndarray
    parents: np.ndarray
    accepted: np.ndarray

    @classmethod
    def of(
        cls, parents: Sequence[int], scores: Sequence[float], accepted: Sequence[int]
    ) -> TracedDraft:
        """From parents, scores, and the accepted nodes' numbers."""
        depths: list[int] = []
        for parent in parents:
            depths.append(1 if parent < 0 else depths[parent] + 1)
        mask = np.zeros(len(parents), dtype=bool)
        mask[list(accepted)] = True
        return cls(np.array(scores), np.array(depths), np.array(parents), mask)

    @property
    def num_branches(self) -> int:
        """Runs but for the first one: every child after the first of its parent."""
        return len(self.parents) - len(set(self.parents.tolist()))

    def limited(self, shape: TreeShape) -> TracedDraft:
        """What a head would have drafted within a smaller shape."""
        if shape.top_k == 1:
            kept = self._best_path()[: shape.depth]
        else:
            order = np.argsort(-self.scores, kind="stable")
            kept = np.sort(order[self.depths[order] <= shape.depth][: shape.num_nodes])
        return self.subset(kept)

    def subset(self, kept: np.ndarray) -> TracedDraft:
        """Only these nodes, parents among them; numbers rise."""
        new_index = np.full(len(self.parents) + 1, -1)  # the last one is the root's
        new_index[kept] = np.arange(len(kept))
        return TracedDraft(
            self.scores[kept],
            self.depths[kept],
            new_index[self.parents[kept]],
            self.accepted[kept],
        )

    def _best_path(self) -> np.ndarray:
        """The likeliest child of the root, of that one, and so on: a greedy chain."""
        path, here = [], -1
        while (children := np.flatnonzero(self.parents == here)).size:
            here = int(children[self.scores[children].argmax()])
            path.append(here)
        return np.array(path, dtype=int)


@dataclass(frozen=True)
class FixedShape:
    """The policy of a user who names a shape."""

    shape: TreeShape | None

    def plan(
        self,
        num_reqs: int,
        context: int,
        waiting: int = 0,
        may_sample: bool = False,
    ) -> DraftPlan:
        return DraftPlan(self.shape)

    def choose(self, drafts: ScoredDrafts, context: int) -> np.ndarray:
        return np.isfinite(drafts.scores)

    def observe_step(self, work: StepWork, seconds: float) -> None:
        pass

    def observe_verdicts(self, verdicts: Sequence[Verdict]) -> None:
        pass

    def forget(self, req_id: str) -> None:
        pass

    def confidence_error(self) -> float:
        return 0.0


@dataclass
class Simulated:
    """What a policy did at one batch size."""

    batch: int
    seconds: float = 0.0
    steps: int = 0
    tokens: int = 0
    drafts: int = 0
    drafted_nodes: int = 0
    verified_nodes: int = 0
    accepted: int = 0
    plain_steps: int = 0

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds

    @property
    def acceptance_length(self) -> float:
        """Tokens a target pass, of drafts that were verified."""
        return 1 + self.accepted / max(self.drafts, 1)


def simulate(
    policy: Policy,
    curve: CostCurve,
    traces: Sequence[TracedDraft],
    batch: int,
    steps: int,
    *,
    context: int = 256,
    seed: int = 0,
    warm_up: int = 0,
) -> Simulated:
    """Run a policy for a number of steps at one batch size.

    Args:
        traces: each request walks through them from a place of its own.
        context: tokens of one request.
        warm_up: first steps, which do not count.
    """
    rng = np.random.default_rng(seed)
    places = rng.integers(len(traces), size=batch)
    result, pending, plan = Simulated(batch), list[TracedDraft](), DraftPlan(None)
    for step in range(warm_up + steps):
        if step == warm_up:
            result = Simulated(batch)
        chosen = _choose(policy, pending, plan, batch * context)
        plan = policy.plan(batch, batch * context)
        grown, levels = _draft(plan, traces, places)
        places = (places + 1) % len(traces)
        work = _work(plan, chosen, batch, batch * context, levels)
        seconds = curve.seconds(work) * max(1 + curve.noise * rng.normal(), 0.1)
        policy.observe_verdicts(
            [
                Verdict(str(req), draft.parents.tolist(), draft.scores, draft.accepted)
                for req, draft in enumerate(chosen)
                if len(draft.scores)
            ]
        )
        policy.observe_step(work, seconds)
        _count(result, chosen, grown, batch, seconds)
        pending = grown
    return result


def _choose(
    policy: Policy, drafts: Sequence[TracedDraft], drafted_by: DraftPlan, context: int
) -> list[TracedDraft]:
    if not drafts:
        return []
    width = max(len(d.scores) for d in drafts)
    scores = np.full((len(drafts), width), -np.inf)
    depths = np.zeros((len(drafts), width), dtype=int)
    parents = np.full((len(drafts), width), -1)
    for row, draft in enumerate(drafts):
        scores[row, : len(draft.scores)] = draft.scores
        depths[row, : len(draft.scores)] = draft.depths
        parents[row, : len(draft.scores)] = draft.parents
    shape = drafted_by.shape
    kept = policy.choose(
        ScoredDrafts(
            [str(req) for req in range(len(drafts))],
            scores,
            depths,
            have_likelier_siblings(parents, scores),
            np.full(len(drafts), width),
            1 if shape is None else shape.top_k,
        ),
        context,
    )
    return [
        draft.subset(np.flatnonzero(mask)) if mask.any() else draft.subset(_NOTHING)
        for draft, mask in zip(drafts, kept, strict=True)
    ]


_NOTHING = np.zeros(0, dtype=int)


def _draft(
    plan: DraftPlan, traces: Sequence[TracedDraft], places: np.ndarray
) -> tuple[list[TracedDraft], int]:
    """Drafts of all requests, and the levels that grew after the head's first pass."""
    if plan.shape is None:
        return [], 0
    grown = [traces[place].limited(plan.shape) for place in places]
    depth = 1
    while depth < plan.shape.depth:
        last = [np.exp(d.scores[d.depths == depth]) for d in grown]
        mass = sum(np.sort(c)[::-1][: plan.shape.top_k].sum() for c in last)
        if plan.may_end(depth, mass) or not mass:
            break
        depth += 1
    cut = [draft.subset(np.flatnonzero(draft.depths <= depth)) for draft in grown]
    return cut, depth - 1


def _work(
    plan: DraftPlan,
    verified: Sequence[TracedDraft],
    batch: int,
    context: int,
    levels: int,
) -> StepWork:
    rows = batch + sum(len(d.scores) for d in verified)
    branches = sum(draft.num_branches for draft in verified)
    if plan.shape is None:
        return StepWork(rows, context, branches=branches)
    head_rows = rows + levels * batch * plan.shape.top_k
    return StepWork(rows, context, 1, levels, head_rows, branches)


def _count(
    result: Simulated,
    verified: Sequence[TracedDraft],
    grown: Sequence[TracedDraft],
    batch: int,
    seconds: float,
) -> None:
    accepted = sum(int(d.accepted.sum()) for d in verified)
    with_drafts = sum(len(d.scores) > 0 for d in verified)
    result.steps += 1
    result.seconds += seconds
    result.tokens += batch + accepted
    result.accepted += accepted
    result.drafts += with_drafts
    result.drafted_nodes += sum(len(d.scores) for d in grown)
    result.verified_nodes += sum(len(d.scores) for d in verified)
    result.plain_steps += with_drafts == 0


def read_curve(path: Path) -> CostCurve:
    """Read a cost curve from YAML or JSON.

    Raises:
        ValueError: no such file, or a field that is missing, unknown or wrong.
    """
    fields = _parse(path)
    try:
        return CostCurve.model_validate(fields)
    except ValidationError as error:
        raise ValueError(f"{path}: {explain(error, CostCurve)}") from error


def _parse(path: Path) -> Any:
    try:
        return yaml.safe_load(path.read_text("utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise ValueError(
            f"curve: got {path}, want a YAML or JSON file of a cost curve: {error}"
        ) from error


def curve_of_steps(path: Path) -> CostCurve:
    """The cost curve of an engine that recorded its steps.

    Raises:
        ValueError: no such file, lines that are none, or too few steps.
    """
    cost = StepCost()
    try:
        steps = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
        for step in steps:
            # Older records say nothing of branches and prompts.
            work = StepWork(
                **{k: step[k] for k in _WORK},
                branches=step.get("branches", 0),
                prompt_rows=step.get("prompt_rows", 0),
            )
            cost.observe(work, step["seconds"])
        widest = max(step["rows"] for step in steps)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"steps: got {path}, want the {STEPS} of a recorded run: {error}"
        ) from error
    if not cost.is_known:
        raise ValueError(f"steps: {path} holds {len(steps)}, want more; record longer")
    # What was never run is not in the curve, it is extrapolated.
    rows = KNOTS[: max(int(np.searchsorted(KNOTS, widest)) + 1, 2)]
    plain = cost.seconds(rows)

    def more(**work: float) -> float:
        return 1000 * float(cost.seconds(1, **work) - cost.seconds(1))

    return CostCurve(
        name=str(path),
        verify_ms=tuple(zip(rows.tolist(), (1000 * plain).tolist(), strict=True)),
        context_ms=more(context=1000),
        branch_ms=more(branches=1),
        head_pass_ms=more(head_passes=1),
        level_ms=more(levels=1),
        head_row_ms=more(head_rows=1),
    )


_WORK = ("rows", "context", "head_passes", "levels", "head_rows")


def read_traces(path: Path) -> list[TracedDraft]:
    """Read drafts that an engine recorded, one JSON object a line.

    Raises:
        ValueError: no such file, a line that is none, or no drafts at all.
    """
    try:
        lines = path.read_text("utf-8").splitlines()
        traces = list(_read_lines(lines))
    except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
        raise ValueError(
            f"traces: got {path}, want the {ACCEPTANCE} of a recorded run: {error}"
        ) from error
    if not traces:
        raise ValueError(f"traces: {path} holds no drafts; record a run that drafts")
    return traces


def _read_lines(lines: Iterable[str]) -> Iterator[TracedDraft]:
    for line in lines:
        record = json.loads(line)
        yield TracedDraft.of(record["parents"], record["scores"], record["accepted"])


@dataclass(frozen=True)
class Comparison:
    """What auto and fixed shapes reach at one batch size."""

    auto: Simulated
    fixed: dict[str, Simulated]

    @property
    def speed_up(self) -> float:
        return self.auto.tokens_per_s / self.fixed["off"].tokens_per_s

    @property
    def best(self) -> str:
        """Name of the fixed shape with the highest throughput."""
        return max(self.fixed, key=lambda name: self.fixed[name].tokens_per_s)


def compare(
    curve: CostCurve,
    traces: Sequence[TracedDraft],
    limits: BudgetLimits,
    batch: int,
    steps: int,
    context: int,
) -> Comparison:
    """Simulate the budget and fixed shapes at one batch size."""
    shapes: dict[str, TreeShape | None] = {"off": None}
    for length in range(1, limits.chain.depth + 1):
        shapes[f"chain:{length}"] = TreeShape.chain(length)
    for nodes in (4, 8, 16, 32):
        if limits.tree is not None and nodes <= limits.tree.num_nodes:
            shapes[f"tree:{nodes}"] = replace(limits.tree, num_nodes=nodes)

    def run(policy: Policy, warm_up: int = 0) -> Simulated:
        return simulate(
            policy, curve, traces, batch, steps, context=context, warm_up=warm_up
        )

    return Comparison(
        run(DraftBudget(limits), warm_up=WARM_UP),
        {name: run(FixedShape(shape)) for name, shape in shapes.items()},
    )
