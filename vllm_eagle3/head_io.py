"""Reading, checking, writing and converting head checkpoints.

    safeailab    midlayer.*  flat config.json      \
    specforge    midlayer.*  flat, output ids       >  LoadedHead  -> any of the three
    speculators  layers.0.*  nested config.json    /

Only safetensors are read, never a pickle, and no code that a checkpoint brings.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from vllm_eagle3 import __version__
from vllm_eagle3.draft_head import DraftHeadConfig, Eagle3DraftHead
from vllm_eagle3.head_checks import (
    EMBEDDING_NAMES,
    LM_HEAD_NAMES,
    Target,
    check_head,
    require_fitting_head,
    same_embedding,
    target_config_of,
)
from vllm_eagle3.head_config import head_config_for_target, text_config
from vllm_eagle3.head_files import (
    read_head_files,
    read_target_tensor,
    write_head_files,
)
from vllm_eagle3.head_layouts import (
    Layout,
    config_json,
    require_layout,
    stored_name,
)
from vllm_eagle3.head_limits import require_expressible
from vllm_eagle3.head_meaning import Finding, HeadMeaning
from vllm_eagle3.head_reading import read_meaning
from vllm_eagle3.head_serving import HeadFit, fit_head, serving_overrides
from vllm_eagle3.vocab import DraftVocab

__all__ = [
    "Finding",
    "HeadFit",
    "LoadedHead",
    "check_head",
    "convert_head",
    "fit_head",
    "head_config_for_target",
    "read_head",
    "require_fitting_head",
    "serving_overrides",
    "write_head",
]


@dataclass
class LoadedHead:
    """A head read from disk.

    `embed_tokens` is the checkpoint's own embedding, [vocab, hidden]; None means the
    target's. `notes` say what was inferred or filled in while reading.
    """

    config: DraftHeadConfig
    vocab: DraftVocab
    head: Eagle3DraftHead
    layout: Layout
    embed_tokens: torch.Tensor | None = None
    provenance: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def read_head(
    head_dir: str | os.PathLike[str],
    target: Target | None = None,
    dtype: torch.dtype | None = None,
) -> LoadedHead:
    """Read a head of any layout.

    Args:
        head_dir: its folder.
        target: the target's folder or config.json. Needed where the checkpoint leaves
            tap ids to the published rule; the folder, where it has no lm_head.
        dtype: of the head; as stored if None (the widest, if mixed).

    Raises:
        ValueError: every reason why the checkpoint cannot be read as it means itself.
    """
    files = read_head_files(head_dir)
    config = None if target is None else target_config_of(target)
    meaning = read_meaning(files, config)
    if meaning.errors or meaning.config is None or meaning.vocab is None:
        lines = "".join(f"\n- {e.field}: {e.message}" for e in meaning.errors)
        raise ValueError(f"head {files.path} cannot be read:{lines}")
    weights = dict(meaning.weights)
    if "lm_head.weight" not in weights:
        weights["lm_head.weight"] = _target_lm_head(target)
    head = Eagle3DraftHead(meaning.config)
    head.to(dtype or _widest(meaning))
    head.load_state_dict(weights)
    return LoadedHead(
        config=meaning.config,
        vocab=meaning.vocab,
        head=head,
        layout=meaning.layout,
        embed_tokens=meaning.embed_tokens,
        provenance=dict(files.config.get("vllm_eagle3") or {}),
        notes=[str(finding) for finding in meaning.findings],
    )


def _widest(meaning: HeadMeaning) -> torch.dtype:
    widest = torch.bfloat16 if torch.bfloat16 in meaning.dtypes else torch.float16
    for dtype in meaning.dtypes:
        widest = torch.promote_types(widest, dtype)
    return widest


def _target_lm_head(target: Target | None) -> torch.Tensor:
    weight = None
    if target is not None and not isinstance(target, Mapping):
        weight = read_target_tensor(Path(target), LM_HEAD_NAMES)
    if weight is None:
        raise ValueError(
            "lm_head.weight: the head uses the target's; give the target's folder"
        )
    return weight


def write_head(
    head_dir: str | os.PathLike[str],
    head: Eagle3DraftHead,
    vocab: DraftVocab,
    layout: str = "safeailab",
    target_config: Mapping[str, Any] | None = None,
    extra: Mapping[str, Any] | None = None,
    embed_tokens: torch.Tensor | None = None,
) -> None:
    """Write a head's folder, all of it or nothing.

    Args:
        head_dir: created, or replaced if it holds a head.
        head: weights are stored in their dtype.
        vocab: d2t and t2d are written where it is reduced.
        layout: "safeailab", "specforge" or "speculators".
        target_config: the target's config.json, to check sizes and name it.
        extra: provenance (how the head was made), kept in config.json.
        embed_tokens: the head's own embedding, [vocab, hidden], where its width is
            not the target's; otherwise the target's is shared and none is stored.

    Raises:
        ValueError: vocabulary, target or layout do not belong to the head.
    """
    chosen = require_layout(layout)
    config = head.config
    sizes = (len(vocab), vocab.target_vocab_size)
    if sizes != (config.draft_vocab_size, config.vocab_size):
        raise ValueError(
            f"draft vocabulary: maps {sizes[0]} of {sizes[1]} ids, the head scores "
            f"{config.draft_vocab_size} of {config.vocab_size}; pass the head's own"
        )
    if target_config is not None:
        _require_target(config, text_config(target_config))
    weights = head.state_dict()
    tensors = {stored_name(name, chosen): w for name, w in weights.items()}
    if embed_tokens is not None:
        tensors["embed_tokens.weight"] = embed_tokens
    if not vocab.is_full:
        tensors |= {"d2t": vocab.d2t, "t2d": vocab.t2d}
    dtype = str(weights["fc.weight"].dtype).removeprefix("torch.")
    provenance = {"version": __version__} | dict(extra or {})
    stored_config = config_json(config, chosen, dtype, target_config or {}, provenance)
    write_head_files(head_dir, stored_config, tensors)


def _require_target(head: DraftHeadConfig, target: Mapping[str, Any]) -> None:
    for name, ours, key in (
        ("target_hidden_size", head.target_hidden_size, "hidden_size"),
        ("vocab_size", head.vocab_size, "vocab_size"),
    ):
        if ours != target.get(key):
            raise ValueError(
                f"{name}: the head has {ours}, the target {target.get(key)}; "
                "make the head's config with head_config_for_target"
            )


def convert_head(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    layout: str,
    target: Target | None = None,
) -> LoadedHead:
    """Read a head of any layout and write it in another; return what was read.

    Args:
        target: see `read_head`; its folder is also needed where `src` stores an
            embedding, which is left out only if it equals the target's.

    Raises:
        ValueError: what `read_head` refuses, an embedding that cannot be left out, or
            a field that the layout has no word for (see `head_limits`).
    """
    chosen = require_layout(layout)
    loaded = read_head(src, target)
    if loaded.embed_tokens is not None:
        _require_shared_embedding(loaded.embed_tokens, target)
    config = None if target is None else target_config_of(target)
    require_expressible(loaded.config, chosen, config)
    provenance = loaded.provenance | {"converted_from": loaded.layout}
    write_head(dst, loaded.head, loaded.vocab, layout, config, provenance)
    return loaded


def _require_shared_embedding(own: torch.Tensor, target: Target | None) -> None:
    if target is None or isinstance(target, Mapping):
        raise ValueError(
            "embed_tokens.weight: the head stores an embedding; give the target's "
            "folder, so that it can be compared before it is left out"
        )
    shared = read_target_tensor(Path(target), EMBEDDING_NAMES)
    if shared is None or not same_embedding(own, shared):
        raise ValueError(
            "embed_tokens.weight: the head's differs from the target's, so leaving it "
            "out would change the head; serve the checkpoint as it is"
        )
