"""Training-time test: unroll the draft as serving will run it (EAGLE-3, section 3.2).

Index i stands for the context x_0..x_i. Drafting that starts there runs, at step k,

    reads      embedding of x_{i+1+k}, and as feature the fused taps of i (k = 0) or
               the head's own output of step k-1 at index i (k > 0)
    at         rotary position i + k
    attends    K^0[0..i], the keys of true features, and K^1[i]..K^k[i], its own steps
    predicts   x_{i+2+k}

so all starts are trained in parallel: the first step over all tokens, each later one
over the starts alone (see `packing` and `draft_attention`). Tokens are the data's
(teacher forced), features are the head's own, and gradients flow through all steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ..draft_head import Eagle3DraftHead
from .draft_attention import KeyValue, draft_attention
from .packing import Packing


class UnrolledAttention:
    """Attention of one unrolled draft; an `Attend` that remembers earlier steps."""

    def __init__(self, packing: Packing) -> None:
        self.packing = packing
        self._base: dict[int, KeyValue] = {}  # layer -> keys and values of step 0
        self._own: dict[int, list[KeyValue]] = {}

    def __call__(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        if layer not in self._base:
            self._base[layer], self._own[layer] = (k[0], v[0]), []
            runs = self.packing.documents
        else:
            self._own[layer].append((k[0], v[0]))
            runs = self.packing.replies
        return draft_attention(q[0], self._base[layer], self._own[layer], runs)[None]


@dataclass(frozen=True)
class DraftStep:
    """Step `k` of the unroll at the starts where it is valid.

    hidden: [num_valid, hidden]; row, start: [num_valid], the (row, i) of each entry;
    the step predicts the token at index `start + 2 + k`.
    """

    k: int
    hidden: torch.Tensor
    row: torch.Tensor
    start: torch.Tensor

    @property
    def predicted(self) -> torch.Tensor:
        """Index of the predicted token, [num_valid]."""
        return self.start + 2 + self.k


def unroll(
    head: Eagle3DraftHead,
    taps: torch.Tensor,  # [rows, tokens, num_taps * target_hidden]
    embeds: torch.Tensor,  # [rows, tokens, hidden]: embedding of the ids
    span_ids: torch.Tensor,  # [rows, tokens], 0 where the target did not write
    num_steps: int,
) -> Iterator[DraftStep]:
    """Run `num_steps` draft steps from every start at once; yield each in turn.

    A start i is valid at step k if x_{i+1} is the target's own token (a draft starts
    after one) and x_{i+2+k} is in the same reply: those that serving can reach.
    """
    packing = Packing(span_ids)
    starts = packing.starts
    if starts.numel() == 0:
        return
    attend = UnrolledAttention(packing)
    embeds = embeds[packing.row, packing.token]
    # Step 0 runs everywhere, for its keys. What follows a document's last token is
    # another's, but no start sees the key made there.
    following = embeds.roll(-1, dims=0)[None]
    features = head.fuse(taps[packing.row, packing.token])[None]
    hidden = head(following, features, packing.token, attend)[0, starts]
    row, start = packing.row[starts], packing.token[starts]
    for k in range(min(num_steps, int(packing.room.max()))):
        if k > 0:
            # Past the end of a reply the step is not valid, whatever it reads.
            ahead = (starts + 1 + k).clamp(max=embeds.shape[0] - 1)
            features = head.feedback(hidden)[None]
            hidden = head(embeds[None, ahead], features, start + k, attend)[0]
        valid = packing.room > k
        yield DraftStep(k, hidden[valid], row[valid], start[valid])
