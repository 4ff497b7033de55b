"""Predicted acceptance: what serving will accept, from teacher-forced unrolls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ..draft_head import Eagle3DraftHead
from ..vocab import DraftVocab
from .data import Batch, Row, collate, make_batches
from .features import Features
from .ttt import unroll


@dataclass(frozen=True)
class PredictedAcceptance:
    """Greedy drafts judged along the held-out text.

    `n_alpha[k]` is the share of drafts at depth k+1 that equal the target's argmax,
    among starts where all shallower drafts did (conditional, as in EAGLE-3 fig. 7).
    A target token outside the draft vocabulary counts as refused.
    """

    n_alpha: tuple[float, ...]
    starts: tuple[int, ...]

    @property
    def acceptance_length(self) -> float:
        """Expected tokens per target pass with a chain of len(n_alpha) drafts."""
        length, reach = 1.0, 1.0
        for alpha in self.n_alpha:
            reach *= alpha
            length += reach
        return length


@torch.no_grad()
def predict_acceptance(
    head: Eagle3DraftHead,
    target: Callable[[Batch], Features],
    vocab: DraftVocab,
    rows: Sequence[Row],
    num_steps: int,
    tokens_per_batch: int,
) -> PredictedAcceptance:
    """Judge `head` on `rows`; reads no engine counter."""
    hits = torch.zeros(num_steps)
    tries = torch.zeros(num_steps)
    dtype = next(head.parameters()).dtype
    for group in make_batches(rows, tokens_per_batch, seed=0):
        batch = collate(group)
        features = target(batch)
        alive = torch.ones_like(batch.span_ids, dtype=torch.bool)
        taps, embeds = features.taps.to(dtype), features.embeds.to(dtype)
        with torch.autocast(taps.device.type, torch.bfloat16):
            for step in unroll(head, taps, embeds, batch.span_ids, num_steps):
                drafts = vocab.to_target_ids[head.logits(step.hidden).argmax(-1).cpu()]
                truth = features.best[features.law_row[step.row, step.predicted]]
                reached = alive[step.row, step.start]
                right = (drafts == truth.cpu()) & reached
                hits[step.k] += right.sum()
                tries[step.k] += reached.sum()
                alive = torch.zeros_like(alive)
                alive[step.row, step.start] = right
    return PredictedAcceptance(
        tuple((hits / tries.clamp(min=1)).tolist()), tuple(tries.int().tolist())
    )
