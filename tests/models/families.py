"""Tiny random targets of other families, as transformers makes them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.models.shapes import byte_tokenizer

VOCAB = 320
LAYERS = 5
WINDOW = 16
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    # Far from the usual 0.02: attention must matter and near-ties be rare.
    "initializer_range": 0.2,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
}


def _llama3() -> Any:
    from transformers import LlamaConfig

    rope = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    }
    return LlamaConfig(**SHAPE, rope_parameters=rope, tie_word_embeddings=False)


def _qwen2() -> Any:
    from transformers import Qwen2Config

    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    shape = {k: v for k, v in (SHAPE | heads).items() if k != "head_dim"}
    return Qwen2Config(**shape, tie_word_embeddings=True)


def _qwen3() -> Any:
    from transformers import Qwen3Config

    return Qwen3Config(**SHAPE, tie_word_embeddings=True)


def _mistral() -> Any:
    from transformers import MistralConfig

    return MistralConfig(**SHAPE, sliding_window=WINDOW, tie_word_embeddings=False)


def _qwen3_moe() -> Any:
    from transformers import Qwen3MoeConfig

    experts = {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
    }
    return Qwen3MoeConfig(**SHAPE, **experts, tie_word_embeddings=False)


def _gemma2() -> Any:
    from transformers import Gemma2Config

    return Gemma2Config(
        **SHAPE,
        query_pre_attn_scalar=32,
        sliding_window=WINDOW,
        attn_logit_softcapping=20.0,
        final_logit_softcapping=15.0,
        tie_word_embeddings=True,
    )


FAMILIES: dict[str, Callable[[], Any]] = {
    "llama3": _llama3,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "mistral": _mistral,
    "qwen3_moe": _qwen3_moe,
    "gemma2": _gemma2,
}


def write_family(name: str, folder: Path) -> Any:
    """Write the target's folder; returns the model, ready to be asked."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(
        FAMILIES[name](), attn_implementation="eager", dtype=torch.float32
    )
    model.eval().save_pretrained(folder)
    byte_tokenizer(VOCAB).save_pretrained(folder)
    return model
