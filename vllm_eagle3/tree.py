"""DraftTree: the drafts of a batch of requests as one forest of tensors.

A node is a drafted token; its parent is another node or the root, the last token the
target has confirmed. Row 0 of the target's pass is the root and row i+1 is node i:

    root ─┬─ 0 "the" ─┬─ 2 "cat"        node      0   1   2   3
          │           └─ 3 "dog"        parents  -1  -1   0   0
          └─ 1 "a"                      depths    1   1   2   2

Parents come before children, so any prefix of the nodes is a valid tree and a
scheduler may cut a tree anywhere. A chain is the tree with parents -1, 0, 1, ...
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

ROOT = -1


@dataclass(frozen=True)
class DraftTree:
    """Nodes of every request, padded to the widest; all on one device.

    Attributes:
        token_ids: [num_reqs, num_nodes], int64.
        parents: [num_reqs, num_nodes], node index or ROOT; always below the index.
        scores: [num_reqs, num_nodes], log-probability of the path under the head.
    """

    token_ids: torch.Tensor
    parents: torch.Tensor
    scores: torch.Tensor

    @property
    def num_nodes(self) -> int:
        return self.token_ids.shape[1]

    @property
    def depths(self) -> torch.Tensor:
        """Tokens from the root, [num_reqs, num_nodes]; a child of the root is 1."""
        return self.ancestor_mask().sum(-1)

    def ancestor_mask(self) -> torch.Tensor:
        """[num_reqs, num_nodes, num_nodes]: node i sees node j (itself included)."""
        num_reqs, num_nodes = self.parents.shape
        mask = torch.eye(num_nodes, dtype=torch.bool, device=self.parents.device)
        mask = mask.repeat(num_reqs, 1, 1)
        reqs = torch.arange(num_reqs, device=self.parents.device)
        for node in range(1, num_nodes):
            parent = self.parents[:, node]
            seen_by_parent = mask[reqs, parent.clamp(min=0)]
            mask[:, node] |= seen_by_parent & (parent >= 0)[:, None]
        return mask


def chain(token_ids: torch.Tensor, scores: torch.Tensor) -> DraftTree:
    """The tree with one node a depth; both arguments [num_reqs, num_nodes]."""
    parents = torch.arange(-1, token_ids.shape[1] - 1, device=token_ids.device)
    return DraftTree(token_ids, parents.expand_as(token_ids), scores)
