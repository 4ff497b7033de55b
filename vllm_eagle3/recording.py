"""Record what a budget has to know: costs of steps, and what was accepted of drafts.

A recording engine drafts in turn by every kind of plan, whatever it costs, and verifies
all of it, so that the records hold what a policy might choose, not what one chose:

    steps.jsonl        a step: the fields of `StepWork`, and "seconds"
    acceptance.jsonl   a draft: "parents" and "scores" of its nodes, "accepted" nodes

Of drafts only those of the largest shape are kept. Smaller ones can be cut out of them;
a smaller one says nothing of the nodes that it lacks, and taken for a large one it
would make every larger shape look worse than it is. `simulate` reads both files.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np

from .drafter import TreeShape
from .policy import BudgetLimits, DraftPlan, ScoredDrafts, Verdict
from .step_cost import StepWork

STEPS, ACCEPTANCE = "steps.jsonl", "acceptance.jsonl"


class RecordingPolicy:
    """In the place of `DraftBudget`; every request's drafts are verified whole.

    Args:
        folder: gets the two files; older records in it are continued.
    """

    def __init__(self, limits: BudgetLimits, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        # Line by line: engines are often ended without a word.
        self._steps = (folder / STEPS).open("a", encoding="utf-8", buffering=1)
        self._drafts = (folder / ACCEPTANCE).open("a", encoding="utf-8", buffering=1)
        shapes: list[TreeShape | None] = [None, limits.chain, TreeShape.chain(1)]
        shapes += [limits.tree] if limits.tree is not None else []
        self._plans = [DraftPlan(shape) for shape in shapes]
        self._largest = limits.tree or limits.chain
        self._top_k: dict[str, int] = {}  # request -> that of its last drafts
        self._step = 0

    def plan(
        self,
        num_reqs: int,
        context: int,
        waiting: int = 0,
        may_sample: bool = False,
    ) -> DraftPlan:
        self._step += 1
        return self._plans[self._step % len(self._plans)]

    def choose(self, drafts: ScoredDrafts, context: int) -> np.ndarray:
        self._top_k.update(dict.fromkeys(drafts.req_ids, drafts.top_k))
        place = np.arange(drafts.scores.shape[1])
        return np.isfinite(drafts.scores) & (place < drafts.max_nodes[:, None])

    def observe_step(self, work: StepWork, seconds: float) -> None:
        self._steps.write(json.dumps({**asdict(work), "seconds": seconds}) + "\n")

    def observe_verdicts(self, verdicts: Sequence[Verdict]) -> None:
        for verdict in verdicts:
            if not self._is_whole(verdict):
                continue
            record = {
                "parents": list(verdict.parents),
                "scores": verdict.scores.round(4).tolist(),
                "accepted": np.flatnonzero(verdict.accepted).tolist(),
            }
            self._drafts.write(json.dumps(record) + "\n")

    def _is_whole(self, verdict: Verdict) -> bool:
        """Whether it is one of the largest shape, and nothing was cut off."""
        is_full = len(verdict.parents) == self._largest.num_nodes
        # A request may have been aborted while its drafts were verified.
        return is_full and self._top_k.get(verdict.req_id) == self._largest.top_k

    def forget(self, req_id: str) -> None:
        self._top_k.pop(req_id, None)

    def confidence_error(self) -> float:
        return 0.0
