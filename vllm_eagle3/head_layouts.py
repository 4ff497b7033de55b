"""The three on-disk layouts of a head: names, config keys, tap conventions.

| layout      | layer 0 is  | config.json                 | `eagle_config` tap ids     |
|-------------|-------------|-----------------------------|----------------------------|
| safeailab   | `midlayer.` | flat                        | input of the layer         |
| specforge   | `midlayer.` | flat                        | output of the layer (-1)   |
| speculators | `layers.0.` | `transformer_layer_config`  | none; top level, input     |

A top-level `eagle_aux_hidden_state_layer_ids` means layer inputs in every layout.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, get_args

from vllm_eagle3.draft_head import DraftHeadConfig
from vllm_eagle3.taps import default_tap_ids, from_output_ids, to_output_ids

Layout = Literal["safeailab", "specforge", "speculators"]
LAYOUTS: tuple[Layout, ...] = get_args(Layout)

ARCHITECTURE = "LlamaForCausalLMEagle3"
TAPS_KEY = "eagle_aux_hidden_state_layer_ids"
SWITCHES = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


def require_layout(layout: str) -> Layout:
    """`layout` if it is one of `LAYOUTS`, else ValueError."""
    for known in LAYOUTS:
        if layout == known:
            return known
    raise ValueError(f"layout: got {layout!r}, want one of {list(LAYOUTS)}")


def detect_layout(config: Mapping[str, Any]) -> Layout:
    """Which layout a config.json follows; ValueError if its parts have wrong types."""
    for name in ("eagle_config", "transformer_layer_config", "vllm_eagle3"):
        if not isinstance(config.get(name) or {}, Mapping):
            raise ValueError(f"{name}: got {config[name]!r}, want an object")
    architectures = config.get("architectures") or []
    if not isinstance(architectures, list):
        raise ValueError(f"architectures: got {architectures!r}, want a list of names")
    if "speculators_model_type" in config or "transformer_layer_config" in config:
        return "speculators"
    nested = (config.get("eagle_config") or {}).get(TAPS_KEY)
    top = config.get(TAPS_KEY)
    specforge = ARCHITECTURE in architectures
    if specforge and not (top and nested in (None, top)):
        return "specforge"
    return "safeailab"


def flat_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The head's fields at one level, whatever the layout."""
    layer = dict(config.get("transformer_layer_config") or {})
    return layer | {k: v for k, v in config.items() if k != "transformer_layer_config"}


def module_name(stored: str) -> str:
    """Name of a stored tensor in `Eagle3DraftHead`."""
    if stored.startswith("midlayer."):
        return "layers.0." + stored.removeprefix("midlayer.")
    return stored


def stored_name(name: str, layout: Layout) -> str:
    """The inverse of `module_name`."""
    if layout != "speculators" and name.startswith("layers.0."):
        return "midlayer." + name.removeprefix("layers.0.")
    return name


def stored_tap_ids(
    config: Mapping[str, Any], num_layers: int | None
) -> tuple[tuple[int, ...] | None, str | None]:
    """Tap ids of a config.json as layer inputs, with a note where they were converted.

    Args:
        num_layers: layers of the target, if known. A SpecForge-style config whose ids
            are exactly the published (2, L//2, L-3) was written for layer inputs.

    Returns:
        (ids, note); ids is None where the checkpoint leaves them to the published rule.

    Raises:
        ValueError: ids that are no list of integers, or two lists that disagree.
    """
    top = _id_list(config, TAPS_KEY)
    nested = _id_list(config.get("eagle_config") or {}, TAPS_KEY)
    if top and nested and nested not in (top, to_output_ids(top)):
        raise ValueError(
            f"{TAPS_KEY}: top level says {list(top)}, eagle_config {list(nested)}; "
            "remove the wrong one"
        )
    if top:
        return top, None
    if not nested:
        return None, None
    if detect_layout(config) != "specforge":
        return nested, None
    if num_layers is not None and nested == default_tap_ids(num_layers):
        return nested, (
            f"eagle_config lists {list(nested)}, the published layer inputs; "
            "they are taken as such although the rest looks like SpecForge"
        )
    return from_output_ids(nested), (
        f"eagle_config lists layer outputs {list(nested)} (SpecForge, SGLang), which "
        f"are the layer inputs {list(from_output_ids(nested))}; "
        f"a top-level {TAPS_KEY} would say so without doubt"
    )


def _id_list(config: Mapping[str, Any], key: str) -> tuple[int, ...] | None:
    ids = config.get(key)
    if not ids:
        return None
    if not isinstance(ids, list | tuple) or any(type(i) is not int for i in ids):
        raise ValueError(f"{key}: got {ids!r}, want a list of integers")
    return tuple(ids)


def config_json(
    head: DraftHeadConfig,
    layout: Layout,
    dtype: str,
    target_config: Mapping[str, Any],
    extra: Mapping[str, Any],
) -> dict[str, Any]:
    """config.json of a head: every switch written out, nothing left to defaults.

    Args:
        dtype: of the stored weights, "bfloat16" say.
        target_config: the target's config.json (names its architecture).
        extra: provenance, kept under "vllm_eagle3".
    """
    layer = _layer_fields(head)
    meaning: dict[str, Any] = {name: getattr(head, name) for name in SWITCHES} | {
        TAPS_KEY: list(head.tap_ids),
        "num_aux_hidden_states": len(head.tap_ids),
        "draft_vocab_size": head.draft_vocab_size,
        "target_hidden_size": head.target_hidden_size,
        "logit_scale": head.logit_scale,
        "tie_word_embeddings": False,
        "dtype": dtype,
        "vllm_eagle3": dict(extra),
    }
    if layout == "speculators":
        return meaning | {
            "architectures": ["Eagle3Speculator"],
            "speculators_model_type": "eagle3",
            "speculators_config": _speculators_config(target_config, extra),
            "transformer_layer_config": layer,
        }
    nested = to_output_ids(head.tap_ids) if layout == "specforge" else head.tap_ids
    return (
        layer
        | meaning
        | {
            "architectures": [ARCHITECTURE],
            "eagle_config": {TAPS_KEY: list(nested), "use_aux_hidden_state": True},
        }
    )


def _layer_fields(head: DraftHeadConfig) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "hidden_size": head.hidden_size,
        "intermediate_size": head.intermediate_size,
        "num_hidden_layers": head.num_hidden_layers,
        "num_attention_heads": head.num_attention_heads,
        "num_key_value_heads": head.num_key_value_heads,
        "head_dim": head.head_dim,
        "vocab_size": head.vocab_size,
        "rms_norm_eps": head.rms_norm_eps,
        "rope_parameters": dict(head.rope_parameters),
        "rope_theta": head.rope_parameters["rope_theta"],
        "max_position_embeddings": head.max_position_embeddings,
        "hidden_act": head.hidden_act,
        "attention_bias": head.attention_bias,
        "mlp_bias": False,
    }


def _speculators_config(
    target_config: Mapping[str, Any], extra: Mapping[str, Any]
) -> dict[str, Any]:
    return {
        "algorithm": "eagle3",
        "default_proposal_method": "greedy",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
        "verifier": {
            "name_or_path": str(extra.get("target", "")),
            "architectures": list(target_config.get("architectures") or []),
        },
    }
