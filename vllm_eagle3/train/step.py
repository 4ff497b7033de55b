"""One training step: unroll the draft over a batch and judge every position."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from ..draft_head import Eagle3DraftHead
from ..vocab import DraftVocab
from .config import TrainConfig
from .data import Batch
from .evaluate import autocast
from .features import Features
from .losses import Judged, Positions, draft_loss, feature_loss, position_weights
from .ttt import unroll


@dataclass(frozen=True)
class StepOutput:
    """loss: a scalar to differentiate; losses, hits: [num_steps], means per step.

    `hits` is the share of positions where the head's best token is the target's, not
    conditioned on earlier steps (0-alpha, 1-alpha... follow from `evaluate`).
    """

    loss: torch.Tensor
    losses: torch.Tensor
    hits: torch.Tensor


class TrainingStep(nn.Module):
    """The head with its loss, as one module: what data parallelism wraps."""

    to_draft_ids: torch.Tensor  # [target_vocab], -1 where a token cannot be drafted

    def __init__(
        self, head: Eagle3DraftHead, vocab: DraftVocab, config: TrainConfig
    ) -> None:
        super().__init__()
        self.head = head
        self.config = config
        self.register_buffer("to_draft_ids", vocab.to_draft_ids, persistent=False)

    def forward(self, batch: Batch, features: Features) -> StepOutput:
        """Sum over steps k of decay^k times the loss of step k."""
        with autocast(features.taps.device.type, self.config.precision):
            hidden, rows, steps = self._draft(batch, features)
            normed = self.head.norm(hidden)
            positions = self._positions(batch, features, rows, steps)
            loss, judged = draft_loss(
                normed,
                self.head.lm_head.weight,
                positions,
                self.config.loss,
                self.head.config.logit_scale,
            )
            factor = self.config.loss.feature_weight
            if factor:
                wanted = features.last[rows]
                loss = loss + factor * feature_loss(normed, wanted, positions.weight)
        return StepOutput(loss, *self._means(judged, steps))

    def _draft(
        self, batch: Batch, features: Features
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """All valid positions of all steps: hidden [n, hidden], law row [n], k [n]."""
        dtype = torch.bfloat16 if self.config.precision == "bf16" else torch.float32
        hidden, rows, steps = [], [], []
        for step in unroll(
            self.head,
            features.taps.to(dtype),
            features.embeds.to(dtype),
            batch.span_ids.to(features.taps.device),
            self.config.num_steps,
        ):
            hidden.append(step.hidden)
            rows.append(features.law_row[step.row, step.predicted])
            steps.append(torch.full_like(step.row, step.k))
        return torch.cat(hidden), torch.cat(rows), torch.cat(steps)

    def _positions(
        self,
        batch: Batch,
        features: Features,
        rows: torch.Tensor,
        steps: torch.Tensor,
    ) -> Positions:
        truth = self.to_draft_ids[features.best[rows]]
        weights = [
            position_weights(
                truth[steps == k],
                batch.ids.numel(),
                self.config.step_decay**k,
                self.config.loss,
            )
            for k in range(int(steps.max()) + 1)
        ]
        return Positions(features.law, rows, truth, torch.cat(weights))

    def _means(
        self, judged: Judged, steps: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        counts = torch.bincount(steps, minlength=self.config.num_steps).clamp(min=1)
        sums = (
            torch.bincount(steps, values.double(), minlength=self.config.num_steps)
            for values in (judged.loss, judged.hit)
        )
        losses, hits = ((total / counts).float() for total in sums)
        return losses, hits
