"""Engines that cannot hold trees, and why; they draft chains."""

from __future__ import annotations

from typing import Any


def why_no_trees(vllm_config: Any) -> str:
    """What keeps this engine from trees, as one clause; empty if nothing does.

    Args:
        vllm_config: vLLM's VllmConfig.
    """
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    obstacles = (
        (model.use_mla, "the target caches latent vectors (MLA), not keys and values"),
        (
            model.has_inner_state or model.is_hybrid,
            "the target has recurrent layers, whose state has no branches",
        ),
        (
            model.uses_mrope,
            "the target's positions have several dimensions (M-RoPE)",
        ),
        (
            vllm_config.kv_transfer_config is not None,
            "a KV connector moves blocks while branches are in them",
        ),
        (
            parallel.decode_context_parallel_size > 1
            or parallel.prefill_context_parallel_size > 1,
            "context parallelism splits a request's blocks between ranks",
        ),
        (parallel.use_ubatching, "overlapped half batches (DBO) share one tree plan"),
    )
    return next((why for present, why in obstacles if present), "")
