"""F2 with experts: the same law, since they add nothing, in a mixture-of-experts model.

Engines of a data-parallel group share experts, and so meet in every pass.
"""

from __future__ import annotations

from pathlib import Path

import torch

from tests.models.bigram import KV_HEADS, LAYERS, NORM_GAIN, VOCAB, bigram_table
from tests.models.shapes import HIDDEN, llama_config, write_target

EXPERTS = 4
INNER = 64


def build_f2_moe(folder: Path) -> Path:
    """Write the target; the heads of F2 fit it."""
    zeros = torch.zeros
    weights = {
        "model.embed_tokens.weight": torch.eye(VOCAB),
        "model.norm.weight": torch.ones(HIDDEN),
        "lm_head.weight": (bigram_table().T / NORM_GAIN).contiguous(),
    }
    for i in range(LAYERS):
        prefix = f"model.layers.{i}."
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            weights[f"{prefix}self_attn.{name}.weight"] = zeros(HIDDEN, HIDDEN)
        for name in ("q_norm", "k_norm"):
            weights[f"{prefix}self_attn.{name}.weight"] = torch.ones(32)
        weights[f"{prefix}mlp.gate.weight"] = zeros(EXPERTS, HIDDEN)
        for expert in range(EXPERTS):
            experts = f"{prefix}mlp.experts.{expert}."
            weights[f"{experts}gate_proj.weight"] = zeros(INNER, HIDDEN)
            weights[f"{experts}up_proj.weight"] = zeros(INNER, HIDDEN)
            weights[f"{experts}down_proj.weight"] = zeros(HIDDEN, INNER)
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{prefix}{name}.weight"] = torch.ones(HIDDEN)
    config = llama_config(vocab_size=VOCAB, layers=LAYERS, kv_heads=KV_HEADS) | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_experts": EXPERTS,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": INNER,
        "decoder_sparse_step": 1,
        "norm_topk_prob": True,
        "mlp_only_layers": [],
    }
    write_target(folder, config, weights)
    return folder
