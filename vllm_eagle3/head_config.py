"""A draft head's shape, derived from the target it is made for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vllm_eagle3.draft_head import DraftHeadConfig
from vllm_eagle3.taps import check_tap_ids, default_tap_ids


def text_config(target_config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language model's part of a target's config.json (multimodal ones nest it)."""
    return target_config.get("text_config") or target_config


def require_field(config: Mapping[str, Any], name: str, owner: str) -> Any:
    """`config[name]`, or ValueError that says whose config.json lacks it."""
    value = config.get(name)
    if value is None:
        raise ValueError(
            f"{name}: missing in the {owner}'s config.json; "
            f"is this the folder of a {owner}?"
        )
    return value


def rope_parameters(config: Mapping[str, Any]) -> dict[str, Any]:
    """Rotary settings in one spelling: {"rope_type", "rope_theta", scaling...}.

    Reads `rope_parameters` (per layer type too: the full-attention entry), and the
    older pair of `rope_theta` and `rope_scaling`. Multimodal sections are left out:
    on text all of them count the same positions.
    """
    found = dict(config.get("rope_parameters") or {})
    if isinstance(found.get("full_attention"), Mapping):
        found = dict(found["full_attention"])
    if not found:
        found = dict(config.get("rope_scaling") or {})
    legacy_type = found.pop("type", None)
    kind = found.setdefault("rope_type", legacy_type or "default")
    if kind == "mrope":
        found["rope_type"] = "default"
    found.pop("mrope_section", None)
    found.pop("mrope_interleaved", None)
    found.setdefault("rope_theta", config.get("rope_theta") or 10000.0)
    found["rope_theta"] = float(found["rope_theta"])
    if found.get("partial_rotary_factor") == 1.0:
        del found["partial_rotary_factor"]
    return found


def head_config_for_target(
    target_config: Mapping[str, Any],
    draft_vocab_size: int,
    tap_ids: Sequence[int] | None = None,
    **switches: Any,
) -> DraftHeadConfig:
    """The head that belongs to a target: its sizes, rope, positions and epsilon.

    Args:
        target_config: the target's config.json.
        draft_vocab_size: token ids the head scores, at most the target's.
        tap_ids: layers whose inputs feed the head; low, mid and high if None.
        switches: any other field of `DraftHeadConfig`, e.g. `fc_norm=True`.

    Raises:
        ValueError: a field the target lacks, ids outside it, an unknown switch, or a
            rope that a head cannot have.
    """
    config = text_config(target_config)
    hidden, layers, vocab = (
        int(require_field(config, name, "target"))
        for name in ("hidden_size", "num_hidden_layers", "vocab_size")
    )
    if not 0 < draft_vocab_size <= vocab:
        raise ValueError(
            f"draft_vocab_size: got {draft_vocab_size}, want 1..{vocab} "
            "(the target's vocabulary)"
        )
    heads = int(require_field(config, "num_attention_heads", "target"))
    rope = rope_parameters(config)
    rope.pop("partial_rotary_factor", None)  # the head rotates whole heads
    fields: dict[str, Any] = {
        "hidden_size": hidden,
        "intermediate_size": int(require_field(config, "intermediate_size", "target")),
        "num_attention_heads": heads,
        "num_key_value_heads": int(config.get("num_key_value_heads") or heads),
        "head_dim": int(config.get("head_dim") or hidden // heads),
        "vocab_size": vocab,
        "draft_vocab_size": draft_vocab_size,
        "target_hidden_size": hidden,
        "tap_ids": check_tap_ids(
            default_tap_ids(layers) if tap_ids is None else tap_ids, layers
        ),
        "rms_norm_eps": float(config.get("rms_norm_eps") or 1e-6),
        "rope_parameters": rope,
        "max_position_embeddings": int(
            require_field(config, "max_position_embeddings", "target")
        ),
    }
    known = set(DraftHeadConfig.__dataclass_fields__)
    if unknown := sorted(set(switches) - known):
        raise ValueError(
            f"head switches: got unknown {unknown}, want some of {sorted(known)}"
        )
    return DraftHeadConfig(**(fields | switches))
