"""Verification: which drafts the target confirms. Pure functions, no randomness.

Greedy drafts are judged by sample-and-match: at a node the target's own token is drawn
(or is the argmax); if a child drafted it, descend, otherwise emit it and stop. Every
emitted token is a plain target sample, so the output law is the target's whatever was
drafted. The last token is the bonus token at a leaf, a recovered token elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from .tree import ROOT

PADDING = -1
NOWHERE = -2  # parent of padding nodes: no walk comes by


@dataclass(frozen=True)
class Verdict:
    """The confirmed path of every request, padded with -1.

    Attributes:
        token_ids: [num_reqs, max_depth + 1], accepted tokens and then one recovered or
            bonus token.
        nodes: [num_reqs, max_depth], the accepted nodes, so that token_ids[:, d] is
            the token of nodes[:, d] where that is not padding.
    """

    token_ids: torch.Tensor
    nodes: torch.Tensor

    @property
    def num_accepted(self) -> torch.Tensor:
        """Accepted drafts, [num_reqs]; acceptance length is one more."""
        return (self.nodes >= 0).sum(1)


# say(here, alive) -> (token, child)
#   here: [num_reqs], the node that each walk has come to, or ROOT
#   alive: [num_reqs] bool, walks that have not ended; the others are ignored
#   token: [num_reqs], what the target says there
#   child: [num_reqs], the child of `here` that drafted this token, or -1
Say = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


def walk(
    say: Say,
    num_reqs: int,
    deepest: int,
    device: torch.device,
) -> Verdict:
    """Go down every request's tree along what the target says.

    Args:
        deepest: nodes on the longest path.
    """
    here = torch.full((num_reqs,), ROOT, device=device)
    alive = torch.ones(num_reqs, dtype=torch.bool, device=device)
    emitted, accepted = [], []
    for _ in range(deepest + 1):
        token, child = say(here, alive)
        emitted.append(torch.where(alive, token, PADDING))
        alive = alive & (child >= 0)
        if not bool(alive.any()):
            break
        here = torch.where(alive, child, here)
        accepted.append(torch.where(alive, here, PADDING))
    nodes = torch.stack(accepted, 1) if accepted else here.new_empty(num_reqs, 0)
    return Verdict(torch.stack(emitted, 1), nodes)


def without_padding(parents: torch.Tensor, num_nodes: torch.Tensor) -> torch.Tensor:
    """Parents [num_reqs, num_nodes] with padding nodes taken out of the tree."""
    in_use = torch.arange(parents.shape[1], device=parents.device) < num_nodes[:, None]
    return torch.where(in_use, parents, NOWHERE)


def matching_child(
    token_ids: torch.Tensor,  # [num_reqs, num_nodes]
    siblings: torch.Tensor,  # [num_reqs, num_nodes] bool, children of one node
    token: torch.Tensor,  # [num_reqs]
) -> torch.Tensor:
    """The child that drafted `token`, or -1."""
    matches = siblings & (token_ids == token[:, None])
    # Siblings are distinct, so the sum has one term at most.
    number = torch.arange(1, matches.shape[1] + 1, device=token.device)
    return (matches * number).sum(1) - 1


def match_tree(
    token_ids: torch.Tensor,  # [num_reqs, num_nodes]
    parents: torch.Tensor,  # [num_reqs, num_nodes], -1 for the root
    num_nodes: torch.Tensor,  # [num_reqs], nodes in use; later ones are padding
    target_tokens: torch.Tensor,  # [num_reqs, num_nodes + 1], row 0 is the root's
) -> Verdict:
    """Follow the target's tokens down each tree.

        root ─┬─ 0 "the" ─┬─ 2 "cat"      target says  root: "the"  0: "dog"  3: "!"
              │           └─ 3 "dog"      accepted     nodes 0, 3
              └─ 1 "a"                    emitted      "the" "dog" "!"

    `target_tokens[:, i + 1]` is the target's token after node i. Siblings are distinct,
    so at most one child matches.
    """
    num_reqs, width = token_ids.shape
    reqs = torch.arange(num_reqs, device=token_ids.device)
    parents = without_padding(parents, num_nodes)

    def say(
        here: torch.Tensor, alive: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        token = target_tokens[reqs, here + 1]
        return token, matching_child(token_ids, parents == here[:, None], token)

    return walk(say, num_reqs, width, token_ids.device)
