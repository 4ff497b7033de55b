"""Fields of `speculative_config` that our engines do not follow: refused by name.

The fields that are followed are listed, so a field that a later vLLM adds is refused
too until somebody has looked at it.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

FOLLOWED = frozenset(
    {
        "attention_backend",
        "code_revision",
        "disable_eagle_block_drop",
        "disable_padded_drafter_batch",
        "draft_load_config",
        "draft_sample_method",
        "draft_tensor_parallel_size",
        "enforce_eager",
        "kv_cache_dtype",
        "method",
        "model",
        "moe_backend",
        "num_speculative_tokens",
        "parallel_drafting",  # such a head is left to vLLM's own chain
        "quantization",
        "revision",
        "tensor_parallel_size",  # refused by vLLM
    }
)
# What vLLM fills in itself; whatever users said there is gone by then.
_DERIVED = frozenset(
    {
        "draft_model_config",
        "draft_parallel_config",
        "prompt_lookup_max",
        "prompt_lookup_min",
        "target_model_config",
        "target_parallel_config",
    }
)
_REASONS = {
    "rejection_sample_method": (
        "drafts are judged so that the text has the target's own law, for every shape"
    ),
    "enable_adaptive_verification": 'shape "auto" chooses what is verified',
    "use_local_argmax_reduction": "growth wants more than a level's best token",
}
_SCHEDULE = "num_speculative_tokens_per_batch_size"


def refuse_unfollowed(spec: Any, shape: str) -> None:
    """Refuse what users set in `speculative_config` and we would ignore.

    Args:
        spec: vLLM's SpeculativeConfig.
        shape: of our options.

    Raises:
        ValueError: naming the first such field.
    """
    _check_schedule(spec, shape)
    _check_length(spec)
    followed = FOLLOWED | _DERIVED | {_SCHEDULE, "max_model_len"}
    for name in (f.name for f in fields(spec) if f.name not in followed):
        got, default = getattr(spec, name), default_of(spec, name)
        if got != default:
            reason = _REASONS.get(name, "it belongs to other ways of drafting")
            raise ValueError(
                f"speculative_config {name}: got {got!r}, want {default!r}: {reason}; "
                "leave it out, or use vLLM's own chain (VLLM_EAGLE3=0)"
            )


def default_of(spec: Any, name: str) -> Any:
    """The value of a field that nobody has set."""
    return type(spec).__pydantic_fields__[name].default


def _check_schedule(spec: Any, shape: str) -> None:
    schedule = getattr(spec, _SCHEDULE)
    if schedule is not None and shape != "chain":
        raise ValueError(
            f'speculative_config {_SCHEDULE}: got {schedule} with shape "{shape}", '
            'want shape "chain"; leave it out: shape "auto" follows the load by itself'
        )


def _check_length(spec: Any) -> None:
    """A head reads as far as its target, whatever its checkpoint was made for."""
    target = spec.target_model_config
    if spec.max_model_len is not None and spec.max_model_len < target.max_model_len:
        raise ValueError(
            f"speculative_config max_model_len: got {spec.max_model_len}, want the "
            f"target's {target.max_model_len}: heads draft to its end; leave it out, "
            "or lower the engine's own max_model_len"
        )
