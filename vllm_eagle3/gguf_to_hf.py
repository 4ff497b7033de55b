"""GGUF to Hugging Face: turn a llama-family GGUF into a directory that vLLM loads.

Reads the file with gguf and numpy alone. Every field of the config comes from the
GGUF's own metadata, so nothing here is specific to one size of model; what is
supported is refused by name where it ends (architecture, pre-tokenizer).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors.torch import save_file

if TYPE_CHECKING:
    from gguf import GGUFReader
    from tokenizers import Tokenizer

# GGUF name within a block -> Hugging Face name within a layer
_BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_PRE_TOKENIZER = "tokenizer.ggml.pre"
# Hugging Face's name of a special token -> GGUF's field
_SPECIALS = {
    "bos": "tokenizer.ggml.bos_token_id",
    "eos": "tokenizer.ggml.eos_token_id",
    "pad": "tokenizer.ggml.padding_token_id",
}
_CONTROL_TOKEN = 3  # token_type of specials such as <|im_end|>


def convert(gguf_file: Path, out_dir: Path) -> None:
    """Write config, weights (bf16), tokenizer and chat template into `out_dir`.

    Raises:
        ValueError: the file is no GGUF, or of an unsupported kind.
    """
    reader = _open(gguf_file)
    config = read_config(reader)
    weights = read_weights(reader, config)
    save_file(weights, out_dir / "model.safetensors", metadata={"format": "pt"})
    _write_json(out_dir / "config.json", config)
    special_ids = {f"{k}_token_id": config[f"{k}_token_id"] for k in _SPECIALS}
    _write_json(out_dir / "generation_config.json", special_ids)
    read_tokenizer(reader).save(str(out_dir / "tokenizer.json"))
    _write_json(out_dir / "tokenizer_config.json", _tokenizer_config(reader, config))
    template = _field(reader, "tokenizer.chat_template")
    (out_dir / "chat_template.jinja").write_text(template, encoding="utf-8")


def read_config(reader: GGUFReader) -> dict[str, Any]:
    """The config.json of a llama model, from the GGUF's metadata."""
    architecture = _field(reader, "general.architecture")
    if architecture != "llama":
        raise ValueError(
            f"GGUF architecture: got {architecture!r}, want 'llama'; convert other "
            "models with their own tools and pass the directory"
        )
    heads = _field(reader, "llama.attention.head_count")
    hidden = _field(reader, "llama.embedding_length")
    # Stored as float32: print and parse gives the decimal that was meant (1e-5).
    epsilon = np.float32(_field(reader, "llama.attention.layer_norm_rms_epsilon"))
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": _field(reader, "llama.feed_forward_length"),
        "num_hidden_layers": _field(reader, "llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": _field(reader, "llama.attention.head_count_kv"),
        "head_dim": hidden // heads,
        "max_position_embeddings": _field(reader, "llama.context_length"),
        "rms_norm_eps": float(str(epsilon)),
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": float(_field(reader, "llama.rope.freq_base")),
        },
        "tie_word_embeddings": "output.weight" not in _tensor_names(reader),
        "vocab_size": _field(reader, "llama.vocab_size"),
        "attention_bias": False,
        "mlp_bias": False,
        **{f"{k}_token_id": _field(reader, v) for k, v in _SPECIALS.items()},
    }


def read_weights(
    reader: GGUFReader, config: dict[str, Any], dtype: torch.dtype = torch.bfloat16
) -> dict[str, torch.Tensor]:
    """Dequantize every tensor and give it its Hugging Face name and row order."""
    from gguf import dequantize

    head_counts = {
        "attn_q": config["num_attention_heads"],
        "attn_k": config["num_key_value_heads"],
    }
    weights = {}
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type)
        name = _TOP_NAMES.get(tensor.name)
        if name is None:
            _, layer, part, _ = tensor.name.split(".")
            name = f"model.layers.{layer}.{_BLOCK_NAMES[part]}.weight"
            if part in head_counts:
                values = unpermute_rope_rows(values, head_counts[part])
        weights[name] = torch.from_numpy(np.array(values, order="C")).to(dtype)
    return weights


def unpermute_rope_rows(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Undo llama.cpp's order of rotary rows: from interleaved pairs to two halves.

    One head of four rows:  a0 b0 a1 b1  ->  a0 a1 b0 b1

    Args:
        weight: q or k projection, [num_heads * head_dim, hidden].
        num_heads: heads of this projection.
    """
    rows, columns = weight.shape
    pairs = weight.reshape(num_heads, rows // num_heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)


def read_tokenizer(reader: GGUFReader) -> Tokenizer:
    """The byte-level BPE tokenizer, with the pre-tokenizer that training used.

    GGUF only names the pre-tokenizer. "smollm" means: each digit alone, then GPT-2's
    byte-level split; without the first part text such as a numbered list gets other
    ids than the model was trained on.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    kind = (_field(reader, "tokenizer.ggml.model"), _field(reader, _PRE_TOKENIZER))
    if kind != ("gpt2", "smollm"):
        raise ValueError(
            f"GGUF tokenizer: got {kind}, want ('gpt2', 'smollm'); convert other "
            "models with their own tools and pass the directory"
        )
    tokens = _field(reader, "tokenizer.ggml.tokens")
    merges = [tuple(m.split(" ")) for m in _field(reader, "tokenizer.ggml.merges")]
    vocab = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    types = _field(reader, "tokenizer.ggml.token_type")
    tokenizer.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, token_type in zip(tokens, types, strict=True)
            if token_type == _CONTROL_TOKEN
        ]
    )
    return tokenizer


def _tokenizer_config(reader: GGUFReader, config: dict[str, Any]) -> dict[str, Any]:
    tokens = _field(reader, "tokenizer.ggml.tokens")
    unknown = _field(reader, "tokenizer.ggml.unknown_token_id")
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": config["max_position_embeddings"],
        "clean_up_tokenization_spaces": False,
        "unk_token": tokens[unknown],
        **{f"{k}_token": tokens[config[f"{k}_token_id"]] for k in _SPECIALS},
    }


def _open(gguf_file: Path) -> GGUFReader:
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise ValueError(
            "reading a GGUF needs the package gguf; install it: pip install gguf"
        ) from error
    try:
        return GGUFReader(gguf_file)
    except (ValueError, IndexError, KeyError) as error:
        raise ValueError(f"{gguf_file}: not a readable GGUF file: {error}") from error


def _field(reader: GGUFReader, key: str) -> Any:
    field = reader.fields.get(key)
    if field is None:
        raise ValueError(f"GGUF metadata: {key} is missing; the file is incomplete")
    return field.contents()


def _tensor_names(reader: GGUFReader) -> set[str]:
    return {tensor.name for tensor in reader.tensors}


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
