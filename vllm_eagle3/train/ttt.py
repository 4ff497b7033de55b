"""Training-time test: unroll the draft as serving will run it (EAGLE-3, section 3.2).

Index i stands for the context x_0..x_i. Drafting that starts there runs, at step k,

    reads      embedding of x_{i+1+k}, and as feature the fused taps of i (k = 0) or
               the head's own output of step k-1 at index i (k > 0)
    at         rotary position i + k
    attends    K^0[0..i], the keys of true features, and K^1[i]..K^k[i], its own steps
    predicts   x_{i+2+k}

                     keys of step 0        own steps
    step 2, i=3      0  1  2  3            1@3  2@3
    step 2, i=4      0  1  2  3  4         1@4  2@4

so all indices are trained in parallel for one [T, T] block and k diagonals per step,
never a [(k+1)T, (k+1)T] matrix. Tokens are the data's (teacher forced), features are
the head's own, and gradients flow through all steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ..draft_head import Eagle3DraftHead


class UnrolledAttention:
    """Attention of one unrolled draft; an `Attend` that remembers earlier steps."""

    def __init__(self) -> None:
        # layer -> (k, v) per step, [rows, kv_heads, tokens, head_dim]
        self._steps: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}

    def __call__(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        steps = self._steps.setdefault(layer, [])
        steps.append((k, v))
        rows, heads, tokens, dim = q.shape
        # Grouped-query attention: query heads of one KV head side by side.
        grouped = q.view(rows, k.shape[1], heads // k.shape[1], tokens, dim)
        first_k, first_v = (x[:, :, None] for x in steps[0])
        scores = grouped @ first_k.transpose(-1, -2)
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
        future = torch.ones(tokens, tokens, dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(future, float("-inf"))
        own = [(grouped * kj[:, :, None]).sum(-1, keepdim=True) for kj, _ in steps[1:]]
        weights = torch.cat([scores, *own], -1).mul(dim**-0.5).softmax(-1).to(v.dtype)
        out = weights[..., :tokens] @ first_v
        for j, (_, vj) in enumerate(steps[1:]):
            out = out + weights[..., tokens + j, None] * vj[:, :, None]
        return out.view(rows, heads, tokens, dim)


@dataclass(frozen=True)
class DraftStep:
    """Step `k` of the unroll at its valid starts.

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


def valid_starts(span_ids: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(row, i) of the starts whose step `k` serving can really reach.

    x_{i+1} must be the target's own token (a draft starts after one), and x_{i+2+k}
    must be in the same reply.

    Args:
        span_ids: [rows, tokens], 0 where the target did not write.
    """
    first, last = span_ids[:, 1 : -1 - k], span_ids[:, 2 + k :]
    row, start = ((first == last) & (first > 0)).nonzero(as_tuple=True)
    return row, start


def unroll(
    head: Eagle3DraftHead,
    taps: torch.Tensor,  # [rows, tokens, num_taps * target_hidden]
    embeds: torch.Tensor,  # [rows, tokens, hidden]: embedding of the ids
    span_ids: torch.Tensor,  # [rows, tokens]
    num_steps: int,
) -> Iterator[DraftStep]:
    """Run `num_steps` draft steps from every index at once; yield each in turn."""
    tokens = span_ids.shape[1]
    positions = torch.arange(tokens, device=taps.device)
    attend = UnrolledAttention()
    features = head.fuse(taps)
    for k in range(min(num_steps, tokens - 2)):
        # Embedding of x_{i+1+k} at index i; what wraps round is never valid.
        ahead = embeds.roll(-1 - k, dims=1)
        hidden = head(ahead, features, positions + k, attend)
        row, start = valid_starts(span_ids, k)
        if row.numel() == 0:
            return
        yield DraftStep(k, hidden[row, start], row, start)
        features = head.feedback(hidden)
