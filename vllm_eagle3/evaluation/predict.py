"""Predict acceptance: the head unrolled over a text that is already known.

Tokens are the text's, features the head's own, as in training. A greedy draft is
right where it equals the text. For a sampled text that happens with the target's
probability of the draft, which is what an engine accepts it with, so one count serves
every temperature.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F

from ..head_io import read_head
from ..train.data import Batch, Row, collate
from ..train.features import TargetFeatures
from ..train.ttt import unroll
from .texts import Text


def prompt_batch(ids: Sequence[int], num_reply_tokens: int) -> Batch:
    """One row whose last tokens are a reply."""
    start = len(ids) - num_reply_tokens
    return collate([Row("", tuple(ids), ((start, len(ids), 0.0),))])


class Predictor:
    """A target and its head, ready to judge texts; both in the engine's dtype."""

    def __init__(self, target_dir: Path, head_dir: Path, dtype: torch.dtype) -> None:
        loaded = read_head(head_dir, target_dir, dtype)
        self.head, self.vocab = loaded.head.eval(), loaded.vocab
        self.target = TargetFeatures(
            target_dir, loaded.config.tap_ids, loaded.vocab, dtype
        )
        own = loaded.embed_tokens
        self.embedding = self.target.embedding if own is None else own.to(dtype)

    @torch.no_grad()
    def hits(self, text: Text, num_drafts: int) -> torch.Tensor:
        """Whether each draft equals the text, bool [tokens, num_drafts].

        Row i drafts from the context up to index i, the next token known; see `walk`.
        Rows in the prompt are False.
        """
        ids = text.token_ids
        batch = prompt_batch(ids, len(ids) - len(text.prompt))
        taps = self.target.read(batch).taps
        embeds = F.embedding(batch.ids, self.embedding)
        hits = torch.zeros(len(ids), num_drafts, dtype=torch.bool)
        for step in unroll(self.head, taps, embeds, batch.span_ids, num_drafts):
            drafts = self.vocab.to_target_ids[self.head.logits(step.hidden).argmax(-1)]
            truth = batch.ids[step.row, step.predicted]
            hits[step.start, step.k] = drafts == truth
        return hits
