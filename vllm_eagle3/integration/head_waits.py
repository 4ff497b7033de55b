"""Engines whose head may catch up later with rows that it was not run on."""

from __future__ import annotations

from typing import Any


def head_may_wait(vllm_config: Any) -> bool:
    """Whether nobody looks at the head's KV cache before the head does.

    Args:
        vllm_config: vLLM's VllmConfig. A KV connector sends blocks off as soon as they
            are full; M-RoPE positions of waiting rows are not kept.
    """
    model = vllm_config.model_config
    return vllm_config.kv_transfer_config is None and not model.uses_mrope
