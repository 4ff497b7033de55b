"""Shapes shared by the fixture targets and heads, and how they reach the disk."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from vllm_eagle3 import head_io
from vllm_eagle3.draft_head import DraftHeadConfig, Eagle3DraftHead
from vllm_eagle3.vocab import DraftVocab

HIDDEN = 128
EPS = 1e-5
EOS_ID = 1
BYTE_OFFSET = 3  # ids 0..2 are special, then one id per byte


def llama_config(*, vocab_size: int, layers: int, kv_heads: int) -> dict[str, Any]:
    """config.json of a fixture target: 4 attention heads of 32, fp32."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": 256,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": kv_heads,
        "head_dim": 32,
        "vocab_size": vocab_size,
        "max_position_embeddings": 1024,
        "rms_norm_eps": EPS,
        "rope_theta": 10000.0,
        "torch_dtype": "float32",
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": EOS_ID,
        "hidden_act": "silu",
    }


def write_target(
    folder: Path, config: dict[str, Any], weights: dict[str, torch.Tensor]
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    byte_tokenizer(config["vocab_size"]).save_pretrained(folder)


def byte_tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """One token per byte, made on the spot; bytes that do not fit share <unk>."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    # Plain ASCII and the blank (Ġ) first, so that a vocabulary of 128 reads English.
    alphabet.sort(key=lambda c: (ord(c) > 126 and c != "Ġ", ord(c)))
    names = ["<s>", "</s>", "<unk>", *alphabet][:vocab_size]
    names += [f"<{i}>" for i in range(len(names), vocab_size)]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={name: i for i, name in enumerate(names)},
            merges=[],
            unk_token="<unk>",
        )
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        model_max_length=1024,
        chat_template="{% for m in messages %}{{ m['content'] }}\n{% endfor %}",
    )


def head_config(
    *, vocab_size: int, kv_heads: int, tap_ids: tuple[int, ...]
) -> DraftHeadConfig:
    return DraftHeadConfig(
        hidden_size=HIDDEN,
        intermediate_size=256,
        num_attention_heads=4,
        num_key_value_heads=kv_heads,
        head_dim=32,
        vocab_size=vocab_size,
        draft_vocab_size=vocab_size,
        target_hidden_size=HIDDEN,
        tap_ids=tap_ids,
        rms_norm_eps=EPS,
        max_position_embeddings=1024,
    )


def write_head(folder: Path, head: Eagle3DraftHead) -> None:
    head_io.write_head(folder, head, DraftVocab.full(head.config.vocab_size))
