"""What an engine must be told to run a head as its checkpoint means it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from vllm_eagle3.draft_head import DraftHeadConfig
from vllm_eagle3.head_checks import Target, joined, read_for, target_config_of
from vllm_eagle3.head_config import text_config
from vllm_eagle3.head_files import read_head_files
from vllm_eagle3.head_layouts import ARCHITECTURE, SWITCHES, TAPS_KEY
from vllm_eagle3.head_meaning import Finding


@dataclass(frozen=True)
class HeadFit:
    """A head on a target, as one reading of the files shows it.

    Attributes:
        fields: of vLLM's draft hf_config; empty for a foreign head.
        foreign: why it is a head of a kind that vLLM may run but this package does
            not (P-EAGLE, another attention, quantised), or "".
        warnings: what works, but not by stock defaults or not without cost.
    """

    fields: dict[str, Any] = field(default_factory=dict)
    foreign: str = ""
    warnings: list[Finding] = field(default_factory=list)


def fit_head(head_dir: str | os.PathLike[str], target: Target) -> HeadFit:
    """Read a head once and say how an engine runs it on its target.

    Raises:
        ValueError: files missing or broken, or a head of this package's kind that
            does not fit; all errors joined.
    """
    target_config = target_config_of(target)
    meaning = read_for(read_head_files(head_dir), target, target_config)
    foreign = [f for f in meaning.errors if f.foreign]
    if foreign:
        return HeadFit(foreign="; ".join(f"{f.field}: {f.message}" for f in foreign))
    if meaning.errors or meaning.config is None:
        raise ValueError(joined(head_dir, meaning.errors))
    warnings = [f for f in meaning.findings if f.severity == "warning"]
    return HeadFit(_fields(meaning.config, target_config), warnings=warnings)


def serving_overrides(
    head_dir: str | os.PathLike[str], target: Target
) -> dict[str, Any]:
    """Fields of vLLM's draft hf_config with which its module computes what is meant.

    All fields that matter are given, not only those that differ, so that the result
    does not depend on what an engine assumes for a field that config.json lacks.
    `max_position_embeddings` is a lower bound: keep a larger value.

    Raises:
        ValueError: the head does not fit, or is foreign.
    """
    fit = fit_head(head_dir, target)
    if fit.foreign:
        raise ValueError(f"head {os.fspath(head_dir)} cannot be used: {fit.foreign}")
    return fit.fields


def _fields(head: DraftHeadConfig, target_config: Mapping[str, Any]) -> dict[str, Any]:
    ids = list(head.tap_ids)
    limit = text_config(target_config).get("max_position_embeddings") or 0
    return {name: getattr(head, name) for name in SWITCHES} | {
        "architectures": [ARCHITECTURE],
        "hidden_size": head.hidden_size,
        "intermediate_size": head.intermediate_size,
        "num_hidden_layers": head.num_hidden_layers,
        "num_attention_heads": head.num_attention_heads,
        "num_key_value_heads": head.num_key_value_heads,
        "head_dim": head.head_dim,
        "hidden_act": head.hidden_act,
        "rms_norm_eps": head.rms_norm_eps,
        "attention_bias": head.attention_bias,
        "mlp_bias": False,
        "rope_parameters": dict(head.rope_parameters),
        "max_position_embeddings": max(head.max_position_embeddings, limit),
        "layer_types": None,
        "vocab_size": head.vocab_size,
        "draft_vocab_size": head.draft_vocab_size,
        "target_hidden_size": head.target_hidden_size,
        "logit_scale": head.logit_scale,
        "tie_word_embeddings": False,
        "num_aux_hidden_states": len(ids),
        TAPS_KEY: ids,
        "eagle_config": {
            TAPS_KEY: ids,
            "use_aux_hidden_state": True,
            "norm_before_fc": head.norm_before_fc,
        },
    }
