"""Interpret a head's files, whatever their layout.

One reading serves all: loading refuses its errors, `doctor` prints it, and the
engine is given the fields that it would otherwise have to guess.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm_eagle3.draft_head import DraftHeadConfig
from vllm_eagle3.head_config import require_field, rope_parameters, text_config
from vllm_eagle3.head_files import HeadFiles
from vllm_eagle3.head_layouts import (
    SWITCHES,
    TAPS_KEY,
    detect_layout,
    flat_config,
    module_name,
    stored_tap_ids,
)
from vllm_eagle3.head_meaning import HeadMeaning
from vllm_eagle3.head_weights import compare_weights, read_vocab
from vllm_eagle3.taps import check_tap_ids, default_tap_ids


def read_meaning(
    files: HeadFiles, target_config: Mapping[str, Any] | None
) -> HeadMeaning:
    """Interpret a head's files; what is wrong with them is noted as an error.

    Args:
        target_config: the target's config.json where known. It settles which tap ids
            and which vocabulary are meant where the head leaves that open.

    Raises:
        ValueError: config.json is so broken that not even its layout is known.
    """
    meaning = _sort_tensors(files)
    _note_foreign(meaning)
    _note_unknown_switches(meaning)
    try:
        meaning.config = _read_config(meaning, target_config)
    except (TypeError, ValueError) as error:
        meaning.note("error", "config.json", str(error))
        return meaning
    read_vocab(meaning, meaning.config)
    compare_weights(meaning, meaning.config)
    return meaning


def _sort_tensors(files: HeadFiles) -> HeadMeaning:
    meaning = HeadMeaning(detect_layout(files.config), flat_config(files.config), {})
    for stored, tensor in files.tensors.items():
        if stored == "d2t":
            meaning.d2t = tensor
        elif stored == "t2d":
            meaning.t2d = tensor
        elif stored == "embed_tokens.weight":
            meaning.embed_tokens = tensor
        elif not stored.endswith("rotary_emb.inv_freq"):  # derived, never read
            meaning.weights[module_name(stored)] = tensor
    return meaning


# config.json field -> (values that this head can have, what another value means)
_ONLY: dict[str, tuple[tuple[Any, ...], str]] = {
    "mlp_bias": ((False, None), "biases in the MLP"),
    "bias": ((False, None), "biases in the MLP and the output projection"),
    "is_causal": ((True, None), "attention that looks ahead"),
    "quantization_config": ((None,), "quantised weights"),
    "mask_token_id": ((None,), "parallel drafting (P-EAGLE)"),
    "pard_token": ((None,), "parallel drafting (P-EAGLE)"),
    "speculators_model_type": (("eagle3", None), "another method than EAGLE-3"),
}
_ONLY_NESTED: dict[str, tuple[tuple[Any, ...], str]] = {
    "use_aux_hidden_state": ((True, None), "a head without taps"),
    "use_input_layernorm_in_first_layer": ((True, None), "no norm of the embedding"),
    "use_last_layernorm": ((True, None), "no norm in front of lm_head"),
    "use_mtp_layernorm": ((False, None), "norms of the MTP kind"),
}
_PROJECTIONS = {"q_proj", "k_proj", "v_proj", "o_proj"}


def _note_foreign(meaning: HeadMeaning) -> None:
    """Note what makes it another kind of head than this package runs."""
    nested = meaning.flat.get("eagle_config") or {}
    for config, rules in ((meaning.flat, _ONLY), (nested, _ONLY_NESTED)):
        for name, (allowed, consequence) in rules.items():
            if config.get(name) not in allowed:
                meaning.note_foreign(
                    name,
                    f"got {config[name]!r} ({consequence}), want {allowed[0]!r}; "
                    "this package does not run such heads",
                )
    if "sliding_attention" in (meaning.flat.get("layer_types") or []):
        meaning.note_foreign(
            "layer_types",
            "got sliding_attention, want full attention in every draft layer",
        )
    parts = {n.split("self_attn.")[1] for n in meaning.weights if "self_attn." in n}
    if other := sorted({part.split(".")[0] for part in parts} - _PROJECTIONS):
        meaning.note_foreign(
            "self_attn",
            f"attention of another kind, with {other}; want only "
            f"{sorted(_PROJECTIONS)}: this package does not run such heads",
        )


def _note_unknown_switches(meaning: HeadMeaning) -> None:
    """A switch nobody knows would only show as poor acceptance: name it."""
    flat = meaning.flat
    nested = flat.get("eagle_config") or {}
    known = {*_ONLY_NESTED, *SWITCHES}
    unknown = {n for n, v in nested.items() if v is True and n not in known}
    unknown |= {n for n in flat if flat[n] is True and "norm" in n and n not in known}
    for name in sorted(unknown):
        meaning.note(
            "error", name, f"unknown switch set to true; known: {sorted(known)}"
        )
    if flat.get("hidden_act") not in ("silu", None):
        meaning.note("error", "hidden_act", f"got {flat['hidden_act']!r}, want 'silu'")


def _read_config(
    meaning: HeadMeaning, target_config: Mapping[str, Any] | None
) -> DraftHeadConfig:
    flat = meaning.flat
    hidden, inner, heads = (
        _size(flat, name)
        for name in ("hidden_size", "intermediate_size", "num_attention_heads")
    )
    kv_heads = _size_or(flat, "num_key_value_heads", heads)
    if heads % kv_heads:
        raise ValueError(
            f"num_key_value_heads: got {kv_heads}, want a divisor of {heads} heads"
        )
    vocab_size = _vocab_size(meaning, target_config)
    width = _size_or(flat, "target_hidden_size", hidden)
    switches: dict[str, Any] = {name: _switch(meaning, name) for name in SWITCHES}
    return DraftHeadConfig(
        hidden_size=hidden,
        intermediate_size=inner,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=_size_or(flat, "head_dim", hidden // heads),
        vocab_size=vocab_size,
        draft_vocab_size=_draft_vocab_size(meaning, vocab_size),
        target_hidden_size=width,
        tap_ids=_tap_ids(meaning, width, target_config),
        num_hidden_layers=_size_or(flat, "num_hidden_layers", 1),
        rms_norm_eps=_number_or(flat, "rms_norm_eps", 1e-6),
        rope_parameters=rope_parameters(flat),
        max_position_embeddings=_max_positions(flat, target_config),
        attention_bias=_switch(meaning, "attention_bias"),
        logit_scale=_number_or(flat, "logit_scale", 1.0),
        **switches,
    )


def _size(flat: Mapping[str, Any], name: str) -> int:
    value = require_field(flat, name, "head")
    if type(value) is not int or value < 1:
        raise ValueError(f"{name}: got {value!r}, want a positive integer")
    return value


def _size_or(flat: Mapping[str, Any], name: str, default: int) -> int:
    """A size that may be left out, or written as null or 0."""
    return _size(flat, name) if flat.get(name) else default


def _number_or(flat: Mapping[str, Any], name: str, default: float) -> float:
    value = flat.get(name) or default
    if type(value) not in (int, float):
        raise ValueError(f"{name}: got {value!r}, want a number")
    return float(value)


# Switch -> a weight that exists exactly when it is on.
_SWITCH_WEIGHTS = {
    "norm_before_fc": "input_norm.weight",
    "fc_norm": "fc_norm.0.weight",
    "attention_bias": "layers.0.self_attn.q_proj.bias",
}


def _switch(meaning: HeadMeaning, name: str) -> bool:
    """A switch as the checkpoint means it: as written, else as its weights show."""
    nested = meaning.flat.get("eagle_config") or {}
    written = nested.get(name, meaning.flat.get(name))
    weight = _SWITCH_WEIGHTS.get(name)
    if written is not None:
        if written is False and weight in meaning.weights:
            meaning.note(
                "error",
                name,
                f"config.json says false, but the checkpoint holds {weight}; "
                "set it to true or remove the weight",
            )
        return bool(written)
    if weight in meaning.weights:
        meaning.note("warning", name, f"not written; taken as true because of {weight}")
        return True
    if name == "norm_before_residual" and meaning.layout == "speculators":
        meaning.note(
            "warning",
            name,
            "not written; taken as false, the speculators library's default "
            "(vLLM would take true)",
        )
    return False


def _vocab_size(meaning: HeadMeaning, target_config: Mapping[str, Any] | None) -> int:
    written = meaning.flat.get("vocab_size")
    if target_config is None:
        return _size(meaning.flat, "vocab_size")
    wanted = int(require_field(text_config(target_config), "vocab_size", "target"))
    if written == wanted:
        return wanted
    if meaning.t2d is not None and meaning.t2d.numel() == wanted:
        meaning.note(
            "warning",
            "vocab_size",
            f"config.json says {written}, t2d covers the target's {wanted} ids; "
            "the latter is used",
        )
        return wanted
    raise ValueError(
        f"vocab_size: the head says {written}, the target {wanted}; "
        "the head was made for another target"
    )


def _draft_vocab_size(meaning: HeadMeaning, vocab_size: int) -> int:
    if meaning.flat.get("draft_vocab_size"):
        return _size(meaning.flat, "draft_vocab_size")
    lm_head = meaning.weights.get("lm_head.weight")
    size = vocab_size if lm_head is None else lm_head.shape[0]
    if size != vocab_size:
        meaning.note(
            "warning",
            "draft_vocab_size",
            f"not written; taken as {size}, the rows of lm_head",
        )
    return size


def _tap_ids(
    meaning: HeadMeaning, width: int, target_config: Mapping[str, Any] | None
) -> tuple[int, ...]:
    config = None if target_config is None else text_config(target_config)
    layers = (
        int(require_field(config, "num_hidden_layers", "target")) if config else None
    )
    ids, note = stored_tap_ids(meaning.flat, layers)
    if note is not None:
        meaning.note("warning", TAPS_KEY, note)
    if ids is None:
        if layers is None:
            raise ValueError(f"{TAPS_KEY}: not written; give the target's config too")
        ids = default_tap_ids(layers)
        if layers < 7:
            meaning.note(
                "warning",
                TAPS_KEY,
                "not written, and the published rule (2, L//2, L-3) gives no three "
                f"layers for a target of {layers}; taken as {list(ids)}, write the ids "
                "the head was trained with into its config.json",
            )
    fc = meaning.weights.get("fc.weight")
    if fc is not None and fc.shape[-1] != len(ids) * width:
        raise ValueError(
            f"fc.weight: reads {fc.shape[-1]} features, but {len(ids)} taps "
            f"{list(ids)} of width {width} give {len(ids) * width}; "
            f"{TAPS_KEY} or target_hidden_size is wrong"
        )
    return ids if layers is None else check_tap_ids(ids, layers)


def _max_positions(
    flat: Mapping[str, Any], target_config: Mapping[str, Any] | None
) -> int:
    """The head's own limit; the target's where none is written."""
    written = flat.get("max_position_embeddings")
    if written is None and target_config is not None:
        written = text_config(target_config).get("max_position_embeddings")
    return int(written or DraftHeadConfig.max_position_embeddings)
