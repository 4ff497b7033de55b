"""Tell vLLM what a head's checkpoint means, before vLLM guesses.

vLLM reads a head's config.json inside `SpeculativeConfig.__post_init__`, and some of
its guesses fail right there. So the head is judged first, and the judgement travels as
the draft model's `hf_overrides`: it is pickled with the configuration, and copies of
the configuration do not read the weights again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig
from vllm.config import SpeculativeConfig

from ..head_checks import Target
from ..head_serving import fit_head
from .head_sharding import check_sharding

logger = logging.getLogger("vllm.vllm_eagle3")

# Field of the draft hf_config that says why the head is left to vLLM's own chain.
_FOREIGN = "vllm_eagle3_foreign_head"

# Fields of the head whose configuration vLLM is reading.
_fields: ContextVar[dict[str, Any] | None] = ContextVar("head fields", default=None)


def install() -> None:
    """Wrap vLLM's reading of draft configurations; call once per process."""
    read = SpeculativeConfig.__post_init__
    compose = SpeculativeConfig.compose_draft_hf_overrides

    def __post_init__(self: SpeculativeConfig) -> Any:
        token = _fields.set(head_fields(self) if _is_eagle3(self) else None)
        try:
            return read(self)
        finally:
            _fields.reset(token)

    def compose_draft_hf_overrides(*args: Any, **kwargs: Any) -> Any:
        stock, fields = compose(*args, **kwargs), _fields.get()
        return stock if fields is None else partial(apply_fields, fields, stock)

    SpeculativeConfig.__post_init__ = __post_init__
    SpeculativeConfig.compose_draft_hf_overrides = staticmethod(
        compose_draft_hf_overrides
    )


def apply_fields(
    fields: Mapping[str, Any],
    stock: Callable[[PreTrainedConfig], PreTrainedConfig],
    hf_config: PreTrainedConfig,
) -> PreTrainedConfig:
    """Set a head's fields on its hf_config, then let vLLM do its own changes."""
    # vLLM first asks with a dummy, to learn whether the model type changes.
    if not hf_config.model_type.startswith("dummy_"):
        for name, value in fields.items():
            setattr(hf_config, name, value)
    return stock(hf_config)


def foreign_reason(spec: Any) -> str:
    """Why this engine's head is left to vLLM's own chain, or ""."""
    return getattr(spec.draft_model_config.hf_config, _FOREIGN, "")


def head_fields(spec: SpeculativeConfig) -> dict[str, Any] | None:
    """Judge the head of an engine; None if it is not in a local folder.

    Raises:
        ValueError: the folder is missing or broken, or the head does not fit.
    """
    if not spec.model:
        return None  # vLLM refuses that itself
    head_dir = Path(spec.model)
    if not head_dir.is_dir():
        _require_hub_name(spec.model)
        logger.warning(
            "vllm_eagle3 checks heads in local folders only; not checked: %s (its "
            "config.json is taken as vLLM reads it)",
            spec.model,
        )
        return None
    fit = fit_head(head_dir, _target_of(spec.target_model_config))
    if not fit.foreign:
        check_sharding(
            fit.fields,
            spec.draft_tensor_parallel_size,
            spec.target_parallel_config.tensor_parallel_size,
        )
    for finding in fit.warnings:
        logger.warning("head %s: %s: %s", spec.model, finding.field, finding.message)
    return {_FOREIGN: fit.foreign} if fit.foreign else fit.fields


def _is_eagle3(spec: SpeculativeConfig) -> bool:
    """Whether vLLM will come to method eagle3, which it also infers from a name."""
    if spec.method in (None, "draft_model"):
        name = (spec.model or "").lower()
        return "eagle3" in name and "eagle-" not in name
    return spec.method == "eagle3"


def _require_hub_name(model: str) -> None:
    """Refuse what can only be meant as a folder: no OWNER/NAME, no URL."""
    is_path = model.startswith((".", "~", "/")) or model.count("/") > 1
    if "://" not in model and (is_path or Path(model).exists()):
        raise ValueError(
            f"speculative_config model: got {model!r}, which is no folder; want the "
            "folder of a draft head (config.json and *.safetensors), or a Hugging "
            "Face name OWNER/NAME"
        )


def _target_of(model_config: Any) -> Target:
    folder = Path(model_config.model)
    return folder if folder.is_dir() else model_config.hf_config.to_dict()
