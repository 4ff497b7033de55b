"""Prepare an engine's configuration: our worker, our scheduler, the V1 runner.

Two methods of vLLM are wrapped here, both in every process:
`Platform.check_and_update_config`, the last word on an engine's configuration, and
`VllmConfig._get_v2_model_runner_unsupported_features`, which keeps engines of ours on
the V1 runner (V2 has no hook for drafters). `head_fit` wraps how a head's
configuration is read. Engines without `method="eagle3"` pass through untouched.
"""

from __future__ import annotations

import logging
from functools import cache
from typing import Any

from vllm.config import CUDAGraphMode, VllmConfig
from vllm.platforms import current_platform

from ..config import (
    AUTO_CHAIN,
    AUTO_CHAIN_WITHOUT_BUDGET,
    KEY,
    MAX_FALLBACK_CHAIN,
    Eagle3Options,
    read_options,
)
from ..drafter import TreeShape
from . import draft_sampling, head_fit, lifted, metrics, request_options
from .speculative_options import refuse_unfollowed
from .tree_support import why_no_trees

logger = logging.getLogger("vllm.vllm_eagle3")

WORKERS = {
    "vllm.v1.worker.cpu_worker.CPUWorker": (
        "vllm_eagle3.integration.worker.Eagle3CPUWorker"
    ),
    "vllm.v1.worker.gpu_worker.Worker": (
        "vllm_eagle3.integration.gpu_worker.Eagle3GPUWorker"
    ),
}

SCHEDULER = "vllm_eagle3.integration.scheduler.Eagle3Scheduler"
RAY_EXECUTOR = "vllm_eagle3.integration.ray_executor.RayExecutor"
# Scratch is reserved and copied in whole blocks, so blocks are small; vLLM's default
# on a CPU is 128 tokens.
TREE_BLOCK_SIZE = 32


def install(unsupported: str) -> None:
    """Wrap vLLM's configuration; call once per process.

    Args:
        unsupported: why this vLLM cannot be driven; engines then keep vLLM's chain.
    """
    platform = type(current_platform)
    checked = platform.check_and_update_config
    listed = VllmConfig._get_v2_model_runner_unsupported_features

    def check_and_update_config(cls: Any, vllm_config: VllmConfig) -> None:
        checked(vllm_config)
        if _uses_eagle3(vllm_config):
            prepare(vllm_config, unsupported)
        elif KEY in (vllm_config.additional_config or {}):
            read_options(vllm_config.additional_config)
            logger.warning(
                'additional_config["%s"] has no effect: the engine has no '
                'speculative_config with method "eagle3"',
                KEY,
            )

    def unsupported_features(self: VllmConfig) -> list[str]:
        features = listed(self)
        if (
            _uses_eagle3(self)
            and not unsupported
            and not head_fit.foreign_reason(self.speculative_config)
        ):
            features.append("vllm_eagle3 drafting")
        return features

    platform.check_and_update_config = classmethod(check_and_update_config)
    VllmConfig._get_v2_model_runner_unsupported_features = unsupported_features
    head_fit.install()
    draft_sampling.install()
    request_options.install()
    metrics.install()


def prepare(vllm_config: VllmConfig, unsupported: str) -> None:
    """Make one engine ours, or leave it vLLM's chain and say why; idempotent.

    Raises:
        ValueError: bad options, or options that this engine cannot follow.
    """
    if vllm_config.parallel_config.worker_cls in WORKERS.values():
        return  # a copy of a prepared configuration
    _refuse_stock_ray_on_cpu(vllm_config.parallel_config)
    spec = vllm_config.speculative_config
    options = read_options(vllm_config.additional_config)
    reason = unsupported or _unsupported_engine(vllm_config)
    if reason:
        _fall_back(spec, reason)
        return
    _refuse_pictures(vllm_config.model_config)
    refuse_unfollowed(spec, options.shape)
    shape = options.tree_shape(spec.num_speculative_tokens)
    if options.shape == "auto":
        shape = _prepare_auto(vllm_config, options)
    elif shape is not None and shape.top_k > 1:
        if obstacle := why_no_trees(vllm_config):
            shape = _chain_instead(vllm_config, obstacle)
        else:
            _prepare_for_trees(vllm_config, shape)
    if shape is not None and _may_schedule(vllm_config):
        vllm_config.scheduler_config.scheduler_cls = SCHEDULER
    if shape is not None:
        spec.num_speculative_tokens = shape.num_nodes
    scheduler = vllm_config.scheduler_config.scheduler_cls
    request_options.mark(spec, scheduler == SCHEDULER)
    _keep_head_asleep(vllm_config.model_config)
    lifted.mark(spec)
    worker = vllm_config.parallel_config.worker_cls
    vllm_config.parallel_config.worker_cls = WORKERS[worker]
    logger.info(
        "vllm_eagle3 drives this engine: shape %s means %s, V1 model runner",
        options.shape,
        ("up to " if options.shape == "auto" else "") + _describe(shape),
    )


def _refuse_stock_ray_on_cpu(parallel_config: Any) -> None:
    """vLLM would refuse it too: late, and without a remedy."""
    backend = parallel_config.distributed_executor_backend
    if backend == "ray" and current_platform.is_cpu():
        raise ValueError(
            'distributed_executor_backend: got "ray" on a CPU, where vLLM has none; '
            f"want {RAY_EXECUTOR}"
        )


def _may_schedule(vllm_config: VllmConfig) -> bool:
    """Whether our scheduler may stand in for vLLM's plain one, as it is."""
    scheduler = vllm_config.scheduler_config
    return scheduler.scheduler_cls is None and not scheduler.async_scheduling


def _prepare_auto(vllm_config: VllmConfig, options: Eagle3Options) -> TreeShape:
    """Let a budget choose, between what this engine can hold; the largest shape."""
    spec, scheduler = vllm_config.speculative_config, vllm_config.scheduler_config
    if scheduler.scheduler_cls not in (None, SCHEDULER):
        return _always_chain(vllm_config, "the budget needs vLLM's own scheduler")
    if vllm_config.parallel_config.data_parallel_size > 1:
        return _always_chain(
            vllm_config, "ranks of data parallelism must draft equally much"
        )
    shape = options.tree_shape(spec.num_speculative_tokens)
    assert shape is not None
    if shape.top_k > 1 and (
        why_no_trees(vllm_config) or shape.top_k >= scheduler.max_num_batched_tokens
    ):
        chains_only = {"shape": "auto", "top_k": 1, "record": options.record}
        _rewrite_options(vllm_config, chains_only)
        shape = TreeShape.chain(min(AUTO_CHAIN, shape.num_nodes))
    if shape.top_k > 1:
        _prepare_for_trees(vllm_config, shape)
    else:
        _take_scheduler(vllm_config)
    return shape


def _always_chain(vllm_config: VllmConfig, obstacle: str) -> TreeShape:
    budget = vllm_config.speculative_config.num_speculative_tokens
    shape = TreeShape.chain(min(budget, AUTO_CHAIN_WITHOUT_BUDGET))
    _rewrite_options(vllm_config, {"shape": "chain"})
    _warn_once(
        f"vllm_eagle3 drafts chains of {shape.num_nodes} in this engine, whatever they "
        f"bring: {obstacle}"
    )
    return shape


def _take_scheduler(vllm_config: VllmConfig) -> None:
    """Our scheduler, which has to see the drafts of a step before the next one."""
    scheduler = vllm_config.scheduler_config
    scheduler.scheduler_cls = SCHEDULER
    scheduler.async_scheduling = False
    # A graph of a whole step is for one number of drafts.
    compilation = vllm_config.compilation_config
    if compilation.cudagraph_mode.has_full_cudagraphs():
        compilation.cudagraph_mode = CUDAGraphMode.PIECEWISE


def _rewrite_options(vllm_config: VllmConfig, options: dict[str, Any]) -> None:
    """Every process reads the options again; what is not about shapes stays."""
    given = read_options(vllm_config.additional_config)
    options = {"check_ranks": given.check_ranks, **options}
    vllm_config.additional_config = {**vllm_config.additional_config, KEY: options}


def _prepare_for_trees(vllm_config: VllmConfig, shape: TreeShape) -> None:
    scheduler = vllm_config.scheduler_config
    if scheduler.scheduler_cls not in (None, SCHEDULER):
        raise ValueError(
            f'shape: got "tree" with scheduler_cls {scheduler.scheduler_cls}, want '
            'vLLM\'s own scheduler; use "shape": "chain"'
        )
    if shape.top_k >= scheduler.max_num_batched_tokens:
        raise ValueError(
            f"top_k: got {shape.top_k} with max_num_batched_tokens "
            f"{scheduler.max_num_batched_tokens}, want fewer children a node than "
            "tokens a step; lower one or raise the other"
        )
    cache = vllm_config.cache_config
    if current_platform.is_cpu() and not cache.user_specified_block_size:
        cache.block_size = TREE_BLOCK_SIZE
    _take_scheduler(vllm_config)
    # Branches are copied in one table of blocks, so layers with a window keep all of
    # theirs; vLLM's other layout has a table for each kind of layer.
    if scheduler.disable_hybrid_kv_cache_manager is None:
        scheduler.disable_hybrid_kv_cache_manager = True


def _keep_head_asleep(model_config: Any) -> None:
    """Level 2 of sleep drops all weights; nobody else brings the head's back."""
    kept = model_config.sleep_preserve_parameter_names
    if model_config.enable_sleep_mode and "draft.*" not in kept:
        model_config.sleep_preserve_parameter_names = [*kept, "draft.*"]


def _chain_instead(vllm_config: VllmConfig, obstacle: str) -> TreeShape:
    budget = vllm_config.speculative_config.num_speculative_tokens
    shape = TreeShape.chain(min(budget, MAX_FALLBACK_CHAIN))
    _rewrite_options(vllm_config, {"shape": "chain"})
    _warn_once(
        f"vllm_eagle3 drafts chains of {shape.num_nodes} in this engine, not trees: "
        f"{obstacle}"
    )
    return shape


def _describe(shape: TreeShape | None) -> str:
    if shape is None:
        return "no drafts"
    if shape.top_k == 1:
        return f"a chain of {shape.num_nodes}"
    return (
        f"trees of {shape.num_nodes} nodes, {shape.top_k} children a node, "
        f"{shape.depth} levels"
    )


def _uses_eagle3(vllm_config: VllmConfig) -> bool:
    spec = vllm_config.speculative_config
    return spec is not None and spec.method == "eagle3"


def _unsupported_engine(vllm_config: VllmConfig) -> str:
    """Why our runner cannot drive this engine, or nothing."""
    worker = vllm_config.parallel_config.worker_cls
    if foreign := head_fit.foreign_reason(vllm_config.speculative_config):
        return f"the head is of another kind ({foreign})"
    if worker not in WORKERS:
        return f"worker_cls is {worker}, not vLLM's own"
    if vllm_config.parallel_config.pipeline_parallel_size > 1:
        return "pipeline parallelism leaves the taps of early stages behind"
    if vllm_config.speculative_config.parallel_drafting:
        return "the head drafts in parallel (P-EAGLE)"
    return ""


def _refuse_pictures(model_config: Any) -> None:
    """Nobody has seen a target draft right that reads more than text."""
    if model_config.is_multimodal_model:
        raise ValueError(
            f"model: got {model_config.model}, which reads more than text, with "
            'speculative_config method "eagle3"; want a target of text alone; leave '
            "speculative_config out, or use vLLM's own chain (VLLM_EAGLE3=0)"
        )


def _fall_back(spec: Any, reason: str) -> None:
    length = min(spec.num_speculative_tokens, MAX_FALLBACK_CHAIN)
    _warn_once(
        f"vllm_eagle3 leaves this engine to vLLM's own chain of {length}: {reason}"
    )
    spec.num_speculative_tokens = length


@cache
def _warn_once(message: str) -> None:
    # vLLM copies its configuration, which checks it again.
    logger.warning(message)
