"""What an engine asks of a policy and tells it; `budget` has the one that serves.

Others stand in for it: `recording` drafts by every kind of plan, the simulator's fixed
shapes by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from .config import AUTO_CHAIN
from .drafter import TreeShape
from .step_cost import StepWork


@dataclass(frozen=True)
class DraftPlan:
    """What the head drafts after a step.

    Attributes:
        shape: limits of each request's tree; None means that nothing is drafted.
        min_masses: growth ends when the confidences of the last level's best nodes, of
            all requests together, sum to less; by level, empty for never.
        sampled: drafts are drawn, in the shape's `sampled_shape`, and verified whole.
    """

    shape: TreeShape | None
    min_masses: tuple[float, ...] = ()
    sampled: bool = False

    @property
    def kind(self) -> str:
        """What is drafted: off, chain, tree, or sampled for either of them."""
        if self.shape is None:
            return "off"
        if self.sampled:
            return "sampled"
        return "tree" if self.shape.top_k > 1 else "chain"

    def may_end(self, level: int, mass: float) -> bool:
        """Whether growth may end after a level with so much confidence."""
        return level <= len(self.min_masses) and mass < self.min_masses[level - 1]


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
        branches: [num_reqs, num_nodes], bool: has a likelier sibling, so that it is a
            branch more to verify.
        max_nodes: [num_reqs], most nodes that a request may have verified.
        top_k: children a node had; 1 for chains.
    """

    req_ids: list[str]
    scores: np.ndarray
    depths: np.ndarray
    branches: np.ndarray
    max_nodes: np.ndarray
    top_k: int = 1


@dataclass(frozen=True)
class Verdict:
    """What the target accepted of one request's verified nodes.

    Attributes:
        parents: of each node, -1 for the root.
        scores: [num_nodes], log-probability of the path.
        accepted: [num_nodes], bool.
        sampled: the nodes were drawn, and their scores say nothing.
    """

    req_id: str
    parents: Sequence[int]
    scores: np.ndarray
    accepted: np.ndarray
    sampled: bool = False


class Policy(Protocol):
    """What an engine asks and tells; `budget.DraftBudget` explains each."""

    def plan(
        self,
        num_reqs: int,
        context: int,
        waiting: int = 0,
        may_sample: bool = False,
    ) -> DraftPlan: ...

    def choose(self, drafts: ScoredDrafts, context: int) -> np.ndarray: ...

    def observe_step(self, work: StepWork, seconds: float) -> None: ...

    def observe_verdicts(self, verdicts: Sequence[Verdict]) -> None: ...

    def forget(self, req_id: str) -> None: ...

    def confidence_error(self) -> float: ...
