"""Is the head's confidence right? Its probability of a draft against what is accepted.

A dynamic tree keeps the nodes that the head holds likely (EAGLE-2, section 3), so it
is as good as the head's probabilities are calibrated. A node is judged when its parent
was accepted: then the head said how likely it is, and the target says whether.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from .decode import Step
from .tree import ROOT

NUM_BINS = 10


@dataclass(frozen=True)
class Judged:
    """Judged draft nodes: the head's probability of each given its parent, and if it
    was accepted; both [num_judged]."""

    predicted: torch.Tensor
    accepted: torch.Tensor


@dataclass(frozen=True)
class Bin:
    """Nodes of like confidence: their number, mean confidence and accepted share."""

    nodes: int
    predicted: float
    accepted: float


def judged_nodes(steps: Iterable[Step]) -> Judged:
    """The children of the root and of every accepted node, of all steps.

    Trees of a chain shape carry no scores; grow them with `top_k` of 2 or more.
    """
    predicted, accepted = [], []
    for step in steps:
        parents, scores = step.tree.parents[0], step.tree.scores[0]
        hit = torch.zeros_like(parents, dtype=torch.bool)
        path = step.verdict.nodes[0]
        hit[path[path >= 0]] = True
        at_root = parents == ROOT
        parent = parents.clamp(min=0)
        of_parent = torch.where(at_root, 0.0, scores[parent])
        reached = at_root | hit[parent]
        predicted.append((scores - of_parent).exp()[reached])
        accepted.append(hit[reached])
    if not predicted:
        return Judged(torch.empty(0), torch.empty(0, dtype=torch.bool))
    return Judged(torch.cat(predicted), torch.cat(accepted))


def bins(judged: Judged, num_bins: int = NUM_BINS) -> list[Bin]:
    """Nodes sorted into equal ranges of confidence; empty ranges are left out."""
    which = (judged.predicted * num_bins).long().clamp(0, num_bins - 1)
    found = []
    for index in range(num_bins):
        here = which == index
        if bool(here.any()):
            found.append(
                Bin(
                    int(here.sum()),
                    float(judged.predicted[here].mean()),
                    float(judged.accepted[here].float().mean()),
                )
            )
    return found


def expected_calibration_error(found: Iterable[Bin]) -> float:
    """Mean of |accepted - predicted| over nodes (Naeini 2015, ECE); 0 is calibrated.

    Raises:
        ValueError: no nodes.
    """
    parts = list(found)
    total = sum(part.nodes for part in parts)
    if not total:
        raise ValueError("bins: got none, want judged nodes; decode more tokens")
    gaps = (part.nodes * abs(part.accepted - part.predicted) for part in parts)
    return sum(gaps) / total
