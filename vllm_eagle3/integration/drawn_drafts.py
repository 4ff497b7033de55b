"""Sampled drafts between drafting and verification: the laws they were drawn from.

The laws stay on the device of the rank that drew them; the scheduler knows nothing of
them. A request whose drafts come back without their law, or other ones, is judged by
sample-and-match, which is right for drafts of any origin.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..rejection import VerifyNoise, in_target_ids, judge_children
from ..verify import without_padding
from .drafts import Drafts


@dataclass(frozen=True)
class DrawnDrafts:
    """One request's drafts in the order they are sent, with their laws.

    Attributes:
        token_ids: [num_nodes].
        q: [rows, draft_vocab].
        row: [num_nodes + 1], row of q for the children of the root and of each node.
    """

    token_ids: torch.Tensor
    q: torch.Tensor
    row: torch.Tensor

    def q_after(self, node: torch.Tensor) -> torch.Tensor:
        """The law of the children of one node, [1, draft_vocab]; node: [1]."""
        return self.q.index_select(0, self.row.index_select(0, node + 1))


@dataclass(frozen=True)
class DrawnBatch:
    """The requests of a step that are judged by the laws their drafts were drawn from.

    Attributes:
        requests: [num_drawn] -> request.
        drawn: what each of them was sent.
        came_back: [num_drawn] bool, whether that is what is to be verified.
        token_ids, parents: [num_drawn, num_nodes], of the step.
        noise: of these requests.
        to_target_ids: draft id -> target id, or None.
    """

    requests: torch.Tensor
    drawn: Sequence[DrawnDrafts]
    came_back: torch.Tensor
    token_ids: torch.Tensor
    parents: torch.Tensor
    noise: VerifyNoise
    to_target_ids: torch.Tensor | None

    def judge(
        self,
        here: torch.Tensor,  # [num_drawn], node or ROOT
        p: torch.Tensor,  # [num_drawn, vocab], the target's law there
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """-> (what the target says there, the child that drafted it), [num_drawn]."""
        pairs = zip(self.drawn, here.split(1), strict=True)
        q = torch.cat([drawn.q_after(node) for drawn, node in pairs])
        return judge_children(
            self.token_ids,
            self.parents == here[:, None],
            p,
            in_target_ids(q, self.to_target_ids, p.shape[-1]),
            self.noise,
        )


def drawn_batch(
    drafts: Drafts,
    drawn: Sequence[DrawnDrafts | None],
    to_target_ids: torch.Tensor | None,
    generator: torch.Generator,
) -> DrawnBatch | None:
    """Gather what was drawn for the requests of a step; None if nothing was.

    Args:
        drawn: for each request, if its drafts were sampled.
        generator: of verification, never the one of drafting.
    """
    rows = [row for row, each in enumerate(drawn) if each is not None]
    if not rows:
        return None
    kept = [each for each in drawn if each is not None]
    device, width = drafts.token_ids.device, drafts.token_ids.shape[1]
    requests = torch.tensor(rows, device=device)
    sent = torch.stack(
        [
            torch.nn.functional.pad(k.token_ids, (0, width - len(k.token_ids)))
            for k in kept
        ]
    )
    token_ids, num_nodes = drafts.token_ids[requests], drafts.num_nodes[requests]
    unused = torch.arange(width, device=device) >= num_nodes[:, None]
    uniforms = torch.rand(len(rows), width + 1, generator=generator, device=device)
    return DrawnBatch(
        requests,
        kept,
        ((token_ids == sent) | unused).all(1),
        token_ids,
        without_padding(drafts.parents[requests], num_nodes),
        VerifyNoise(uniforms[:, :-1], uniforms[:, -1]),
        to_target_ids,
    )
