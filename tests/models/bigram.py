"""F2, a target whose law is a formula, with its heads H2 (exact) and H4 (half wrong).

Embedding = identity and attention and MLP add nothing, so the residual stream of a
token is its one-hot vector in every layer and

    P(next | last) = softmax(table[last]).

It is blind to KV-cache faults; the random target F1 sees those. F3 sees them too: it
is F2 with attention that looks back, so its text depends on every key and value while
H2 still says most of it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.models.shapes import (
    EPS,
    HIDDEN,
    head_config,
    llama_config,
    write_head,
    write_target,
)
from vllm_eagle3.draft_head import Eagle3DraftHead

VOCAB = HIDDEN  # one-hot features need hidden = vocab
LAYERS = 4
KV_HEADS = 4
TAP_IDS = (1, 2, 3)
# What RMSNorm multiplies a one-hot vector by.
NORM_GAIN = (1 / HIDDEN + EPS) ** -0.5
# Attention of F3: peaked, and in the end about a third as long as a one-hot.
F3_GAINS = {"q_proj": 1.5, "k_proj": 1.5, "v_proj": 1.0, "o_proj": 0.03}


def bigram_table() -> torch.Tensor:
    """Logits [last, next], about 2 nats of entropy per row at temperature 1."""
    generator = torch.Generator().manual_seed(20)
    return 2.6 * torch.randn(VOCAB, VOCAB, generator=generator)


def build_f2(folder: Path) -> None:
    write_target(folder, _target_config(), _bigram_weights())


def build_f3(folder: Path) -> None:
    """F2 whose attention moves the logits, in every layer but the first.

    The first tap enters the second layer and is still the one-hot that H2 wants.
    """
    generator = torch.Generator().manual_seed(21)
    weights = _bigram_weights()
    for i in range(1, LAYERS):
        prefix = f"model.layers.{i}.self_attn."
        for name, gain in F3_GAINS.items():
            noise = torch.randn(HIDDEN, HIDDEN, generator=generator)
            weights[f"{prefix}{name}.weight"] = gain * noise / HIDDEN**0.5
    write_target(folder, _target_config(), weights)


def _target_config() -> dict[str, Any]:
    return llama_config(vocab_size=VOCAB, layers=LAYERS, kv_heads=KV_HEADS)


def _bigram_weights() -> dict[str, torch.Tensor]:
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
        for name in ("gate_proj", "up_proj"):
            weights[f"{prefix}mlp.{name}.weight"] = zeros(256, HIDDEN)
        weights[f"{prefix}mlp.down_proj.weight"] = zeros(HIDDEN, 256)
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{prefix}{name}.weight"] = torch.ones(HIDDEN)
    return weights


def build_h2(folder: Path) -> None:
    """A head whose draft law q equals the target's p, at every temperature."""
    write_head(folder, _bigram_head(bigram_table()))


def build_h4(folder: Path) -> None:
    """H2, but after an odd token every draft probability sits one id too high."""
    write_head(folder, _bigram_head(half_wrong_table()))


def half_wrong_table() -> torch.Tensor:
    table = bigram_table()
    table[1::2] = table[1::2].roll(1, dims=1)
    return table


@torch.no_grad()
def _bigram_head(table: torch.Tensor) -> Eagle3DraftHead:
    """Weights by hand: forget the fed feature, keep the fed token.

    fc:       feature = first tap = one-hot of token i
    q, k:     one constant vector, so that rotary positions alone decide and a
              sharp softmax looks at its own place only
    v, o:     adds embedding(token i+1) and takes the feature away again
    lm_head:  the bigram table
    """
    config = head_config(vocab_size=VOCAB, kv_heads=KV_HEADS, tap_ids=TAP_IDS)
    head = Eagle3DraftHead(config)
    for weight in head.parameters():
        if weight.ndim == 2:
            weight.zero_()
    eye = torch.eye(HIDDEN)
    head.fc.weight[:, :HIDDEN] = eye
    attention = head.layers[0].self_attn
    # The sum of a normed one-hot embedding is NORM_GAIN: a constant to build on.
    attention.q_proj.weight[:, :HIDDEN] = 100.0 / NORM_GAIN
    attention.k_proj.weight[:, :HIDDEN] = 100.0 / NORM_GAIN
    attention.v_proj.weight[:, :HIDDEN] = eye / NORM_GAIN
    attention.v_proj.weight[:, HIDDEN:] = -eye / NORM_GAIN
    attention.o_proj.weight.copy_(eye)
    head.lm_head.weight.copy_(table.T / NORM_GAIN)
    return head
