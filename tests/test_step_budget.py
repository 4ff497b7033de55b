"""What a policy is told of an engine's steps."""

from __future__ import annotations

from typing import Any

import numpy as np

from vllm_eagle3.drafter import TreeShape
from vllm_eagle3.integration.step_budget import StepBudget
from vllm_eagle3.policy import DraftPlan, ScoredDrafts
from vllm_eagle3.step_cost import HeadWork, StepWork

TREE = DraftPlan(TreeShape(8, 4, 3))


class Listener:
    """A policy that plans trees and remembers what it heard."""

    def __init__(self) -> None:
        self.steps: list[tuple[StepWork, float]] = []
        self.drafts: list[ScoredDrafts] = []

    def plan(
        self,
        num_reqs: int,
        context: int,
        waiting: int = 0,
        may_sample: bool = False,
    ) -> DraftPlan:
        return TREE

    def choose(self, drafts: ScoredDrafts, context: int) -> np.ndarray:
        self.drafts.append(drafts)
        return drafts.scores > np.log(0.3)

    def observe_step(self, work: StepWork, seconds: float) -> None:
        self.steps.append((work, seconds))

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name} is not for the step's budget")


def test_steps_are_timed_from_one_to_the_next() -> None:
    policy, times = Listener(), iter([10.0, 10.5, 11.25, 14.0])
    budget = StepBudget(policy, lambda: next(times))
    running = {"a", "b"}
    budget.next_step(running.__contains__)
    budget.plan(["a", "b"], rows=7, branches=3, context=50)
    budget.head_did(HeadWork(1, 2, 15))
    budget.next_step(running.__contains__)
    assert policy.steps == [(StepWork(7, 50, 1, 2, 15, 3), 0.5)]
    # Rows of prompts are told apart, and long prompts say nothing of other steps.
    budget.plan(["a", "c"], rows=90, branches=0, context=50, prompt_rows=88)
    budget.next_step(running.__contains__)
    assert policy.steps[1:] == [(StepWork(90, 50, prompt_rows=88), 0.75)]
    budget.plan(["a", "c"], rows=902, branches=0, context=50, prompt_rows=900)
    budget.next_step(running.__contains__)
    assert len(policy.steps) == 2


def test_catching_up_is_not_taken_for_what_a_step_costs() -> None:
    policy, times = Listener(), iter([1.0, 2.0])
    budget = StepBudget(policy, lambda: next(times))
    budget.next_step(lambda req_id: True)
    budget.plan(["a"], rows=1, branches=0, context=50)
    budget.head_did(HeadWork(1, 2, 3, caught_up=400))
    budget.next_step(lambda req_id: True)
    assert policy.steps == []


def test_a_pause_between_batches_is_no_step() -> None:
    policy, times = Listener(), iter([1.0, 900.0])
    budget = StepBudget(policy, lambda: next(times))
    budget.next_step(lambda req_id: True)
    budget.plan(["a"], rows=1, branches=0, context=50)
    budget.next_step(lambda req_id: False)
    assert policy.steps == []


def test_drafts_of_any_size_become_a_rectangle() -> None:
    policy = Listener()
    budget = StepBudget(policy)
    budget.plan(["a", "b"], rows=2, branches=0, context=50)
    scores = [np.log([0.6, 0.5, 0.2]).tolist(), np.log([0.1]).tolist()]
    chosen = budget.choose(["a", "b"], [[-1, 0, 0], [-1]], scores, [3, 1], 50)
    assert [nodes.tolist() for nodes in chosen] == [[0, 1], []]
    (drafts,) = policy.drafts
    assert drafts.depths.tolist() == [[1, 2, 2], [1, 0, 0]]
    # The root's second child would be one, and padding may be anything.
    assert drafts.branches[:, :1].tolist() == [[False], [False]]
    assert drafts.branches[0].tolist() == [False, False, True]
    assert np.isneginf(drafts.scores[1, 1:]).all()
    assert drafts.top_k == 4
