"""The budget chooses what makes tokens come fastest, and drafts nothing otherwise."""

from __future__ import annotations

import time
from itertools import product

import numpy as np
import pytest

from vllm_eagle3.budget import DraftBudget
from vllm_eagle3.drafter import TreeShape
from vllm_eagle3.policy import BudgetLimits, DraftPlan, ScoredDrafts, Verdict
from vllm_eagle3.sampled_drafter import sampled_shape
from vllm_eagle3.step_cost import StepWork
from vllm_eagle3.tree_runs import have_likelier_siblings

CHAINS = BudgetLimits(TreeShape.chain(5))
TREES = BudgetLimits(TreeShape.chain(5), TreeShape(16, 4, 6))


def seconds_of(work: StepWork, row_ms: float) -> float:
    head = 1.5 * work.head_passes + 1.2 * work.levels
    return (20 + row_ms * work.rows + head) / 1000


def taught(row_ms: float, limits: BudgetLimits = CHAINS) -> DraftBudget:
    """A budget that knows a machine on which each row costs `row_ms`."""
    budget = DraftBudget(limits)
    for _ in range(60):
        for rows in (1, 2, 4, 8, 16, 32, 64, 128):
            work = StepWork(rows)
            budget.observe_step(work, seconds_of(work, row_ms))
        for levels in (0, 2, 4):
            work = StepWork(8, 0, 1, levels, 8)
            budget.observe_step(work, seconds_of(work, row_ms))
    return budget


def drafts(*confidences: list[float], depths: list[int] | None = None) -> ScoredDrafts:
    """One request for each list, a chain unless depths are given."""
    width = max(map(len, confidences))
    scores = np.full((len(confidences), width), -np.inf)
    for row, values in enumerate(confidences):
        scores[row, : len(values)] = np.log(values)
    levels = np.tile(depths or np.arange(1, width + 1), (len(confidences), 1))
    return ScoredDrafts(
        [str(row) for row in range(len(confidences))],
        scores,
        levels,
        np.zeros(scores.shape, dtype=bool),
        np.full(len(confidences), width),
        1 if depths is None else 4,
    )


def test_the_chosen_nodes_are_the_best_of_all_choices() -> None:
    budget = taught(row_ms=3.0)
    batch = drafts([0.9, 0.6, 0.3, 0.1], [0.5, 0.2, 0.1], [0.97, 0.9, 0.85, 0.8])
    chosen = budget.choose(batch, context=0)
    expected = budget._expected(batch)

    def rate(lengths: tuple[int, ...]) -> float:
        gain = sum(expected[row, :n].sum() for row, n in enumerate(lengths))
        seconds = budget._seconds(3 + sum(lengths), 3, 0, budget._plan)
        return (3 + gain) / float(seconds)

    best = max(product(range(5), range(4), range(5)), key=rate)
    assert tuple(chosen.sum(1)) == best
    assert best[2] == 4 and best[1] < 3


def test_nodes_go_to_the_requests_where_they_pay() -> None:
    chosen = taught(row_ms=4.0).choose(drafts([0.95, 0.9, 0.85], [0.2, 0.1, 0.05]), 0)
    assert chosen.tolist() == [[True] * 3, [False] * 3]


def test_cheap_rows_verify_everything_and_dear_rows_nothing() -> None:
    batch = drafts([0.6, 0.3, 0.2], [0.5, 0.3, 0.1])
    assert taught(row_ms=0.01).choose(batch, 0).all()
    assert not taught(row_ms=40.0).choose(batch, 0).any()


def test_a_branch_is_verified_only_where_it_pays_for_more_than_its_row() -> None:
    budget = taught(row_ms=0.1, limits=TREES)
    rng = np.random.default_rng(0)
    for _ in range(200):  # branches cost 3 ms each
        rows = int(rng.integers(2, 9))
        branches = int(rng.integers(0, rows - 1))
        work = StepWork(rows, 0, 1, 0, rows, branches=branches)
        seconds = seconds_of(work, 0.1) + 0.003 * work.branches
        budget.observe_step(work, seconds)
    batch = drafts([0.6, 0.15, 0.12, 0.1], depths=[1, 1, 1, 1])
    assert budget.choose(batch, 0).sum() == 4
    batch.branches[:] = [[False, True, True, True]]
    assert budget.choose(batch, 0).tolist() == [[True, False, False, False]]


def test_chosen_nodes_of_trees_bring_their_parents() -> None:
    budget = taught(row_ms=1.5, limits=TREES)
    rng = np.random.default_rng(0)
    for _ in range(30):
        parents = [int(rng.integers(-1, node)) for node in range(12)]
        depths, scores = [0] * 12, [0.0] * 12
        for node, parent in enumerate(parents):
            depths[node] = 1 + (depths[parent] if parent >= 0 else 0)
            above = scores[parent] if parent >= 0 else 0.0
            scores[node] = above + np.log(rng.choice([1.0, 0.9, 0.5, 0.1]))
        batch = ScoredDrafts(
            ["0"],
            np.array([scores]),
            np.array([depths]),
            have_likelier_siblings(np.array([parents]), np.array([scores])),
            np.array([12]),
            4,
        )
        chosen = budget.choose(batch, 0)[0]
        for node, parent in enumerate(parents):
            assert not chosen[node] or parent < 0 or chosen[parent]


def test_a_request_s_own_limit_holds() -> None:
    batch = drafts([0.9, 0.8, 0.7], [0.9, 0.8, 0.7], [0.9, 0.8, 0.7])
    batch.max_nodes[:] = [0, 2, 3]
    for budget in (taught(row_ms=0.01), DraftBudget(CHAINS)):
        assert budget.choose(batch, 0).sum(1).tolist() == [0, 2, 3]


def grown_depth(plan: DraftPlan, confidence: float, num_reqs: int) -> int:
    """Where growth ends, each node as confident."""
    if plan.shape is None:
        return 0
    levels = range(1, plan.shape.depth)
    ends = (n for n in levels if plan.may_end(n, num_reqs * confidence**n))
    return next(ends, plan.shape.depth)


def run(
    budget: DraftBudget, row_ms: float, num_reqs: int, steps: int, confidence: float
) -> list[DraftPlan]:
    """Steps on a machine where each row costs `row_ms`; drafts are as confident."""
    plans, pending, rng = [], 0, np.random.default_rng(0)
    for _ in range(steps):
        accepted = 0
        if pending:
            values = [confidence**depth for depth in range(1, pending + 1)]
            batch = drafts(*[values] * num_reqs)
            chosen = budget.choose(batch, 0)
            for row, mask in enumerate(chosen):
                hits = np.zeros(mask.sum(), dtype=bool)
                # As many accepted in the mean as the head is confident of.
                hits[: int(rng.geometric(1 - confidence)) - 1] = True
                scores = batch.scores[row][mask]
                if scores.size:
                    budget.observe_verdicts([Verdict(str(row), [], scores, hits)])
            accepted = int(chosen.sum())
        plan = budget.plan(num_reqs, 0)
        pending = grown_depth(plan, confidence, num_reqs)
        levels = max(pending - 1, 0)
        work = StepWork(num_reqs + accepted, 0, int(pending > 0), levels, 0)
        budget.observe_step(work, seconds_of(work, row_ms))
        plans.append(plan)
    return plans


def test_drafting_stays_on_where_it_pays_and_off_where_not() -> None:
    pays = run(DraftBudget(CHAINS), 0.1, 1, 200, confidence=0.7)
    assert sum(plan.shape is not None for plan in pays[40:]) > 150
    costs = run(DraftBudget(CHAINS), 8.0, 16, 200, confidence=0.5)
    assert sum(plan.shape is not None for plan in costs[40:]) < 5


def test_plain_steps_are_seen_before_anything_is_drafted_at_a_batch_size() -> None:
    """Else their cost is inferred from steps that drafted, and nothing corrects it."""
    budget = DraftBudget(CHAINS)
    run(budget, 0.1, 1, 60, confidence=0.7)
    assert budget.plan(1, 0).shape is not None
    first = []
    for _ in range(4):
        first.append(budget.plan(8, 0))
        budget.observe_step(StepWork(8), seconds_of(StepWork(8), 0.1))
    assert first == [DraftPlan(None)] * 4
    assert budget.plan(8, 0).shape is not None


def test_what_does_not_pay_is_tried_at_growing_intervals() -> None:
    plans = run(DraftBudget(CHAINS), 8.0, 16, 3000, confidence=0.5)
    tried = np.flatnonzero([plan.shape is not None for plan in plans])
    tried = tried[tried > 40]
    assert len(tried) >= 3
    gaps = np.diff(tried)
    assert gaps[-1] > 2 * gaps[0]
    assert len(tried) < 0.01 * len(plans)


def test_a_changed_text_switches_drafting_on_again() -> None:
    budget = DraftBudget(CHAINS)
    hopeless = run(budget, 1.5, 8, 300, confidence=0.05)
    assert sum(plan.shape is not None for plan in hopeless[100:]) < 10
    better = run(budget, 1.5, 8, 1000, confidence=0.9)
    assert sum(plan.shape is not None for plan in better[-100:]) > 90


def test_the_chain_is_as_long_as_confidence_carries() -> None:
    sure = run(DraftBudget(CHAINS), 0.1, 1, 300, confidence=0.95)
    unsure = run(DraftBudget(CHAINS), 0.1, 1, 300, confidence=0.35)

    def depth(plans: list[DraftPlan], confidence: float) -> float:
        return float(np.mean([grown_depth(p, confidence, 1) for p in plans[100:]]))

    assert depth(sure, 0.95) > 4
    assert 0.5 < depth(unsure, 0.35) < 3


def test_a_decision_costs_less_than_a_hundredth_of_a_step() -> None:
    """A step of 64 requests with trees of 16 nodes; steps here take 20 ms and more."""
    budget = taught(row_ms=0.5, limits=TREES)
    rng = np.random.default_rng(0)
    scores = np.sort(np.log(rng.uniform(0.01, 1, (64, 16))))[:, ::-1]
    batch = ScoredDrafts(
        [str(r) for r in range(64)],
        scores,
        np.tile(np.repeat([1, 2, 3, 4], 4), (64, 1)),
        np.tile([False, True, True, True], (64, 4)),
        np.full(64, 16),
        4,
    )
    chain = ScoredDrafts(
        batch.req_ids,
        scores[:, :5],
        np.tile(np.arange(1, 6), (64, 1)),
        np.zeros((64, 5), dtype=bool),
        np.full(64, 5),
    )
    budget.choose(chain, 0)
    times = []
    for _ in range(40):
        began = time.perf_counter()
        chosen = budget.choose(batch, 64 * 300)
        budget.plan(64, 64 * 300)
        budget.observe_step(StepWork(300, 64 * 300, 1, 3, 1000), 0.15)
        times.append(time.perf_counter() - began)
    assert chosen.any()
    # The quicker half: other work on the machine must not fail the test.
    assert np.quantile(times, 0.25) < 0.01 * 0.064


@pytest.mark.parametrize("limits", [CHAINS, TREES], ids=["chains", "trees"])
def test_the_same_steps_lead_to_the_same_plans(limits: BudgetLimits) -> None:
    first, second = (run(DraftBudget(limits), 0.5, 4, 150, 0.6) for _ in range(2))
    assert first == second


def test_drafting_is_tried_less_often_where_many_rows_wait_for_the_head() -> None:
    def tries(waiting: int) -> int:
        budget = taught(row_ms=8.0)
        for _ in range(30):
            budget.choose(drafts([0.3, 0.1, 0.05, 0.02, 0.01]), 0)
            budget.observe_step(StepWork(1), seconds_of(StepWork(1), 8.0))
        plans = [budget.plan(1, 0, waiting) for _ in range(3000)]
        return sum(plan.shape is not None for plan in plans)

    assert 0 < tries(waiting=20_000) < tries(waiting=0)


def run_sampling(budget: DraftBudget, steps: int, share: float) -> list[DraftPlan]:
    """One request at a time on a machine whose rows are cheap.

    Ranked drafts are accepted with probability 0.3 each, and so is their confidence;
    of sampled ones the first child with `share`, and no other child.
    """
    plans, pending, rng = [], DraftPlan(None), np.random.default_rng(0)
    for _ in range(steps):
        rows = 1
        if pending.sampled:
            assert pending.shape is not None
            shape = sampled_shape(pending.shape)
            hits = np.zeros(shape.num_nodes, dtype=bool)
            hits[0] = rng.random() < share
            no_scores = np.zeros(shape.num_nodes)
            verdict = Verdict("0", shape.parents, no_scores, hits, sampled=True)
            budget.observe_verdicts([verdict])
            rows += shape.num_nodes
        elif pending.shape is not None:
            batch = drafts([0.3**depth for depth in range(1, pending.shape.depth + 1)])
            chosen = budget.choose(batch, 0)[0]
            hits = np.zeros(chosen.sum(), dtype=bool)
            hits[: int(rng.geometric(0.7)) - 1] = True
            budget.observe_verdicts([Verdict("0", [], batch.scores[0][chosen], hits)])
            rows += int(chosen.sum())
        plan = budget.plan(1, 0, may_sample=True)
        levels = plan.shape.depth - 1 if plan.shape else 0
        work = StepWork(rows, 0, int(plan.shape is not None), levels, rows + levels)
        budget.observe_step(work, seconds_of(work, 0.1))
        plans.append(plan)
        pending = plan
    return plans


def test_sampled_drafts_are_taken_where_more_of_them_are_accepted() -> None:
    for share, most in ((0.8, True), (0.05, False)):
        plans = run_sampling(DraftBudget(CHAINS), 400, share)[200:]
        assert (sum(plan.sampled for plan in plans) > 150) == most
        # What is drawn is verified whole, however confident the head was.
        assert not any(plan.min_masses for plan in plans if plan.sampled)


def test_sampled_drafts_end_when_one_request_may_not_take_them() -> None:
    budget = DraftBudget(TREES)
    assert any(plan.sampled for plan in run_sampling(budget, 400, 0.8)[-20:])
    plans = [budget.plan(1, 0, may_sample=False) for _ in range(50)]
    assert not any(plan.sampled for plan in plans)
    assert any(budget.plan(1, 0, may_sample=True).sampled for _ in range(50))
