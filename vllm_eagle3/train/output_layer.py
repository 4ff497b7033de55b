"""Logits of a target from its last states, made by the target's own code.

Between the state after the final norm and the logits stand, depending on the
architecture, a tied or separate matrix, a bias, a scale (Cohere, Granite) and a soft
cap (Gemma 2). No list of those is kept here: the model's own `forward` runs, with its
decoder put aside for states that are known already.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn


class OutputLayer:
    """From states after the final norm to logits.

    Args:
        model: a causal language model of transformers.
        token_ids: the ids whose logits are wanted; None means all, in order.
    """

    def __init__(self, model: Any, token_ids: torch.Tensor | None = None) -> None:
        self.model = model
        self.layer: nn.Module = model.get_output_embeddings()
        if token_ids is not None:
            self.layer = _rows(self.layer, token_ids)

    @torch.no_grad()
    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        """[n, hidden] -> fp32 logits [n, number of ids]."""
        ids = torch.zeros(1, len(states), dtype=torch.int64, device=states.device)
        with self._decoder_put_aside(states[None]), self._output_layer():
            logits = self.model(input_ids=ids, use_cache=False).logits
        return logits[0].float()

    @contextmanager
    def _decoder_put_aside(self, states: torch.Tensor) -> Iterator[None]:
        from transformers.modeling_outputs import MoeModelOutputWithPast

        decoder = self.model.get_decoder()
        # Dense models look for less in it than mixtures of experts do.
        known = MoeModelOutputWithPast(last_hidden_state=cast(Any, states))
        decoder.forward = lambda *_args, **_kwargs: known
        try:
            yield
        finally:
            del decoder.forward  # the class's own is seen again

    @contextmanager
    def _output_layer(self) -> Iterator[None]:
        whole = self.model.get_output_embeddings()
        self.model.set_output_embeddings(self.layer)
        try:
            yield
        finally:
            self.model.set_output_embeddings(whole)


def _rows(layer: Any, token_ids: torch.Tensor) -> nn.Module:
    """The same linear layer for some of its outputs."""
    chosen = nn.Linear(layer.in_features, len(token_ids), layer.bias is not None)
    chosen.weight = nn.Parameter(layer.weight.detach()[token_ids], False)
    if layer.bias is not None:
        chosen.bias = nn.Parameter(layer.bias.detach()[token_ids], False)
    return chosen
