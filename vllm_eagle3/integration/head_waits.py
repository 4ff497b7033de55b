"""Engines whose head may catch up later with rows that it was not run on."""

from __future__ import annotations

from typing import Any


def head_may_wait(vllm_config: Any) -> bool:
    """Whether nobody looks at the head's KV cache before the head does.

    Args:
        vllm_config: vLLM's VllmConfig. A KV connector sends blocks off as soon as they
            are full; M-RoPE positions of waiting rows are not kept; context parallelism
            splits a request's slots between ranks.
    """
    parallel = vllm_config.parallel_config
    return (
        vllm_config.kv_transfer_config is None
        and not vllm_config.model_config.uses_mrope
        and parallel.decode_context_parallel_size == 1
        and parallel.prefill_context_parallel_size == 1
    )
