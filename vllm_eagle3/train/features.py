"""Target features for training, made on the fly by a plain transformers forward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..taps import check_tap_ids
from ..vocab import DraftVocab
from .data import Batch
from .output_layer import OutputLayer

_ROWS = 256  # positions whose logits are alive at one time


@dataclass(frozen=True)
class Readings:
    """What a forward of the target leaves behind; `Features` follow from it.

    Supervised tokens are counted row by row. The law of a token is read one position
    earlier, so `last` is the state after the final norm there.
    """

    taps: torch.Tensor  # [rows, tokens, num_taps * hidden]
    last: torch.Tensor  # [num_supervised, hidden]
    mass: torch.Tensor  # [num_supervised]: log-sum-exp of all logits, fp32
    best: torch.Tensor  # [num_supervised]: argmax, a target id


@dataclass(frozen=True)
class Features:
    """What the target says about one batch.

    `law` holds one row per supervised token: the target's probabilities for that
    token, on the draft vocabulary, not renormalised. `law_row` finds it.
    """

    taps: torch.Tensor  # [rows, tokens, num_taps * hidden]
    embeds: torch.Tensor  # [rows, tokens, hidden]
    law: torch.Tensor  # [num_supervised, draft_vocab]
    best: torch.Tensor  # [num_supervised]: the target's argmax, a target id
    last: torch.Tensor  # [num_supervised, hidden]: what its output layer read
    law_row: torch.Tensor  # [rows, tokens] -> row of `law`, -1 elsewhere


class TargetFeatures:
    """A frozen target that answers with taps and next-token laws.

    Args:
        target_dir: Hugging Face directory of the target.
        tap_ids: residual streams entering these layers (see `taps`).
        vocab: draft vocabulary.
        dtype, device: of the target's forward.
    """

    def __init__(
        self,
        target_dir: Path | str,
        tap_ids: tuple[int, ...],
        vocab: DraftVocab,
        dtype: torch.dtype = torch.bfloat16,
        device: str = "cpu",
    ) -> None:
        from transformers import AutoModelForCausalLM

        model: Any = AutoModelForCausalLM.from_pretrained(str(target_dir), dtype=dtype)
        self.model = model.to(device).eval().requires_grad_(False)
        self.decoder = self.model.get_decoder()
        self.target_dir = str(target_dir)
        self.tap_ids = check_tap_ids(tap_ids, len(self.decoder.layers))
        self.output_layer = OutputLayer(model)
        self.draft_output_layer = OutputLayer(model, vocab.to_target_ids.to(device))
        self.device = device

    @property
    def embedding(self) -> torch.Tensor:
        """The target's input embedding, [vocab, hidden]."""
        return self.model.get_input_embeddings().weight

    @property
    def lm_head(self) -> torch.Tensor:
        """The target's output projection, [vocab, hidden]."""
        return self.model.get_output_embeddings().weight

    @property
    def final_norm(self) -> torch.Tensor:
        """Weight of the target's final norm, [hidden]."""
        return self.decoder.norm.weight

    def fingerprint(self) -> dict[str, Any]:
        """What the readings depend on; equal fingerprints, equal readings."""
        first = next(self.decoder.layers[0].parameters()).float()
        return {
            "target": type(self.model).__name__,
            "hidden_size": self.lm_head.shape[1],
            "num_layers": len(self.decoder.layers),
            "vocab_size": self.lm_head.shape[0],
            # Two sums tell apart targets of one shape, say before and after tuning.
            "weights": [first.sum().item(), self.embedding.float().sum().item()],
            "tap_ids": list(self.tap_ids),
            "dtype": str(self.model.dtype),
        }

    def __call__(self, batch: Batch) -> Features:
        return self.features(batch, self.read(batch))

    @torch.no_grad()
    def read(self, batch: Batch) -> Readings:
        """Run the target over `batch`."""
        taps, last = self.states(batch)
        row, token = (batch.span_ids.to(self.device) > 0).nonzero(as_tuple=True)
        last = last[row, token - 1]
        masses, bests = [], []
        for hidden in last.split(_ROWS):
            logits = self.output_layer(hidden)
            bests.append(logits.argmax(-1))
            masses.append(logits.logsumexp(-1))
        return Readings(taps, last, torch.cat(masses), torch.cat(bests))

    @torch.no_grad()
    def states(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """(taps [rows, tokens, num_taps * hidden], last [rows, tokens, hidden]).

        `last` are the states after the final norm. What stands behind the end of a row
        means nothing.
        """
        ids = batch.ids.to(self.device)
        streams = {0: self.model.get_input_embeddings()(ids)}
        # Padding is on the right, so a causal target needs no padding mask.
        with self._recording(streams):
            last = self.decoder(ids, use_cache=False).last_hidden_state
        return torch.cat([streams[i] for i in self.tap_ids], dim=-1), last

    @torch.no_grad()
    def features(self, batch: Batch, readings: Readings) -> Features:
        """Embeddings and laws for what was read; runs no layer of the target."""
        embeds = self.model.get_input_embeddings()(batch.ids.to(self.device))
        supervised = batch.span_ids.to(self.device) > 0
        law_row = torch.full(supervised.shape, -1, device=self.device)
        law_row[supervised] = torch.arange(readings.best.numel(), device=self.device)
        return Features(
            taps=readings.taps,
            embeds=embeds,
            law=self._law(readings),
            best=readings.best,
            last=readings.last,
            law_row=law_row,
        )

    @contextmanager
    def _recording(self, streams: dict[int, torch.Tensor]) -> Iterator[None]:
        """Record the stream entering layer L as the output of layer L-1.

        `output_hidden_states` would do, but for L = number of layers it returns the
        stream after the final norm.
        """

        def keep(tap_id: int) -> Callable[..., None]:
            def hook(_module: nn.Module, _args: object, output: Any) -> None:
                streams[tap_id] = output[0] if isinstance(output, tuple) else output

            return hook

        handles = [
            self.decoder.layers[i - 1].register_forward_hook(keep(i))
            for i in self.tap_ids
            if i > 0
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _law(self, readings: Readings) -> torch.Tensor:
        laws = [
            (self.draft_output_layer(hidden) - mass[:, None]).exp_().to(torch.bfloat16)
            for hidden, mass in zip(
                readings.last.split(_ROWS), readings.mass.split(_ROWS), strict=True
            )
        ]
        return torch.cat(laws)
