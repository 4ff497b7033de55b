"""Does a head fit a target?"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from vllm_eagle3.draft_head import DraftHeadConfig
from vllm_eagle3.head_config import rope_parameters, text_config
from vllm_eagle3.head_files import (
    HeadFiles,
    read_config,
    read_head_files,
    read_target_tensor,
)
from vllm_eagle3.head_layouts import ARCHITECTURE
from vllm_eagle3.head_meaning import Finding, HeadMeaning
from vllm_eagle3.head_reading import read_meaning

# A target: its folder, or its config.json where the weights are not at hand.
Target = str | os.PathLike[str] | Mapping[str, Any]

EMBEDDING_NAMES = (
    "model.embed_tokens.weight",
    "model.language_model.embed_tokens.weight",
    "language_model.model.embed_tokens.weight",
)
LM_HEAD_NAMES = ("lm_head.weight", "language_model.lm_head.weight", *EMBEDDING_NAMES)

# Names under which plain EAGLE-3 heads of this shape are published.
_USUAL_ARCHITECTURES = (
    ARCHITECTURE,
    "LlamaForCausalLM",
    "Eagle3LlamaForCausalLM",
    "Eagle3Speculator",
    "Eagle3DraftModel",
)


def target_config_of(target: Target) -> Mapping[str, Any]:
    """The target's config.json; ValueError if its folder has none."""
    if isinstance(target, Mapping):
        return target
    return read_config(Path(target), "target")


def check_head(head_dir: str | os.PathLike[str], target: Target) -> list[Finding]:
    """Everything noticed about a head and its fit to a target; never raises for it.

    Args:
        head_dir: the head's folder.
        target: the target's folder, or its config.json (then what needs the target's
            weights is left out).
    """
    try:
        target_config = target_config_of(target)
        files = read_head_files(head_dir)
        return read_for(files, target, target_config).findings
    except ValueError as error:
        return [Finding("error", "files", str(error))]


def require_fitting_head(head_dir: str | os.PathLike[str], target: Target) -> None:
    """Raise ValueError with all errors of `check_head`, if there are any."""
    errors = [f for f in check_head(head_dir, target) if f.severity == "error"]
    if errors:
        raise ValueError(joined(head_dir, errors))


def joined(head_dir: str | os.PathLike[str], errors: list[Finding]) -> str:
    """One message of all errors of a head."""
    lines = "".join(f"\n- {e.field}: {e.message}" for e in errors)
    return f"head {os.fspath(head_dir)} cannot be used:{lines}"


def read_for(
    files: HeadFiles, target: Target, target_config: Mapping[str, Any]
) -> HeadMeaning:
    """What a head's files mean, with every doubt about their fit to a target noted."""
    meaning = read_meaning(files, target_config)
    _check_names(meaning)
    if meaning.config is not None:
        _check_sizes(meaning, meaning.config, text_config(target_config))
        _check_positions(meaning, meaning.config, text_config(target_config))
        _check_dtype(meaning, target_config)
        _check_for_vllm(meaning, meaning.config)
        if not isinstance(target, Mapping):
            _check_embeddings(meaning, Path(target))
    if not meaning.errors and meaning.config is not None:
        taps = list(meaning.config.tap_ids)
        meaning.note("ok", "head", f"fits the target ({meaning.layout}, taps {taps})")
    return meaning


def _check_names(meaning: HeadMeaning) -> None:
    names = meaning.flat.get("architectures") or []
    if not names:
        meaning.note(
            "warning",
            "architectures",
            f"not written; loaded by its weights, as {ARCHITECTURE}",
        )
    elif not set(names) & set(_USUAL_ARCHITECTURES):
        meaning.note(
            "warning",
            "architectures",
            f"got {names}, unusual for a head; loaded by its weights, as "
            f"{ARCHITECTURE} (usual: {list(_USUAL_ARCHITECTURES)})",
        )
    if meaning.flat.get("tie_word_embeddings"):
        own = "lm_head.weight" in meaning.weights
        meaning.note(
            "warning",
            "tie_word_embeddings",
            "set, but a head's lm_head is never tied to its embedding; "
            + ("its own lm_head is used" if own else "ignored"),
        )


def _check_sizes(
    meaning: HeadMeaning, head: DraftHeadConfig, target: Mapping[str, Any]
) -> None:
    width = target.get("hidden_size")
    if head.target_hidden_size != width:
        meaning.note(
            "error",
            "target_hidden_size",
            f"the head reads features of width {head.target_hidden_size}, the target "
            f"has {width}; the head was made for another target",
        )
    if head.hidden_size != width and meaning.embed_tokens is None:
        meaning.note(
            "error",
            "hidden_size",
            f"the head has {head.hidden_size}, the target {width}, so it cannot share "
            "the target's embedding and stores none of its own",
        )
    embed = meaning.embed_tokens
    if embed is not None and embed.shape != (head.vocab_size, head.hidden_size):
        meaning.note(
            "error",
            "embed_tokens.weight",
            f"got {list(embed.shape)}, want {[head.vocab_size, head.hidden_size]}",
        )


def _check_positions(
    meaning: HeadMeaning, head: DraftHeadConfig, target: Mapping[str, Any]
) -> None:
    limit = target.get("max_position_embeddings")
    if limit and head.max_position_embeddings < limit:
        meaning.note(
            "warning",
            "max_position_embeddings",
            f"the head says {head.max_position_embeddings}, the target {limit}; its "
            "rotary table is extended, acceptance beyond its training length may drop",
        )
    wanted = rope_parameters(target)
    wanted.pop("partial_rotary_factor", None)
    if head.rope_parameters != wanted:
        meaning.note(
            "warning",
            "rope_parameters",
            f"the head says {head.rope_parameters}, the target {wanted}; served as "
            "the head says, which is right only if it was trained so",
        )


def _check_dtype(meaning: HeadMeaning, target_config: Mapping[str, Any]) -> None:
    text = text_config(target_config)
    source = target_config if "dtype" in target_config else text
    wanted = str(source.get("dtype") or source.get("torch_dtype") or "unknown")
    stored = sorted(str(d).removeprefix("torch.") for d in meaning.dtypes)
    if stored != [wanted.removeprefix("torch.")]:
        meaning.note(
            "ok",
            "dtype",
            f"stored as {', '.join(stored)}, the target as {wanted}; "
            "cast to the engine's dtype when loaded",
        )


def _check_for_vllm(meaning: HeadMeaning, head: DraftHeadConfig) -> None:
    """What stops vLLM before anyone can tell it what the checkpoint means."""
    if meaning.layout != "speculators" and not meaning.flat.get("model_type"):
        meaning.note(
            "error",
            "model_type",
            'not written, and transformers cannot read config.json without; add "llama"'
            " or use vllm_eagle3.head_io.convert_head",
        )
    layer_types = meaning.flat.get("layer_types")
    if layer_types and len(layer_types) != head.num_hidden_layers:
        meaning.note(
            "error",
            "layer_types",
            f"{len(layer_types)} entries for {head.num_hidden_layers} draft layers; "
            "remove the field",
        )


def _check_embeddings(meaning: HeadMeaning, target_dir: Path) -> None:
    own = meaning.embed_tokens
    if own is None:
        return
    try:
        shared = read_target_tensor(target_dir, EMBEDDING_NAMES)
    except ValueError as error:
        meaning.note("error", "target", str(error))
        return
    if shared is not None and same_embedding(own, shared):
        meaning.note("ok", "embed_tokens.weight", "stored, equal to the target's")
    else:
        meaning.note(
            "warning",
            "embed_tokens.weight",
            "stored and different from the target's; served as stored, which is right "
            "only if the head was trained with it (exports may fill it at random)",
        )


def same_embedding(own: torch.Tensor, shared: torch.Tensor) -> bool:
    """Equal bit for bit after rounding the target's embedding to the head's dtype.

    Args:
        own: the head's copy, [vocab, hidden].
        shared: the target's embedding, [vocab, hidden].
    """
    return own.shape == shared.shape and torch.equal(own, shared.to(own.dtype))
