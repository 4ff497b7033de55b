"""Grow and re-rank a dynamic draft tree (EAGLE-2, section 4; kept by EAGLE-3).

Level by level: the best `top_k` nodes of the last level, by cumulative log-probability,
are run through the head and each gets its best `top_k` tokens as children. Then the
best `num_nodes` of all nodes are kept. A path's score never rises with its length, so
the kept nodes always form a tree. With `top_k` 1 this is greedy chain drafting.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from .argmax import argmax
from .tree import ROOT, DraftTree, chain


@dataclass(frozen=True)
class TreeShape:
    """How far a tree may grow: children a node, levels, and nodes that are kept."""

    num_nodes: int
    top_k: int
    depth: int

    def __post_init__(self) -> None:
        if min(self.num_nodes, self.top_k, self.depth) < 1:
            raise ValueError(
                f"tree shape: got num_nodes={self.num_nodes}, top_k={self.top_k}, "
                f"depth={self.depth}; want each at least 1"
            )

    @classmethod
    def chain(cls, length: int) -> TreeShape:
        return cls(num_nodes=length, top_k=1, depth=length)


@dataclass(frozen=True)
class HeadOutput:
    """What the head says about rows: the feature it feeds back, and draft logits.

    features: [num_reqs, rows, hidden]; logits: [num_reqs, rows, draft_vocab].
    """

    features: torch.Tensor
    logits: torch.Tensor


# advance(level, token_ids, features, parent_row) -> HeadOutput
#   level: 1 for children of the root, 2 for theirs, ...
#   token_ids: [num_reqs, rows], target ids
#   features: [num_reqs, rows, hidden], fed back by the parents
#   parent_row: [num_reqs, rows], row of each one's parent in the level before
Advance = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], HeadOutput]
# is_enough(level, scores) -> whether growth may end after this level, given [num_reqs,
#   rows], the cumulative log-probabilities of the nodes that would be run next
IsEnough = Callable[[int, torch.Tensor], bool]


def grow(
    root: HeadOutput,
    advance: Advance,
    to_target_ids: torch.Tensor | None,
    shape: TreeShape,
    is_enough: IsEnough | None = None,
) -> DraftTree:
    """Grow one tree per request.

    Args:
        root: the head on each request's last confirmed token, one row each.
        advance: runs the head on the rows of one level.
        to_target_ids: draft id -> target id, [draft_vocab]; None when they are equal.
        shape: limits of the tree.
        is_enough: asked before each further level; the tree may be smaller then.
            Chains have scores only where it is given.
    """
    if shape.top_k == 1:
        return _grow_chain(root, advance, to_target_ids, shape.depth, is_enough)
    return _grow_tree(root, advance, to_target_ids, shape, is_enough)


def _grow_chain(
    root: HeadOutput,
    advance: Advance,
    to_target_ids: torch.Tensor | None,
    depth: int,
    is_enough: IsEnough | None,
) -> DraftTree:
    """One node a level; where nobody asks for its score, it is not computed."""
    output, drafts, scores = root, [], []
    score = root.logits.new_zeros(root.logits.shape[:2], dtype=torch.float32)
    parent_row = torch.zeros_like(score, dtype=torch.int64)
    for level in range(1, depth + 1):
        token_ids = argmax(output.logits)  # [num_reqs, 1]
        if is_enough is not None:
            score = score + _log_q(output.logits, token_ids)
        if to_target_ids is not None:
            token_ids = to_target_ids[token_ids]
        drafts.append(token_ids)
        scores.append(score)
        if level == depth or (is_enough is not None and is_enough(level, score)):
            break
        output = advance(level, token_ids, output.features, parent_row)
    return chain(torch.cat(drafts, dim=1), torch.cat(scores, dim=1))


def _log_q(
    logits: torch.Tensor,  # [num_reqs, rows, draft_vocab]
    ids: torch.Tensor,  # [num_reqs, rows]
) -> torch.Tensor:
    logits = logits.float()
    return logits.gather(-1, ids[..., None])[..., 0] - logits.logsumexp(-1)


def _grow_tree(
    root: HeadOutput,
    advance: Advance,
    to_target_ids: torch.Tensor | None,
    shape: TreeShape,
    is_enough: IsEnough | None,
) -> DraftTree:
    num_reqs, top_k, device = len(root.logits), shape.top_k, root.logits.device
    reqs = torch.arange(num_reqs, device=device)[:, None]
    output = root
    frontier_node = torch.full((num_reqs, 1), ROOT, device=device)
    frontier_score = torch.zeros(num_reqs, 1, device=device)
    tokens, parents, scores, num_grown = [], [], [], 0
    for level in range(1, shape.depth + 1):
        # [num_reqs, rows, top_k]: children of every row of the frontier
        log_q, ids = output.logits.float().log_softmax(-1).topk(top_k, dim=-1)
        if to_target_ids is not None:
            ids = to_target_ids[ids]
        score = (frontier_score[..., None] + log_q).flatten(1)
        tokens.append(ids.flatten(1))
        parents.append(frontier_node[..., None].expand_as(ids).flatten(1))
        scores.append(score)
        if level == shape.depth:
            break
        # The next frontier: the best children, whoever their parents are.
        frontier_score, child = score.topk(min(top_k, score.shape[1]), dim=1)
        if _is_settled(scores, frontier_score[:, 0], shape.num_nodes):
            break
        if is_enough is not None and is_enough(level, frontier_score):
            break
        parent_row = child // top_k
        frontier_node = child + num_grown
        num_grown += score.shape[1]
        features = output.features[reqs, parent_row]
        output = advance(level, tokens[-1].gather(1, child), features, parent_row)
    return _keep_best(
        torch.cat(tokens, 1), torch.cat(parents, 1), torch.cat(scores, 1), shape
    )


def _is_settled(
    scores: list[torch.Tensor],  # of each level, [num_reqs, nodes]
    best: torch.Tensor,  # [num_reqs], of the last level
    num_nodes: int,
) -> bool:
    """Whether no child of the last level can be among the best `num_nodes`.

    Asking costs a device synchronisation, so only the CPU asks.
    """
    num_grown = sum(score.shape[1] for score in scores)
    if best.device.type != "cpu" or num_grown < num_nodes:
        return False
    worst_kept = torch.cat(scores, 1).topk(num_nodes, dim=1).values[:, -1]
    return bool((best <= worst_kept).all())


def _keep_best(
    token_ids: torch.Tensor,  # [num_reqs, num_grown], parents before children
    parents: torch.Tensor,
    scores: torch.Tensor,
    shape: TreeShape,
) -> DraftTree:
    """Keep the best nodes, in growing order, with parents renumbered."""
    num_kept = min(shape.num_nodes, scores.shape[1])
    # Stable, so that among equal scores a parent wins over its child.
    best = scores.argsort(dim=1, descending=True, stable=True)[:, :num_kept]
    kept = best.sort(dim=1).values
    new_index = torch.full_like(parents, ROOT)
    order = torch.arange(num_kept, device=kept.device).expand_as(kept)
    new_index.scatter_(1, kept, order)
    old_parents = parents.gather(1, kept)
    new_parents = new_index.gather(1, old_parents.clamp(min=0))
    return DraftTree(
        token_ids.gather(1, kept),
        torch.where(old_parents == ROOT, old_parents, new_parents),
        scores.gather(1, kept),
    )
