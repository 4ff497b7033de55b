"""Small heads, one per switch, with random weights (norms too), and their target."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from vllm_eagle3.draft_head import Eagle3DraftHead
from vllm_eagle3.head_config import head_config_for_target
from vllm_eagle3.vocab import DraftVocab

HIDDEN, VOCAB, LAYERS = 128, 96, 8

TARGET_CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": 256,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": VOCAB,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 50000.0},
    "dtype": "float32",
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "bos_token_id": 0,
    "eos_token_id": 1,
}

_SCALED = {"rope_theta": 10000.0, "factor": 4.0}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "norm_before_residual": {"norm_before_residual": True},
    "norm_before_fc": {"norm_before_fc": True},
    "fc_norm": {"fc_norm": True},
    "norm_output": {"norm_output": True},
    "two_layers": {"num_hidden_layers": 2},
    "reduced_vocab": {"draft_vocab_size": 40},
    "head_dim": {"head_dim": 64},
    "attention_bias": {"attention_bias": True},
    "logit_scale": {"logit_scale": 0.5},
    "five_taps": {"tap_ids": (0, 2, 4, 5, 8)},
    "linear_rope": {"rope_parameters": {"rope_type": "linear", **_SCALED}},
    "yarn_rope": {
        "rope_parameters": {
            "rope_type": "yarn",
            "original_max_position_embeddings": 256,
            **_SCALED,
        }
    },
    "llama3_rope": {
        "rope_parameters": {
            "rope_type": "llama3",
            "original_max_position_embeddings": 256,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            **_SCALED,
        }
    },
    "everything": {
        "norm_before_residual": True,
        "norm_before_fc": True,
        "fc_norm": True,
        "norm_output": True,
        "num_hidden_layers": 2,
        "draft_vocab_size": 40,
        "attention_bias": True,
        "logit_scale": 2.0,
        "tap_ids": (1, 7),
    },
}


def make_head(**switches: Any) -> tuple[Eagle3DraftHead, DraftVocab]:
    """A head for `TARGET_CONFIG` with random weights, the same in every call."""
    generator = torch.Generator().manual_seed(7)
    size = switches.pop("draft_vocab_size", VOCAB)
    config = head_config_for_target(TARGET_CONFIG, size, **switches)
    head = Eagle3DraftHead(config)
    with torch.no_grad():
        for name, weight in head.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            weight.copy_(0.15 * noise if weight.ndim == 2 else 0.3 * noise)
            if "norm" in name:
                weight.add_(1.0)
    chosen = torch.randperm(VOCAB, generator=generator)[:size].sort().values
    return head, DraftVocab(chosen, VOCAB)


def write_small_target(folder: Path, **fields: Any) -> Path:
    """The target's folder: random weights, `fields` replacing those of its config."""
    generator = torch.Generator().manual_seed(3)
    config = TARGET_CONFIG | fields
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))

    def normal(*shape: int) -> torch.Tensor:
        return 0.1 * torch.randn(*shape, generator=generator)

    weights = {
        "model.embed_tokens.weight": normal(VOCAB, HIDDEN),
        "model.norm.weight": torch.ones(HIDDEN),
    }
    if not config["tie_word_embeddings"]:
        weights["lm_head.weight"] = normal(VOCAB, HIDDEN)
    save_file(weights, folder / "model.safetensors")
    return folder


def edit_head(
    folder: Path,
    config: dict[str, Any] | None = None,
    tensors: dict[str, torch.Tensor] | None = None,
    drop: tuple[str, ...] = (),
) -> Path:
    """Change a head's files in place; `drop` removes config keys and tensors."""
    file = folder / "config.json"
    stored = json.loads(file.read_text()) | (config or {})
    file.write_text(json.dumps({k: v for k, v in stored.items() if k not in drop}))
    weights = load_file(folder / "model.safetensors") | (tensors or {})
    kept = {k: v for k, v in weights.items() if k not in drop}
    save_file(kept, folder / "model.safetensors")
    return folder


def causal_attention(
    layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> torch.Tensor:
    """`attend` for a plain causal pass; shapes as in `vllm_eagle3.draft_head`."""
    return torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=True, enable_gqa=True
    )


@torch.no_grad()
def draft_step(
    head: Eagle3DraftHead, seed: int = 0, tokens: int = 20
) -> dict[str, torch.Tensor]:
    """Fuse, one step, logits: what two implementations must agree on.

    Returns:
        inputs "taps" [tokens, taps * hidden], "embeds" [tokens, hidden], "positions"
        [tokens]; outputs "fused", "feedback" [tokens, hidden], "logits" [tokens,
        draft_vocab].
    """
    generator = torch.Generator().manual_seed(seed)
    config = head.config
    width = len(config.tap_ids) * config.target_hidden_size
    taps = torch.randn(tokens, width, generator=generator)
    embeds = torch.randn(tokens, config.hidden_size, generator=generator)
    positions = torch.arange(tokens) + 37
    fused = head.fuse(taps)
    hidden = head(embeds[None], fused[None], positions, causal_attention)[0]
    return {
        "taps": taps,
        "embeds": embeds,
        "positions": positions,
        "fused": fused,
        "feedback": head.feedback(hidden),
        "logits": head.logits(hidden),
    }


def assert_same_head(one: Eagle3DraftHead, other: Eagle3DraftHead) -> None:
    """Both compute the same, to the last bit."""
    ours, theirs = draft_step(one), draft_step(other)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
