"""The budget inside an engine: what it is told of the steps, and what it is asked.

The clock runs from one call of the scheduler to the next, so that everything counts
that a step costs, whichever process spends the time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

import numpy as np

from ..policy import DraftPlan, Policy, ScoredDrafts
from ..step_cost import HeadWork, StepWork
from ..tree_runs import have_likelier_siblings

# Steps with more rows of prompts than this say nothing of those without.
MAX_PROMPT_ROWS = 512


class StepBudget:
    """A policy, fed by the scheduler of one engine."""

    def __init__(
        self, policy: Policy, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.policy = policy
        self.last_plan = DraftPlan(None)
        self._clock = clock
        self._began = 0.0
        self._work: StepWork | None = None  # of the step that runs, if it can be timed
        self._head = HeadWork()
        self._waiting = 0  # rows that the head has not been run on
        self._req_ids: Collection[str] = ()

    def next_step(self, is_alive: Callable[[str], bool]) -> None:
        """A step is about to be scheduled, so the last one has ended.

        Args:
            is_alive: whether a request still runs. Where none of the last step's does,
                the engine may have been idle in between.
        """
        now = self._clock()
        work, head = self._work, self._head
        was_idle = not any(map(is_alive, self._req_ids))
        # Catching up is paid once, and says nothing of what steps cost.
        if work is not None and not head.caught_up and not was_idle:
            self.policy.observe_step(
                replace(
                    work,
                    head_passes=head.passes,
                    levels=head.levels,
                    head_rows=head.rows,
                ),
                now - self._began,
            )
        self._began, self._work, self._head = now, None, HeadWork()

    def plan(
        self,
        req_ids: Collection[str],
        rows: int,
        branches: int,
        context: int,
        prompt_rows: int = 0,
        may_sample: bool = False,
    ) -> DraftPlan:
        """What to draft after the step that has been scheduled.

        Args:
            rows, branches: that it verifies, rows of prompts among them.
            context: tokens in the KV cache, all requests together.
            prompt_rows: of these rows.
            may_sample: all requests may take sampled drafts.
        """
        self._req_ids = req_ids
        work = StepWork(rows, context, branches=branches, prompt_rows=prompt_rows)
        self._work = work if prompt_rows <= MAX_PROMPT_ROWS else None
        self.last_plan = self.policy.plan(
            len(req_ids), context, self._waiting, may_sample
        )
        return self.last_plan

    def head_did(self, work: HeadWork) -> None:
        """The workers have drafted."""
        self._head, self._waiting = work, work.waiting

    def choose(
        self,
        req_ids: list[str],
        parents: Sequence[Sequence[int]],
        scores: Sequence[Sequence[float]],
        max_nodes: Sequence[int],
        context: int,
    ) -> list[np.ndarray]:
        """Numbers of each request's nodes that the target shall verify, rising."""
        width = max(map(len, scores), default=0)
        padded = np.full((len(req_ids), width), -np.inf)
        depths = np.zeros((len(req_ids), width), dtype=int)
        above = np.full((len(req_ids), width), -1)
        for row, (tree, values) in enumerate(zip(parents, scores, strict=True)):
            padded[row, : len(values)] = values
            depths[row, : len(tree)] = depths_of(tree)
            above[row, : len(tree)] = tree
        shape = self.last_plan.shape
        drafts = ScoredDrafts(
            req_ids,
            padded,
            depths,
            have_likelier_siblings(above, padded),
            np.array(max_nodes, dtype=int),
            1 if shape is None else shape.top_k,
        )
        return [np.flatnonzero(row) for row in self.policy.choose(drafts, context)]


def depths_of(parents: Sequence[int]) -> list[int]:
    """Tokens from the root to each node."""
    depths: list[int] = []
    for parent in parents:
        depths.append(1 if parent < 0 else depths[parent] + 1)
    return depths
