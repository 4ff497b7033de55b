"""Logits rebuilt from last states are the model's own, whatever stands in between."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from vllm_eagle3.train.output_layer import OutputLayer

VOCAB = 96
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
}
# Architecture -> what stands between its states and its logits.
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {},
    "gemma2": {"final_logit_softcapping": 3.0},  # 1 + w norms, soft cap
    "gemma3_text": {},  # scaled embeddings
    "granite": {"logits_scaling": 4.0},  # divides
    "cohere": {"logit_scale": 0.25},  # multiplies
    "phi": {},  # a bias
    "mixtral": {"num_local_experts": 2},  # reads router logits
    "qwen3_moe": {"num_experts_per_tok": 2, "num_experts": 4},
    "olmo2": {},
}


@pytest.fixture(params=ARCHITECTURES)
def model(request: pytest.FixtureRequest) -> Any:
    torch.manual_seed(4)
    config = AutoConfig.for_model(request.param, **SIZES | ARCHITECTURES[request.param])
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            # Large and uneven: a norm or a bias left out must show.
            parameter.add_(0.2 * torch.randn(parameter.shape))
    return model


@torch.no_grad()
def test_rebuilt_logits_are_the_models_own(model: Any) -> None:
    ids = torch.arange(3, 15)[None]
    wanted = model(ids, use_cache=False).logits[0].float()
    states = model.get_decoder()(ids, use_cache=False).last_hidden_state[0]
    torch.testing.assert_close(OutputLayer(model)(states), wanted)
    some = torch.tensor([2, 7, 50, 95])
    torch.testing.assert_close(OutputLayer(model, some)(states), wanted[:, some])
    # And the model is left as it was.
    torch.testing.assert_close(model(ids, use_cache=False).logits[0].float(), wanted)
