"""Load a head of full vocabulary that stores its (all-zero) vocabulary map.

vLLM makes no place for a map where draft and target vocabulary are equal, and its
loader stops at the stored one. All offsets zero say the same as no map.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from vllm.model_executor.models.llama_eagle3 import Eagle3LlamaForCausalLM


@contextmanager
def identity_maps_left_out() -> Iterator[None]:
    """While a head is loaded, hand vLLM's module its weights without such a map."""
    stock = Eagle3LlamaForCausalLM.load_weights

    def load_weights(
        self: Eagle3LlamaForCausalLM, weights: Iterable[tuple[str, torch.Tensor]]
    ) -> Any:
        if self.draft_id_to_target_id is None:
            weights = _without_identity_map(weights)
        return stock(self, weights)

    Eagle3LlamaForCausalLM.load_weights = load_weights
    try:
        yield
    finally:
        Eagle3LlamaForCausalLM.load_weights = stock


def _without_identity_map(
    weights: Iterable[tuple[str, torch.Tensor]],
) -> Iterator[tuple[str, torch.Tensor]]:
    for name, weight in weights:
        if name != "d2t" or bool(weight.any()):
            yield name, weight
