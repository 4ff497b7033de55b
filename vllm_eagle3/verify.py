"""Verification: which drafts the target confirms. Pure functions, no randomness.

Greedy drafts are judged by sample-and-match: at a node the target's own token is drawn
(or is the argmax); if a child drafted it, descend, otherwise emit it and stop. Every
emitted token is a plain target sample, so the output law is the target's whatever was
drafted. The last token is the bonus token at a leaf, a recovered token elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

PADDING = -1


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
    in_use = torch.arange(width, device=token_ids.device) < num_nodes[:, None]
    here = torch.full((num_reqs,), -1, device=token_ids.device)
    alive = torch.ones(num_reqs, dtype=torch.bool, device=token_ids.device)
    emitted, accepted = [], []
    for _ in range(width + 1):
        token = target_tokens[reqs, here + 1]
        emitted.append(torch.where(alive, token, PADDING))
        child = in_use & (parents == here[:, None]) & (token_ids == token[:, None])
        alive = alive & child.any(1)
        if not bool(alive.any()):
            break
        here = torch.where(alive, child.int().argmax(1), here)
        accepted.append(torch.where(alive, here, PADDING))
    nodes = torch.stack(accepted, 1) if accepted else token_ids.new_empty(num_reqs, 0)
    return Verdict(torch.stack(emitted, 1), nodes)
