"""Scratch blocks of trees: how many, taken from the memory of the KV cache."""

from __future__ import annotations

from .drafter import TreeShape
from .tree_runs import blocks_per_branch

# Branches of all trees of a step; beyond that the scheduler cuts trees to chains.
MAX_BRANCHES = 256


def scratch_branches(shape: TreeShape, max_num_seqs: int) -> int:
    """Branches that scratch blocks are reserved for.

    Verification needs one a branch; growth needs two a frontier row (a level reads
    the one before it), and grows as many trees at a time as fit.
    """
    wanted = max_num_seqs * max(shape.num_nodes - 1, 2 * shape.top_k)
    return min(wanted, MAX_BRANCHES)


def scratch_blocks(shape: TreeShape, max_num_seqs: int, block_size: int) -> int:
    """Blocks to reserve on top of the block manager's."""
    longest = shape.depth + 1
    return scratch_branches(shape, max_num_seqs) * blocks_per_branch(
        longest, block_size
    )


def require_room(available: int, scratch: int, longest: int) -> None:
    """Refuse trees that leave too little memory for the KV cache of one request.

    Args:
        available: bytes for the KV cache and the scratch blocks together.
        scratch: bytes of the scratch blocks.
        longest: bytes of the cache of a request of the model's full length.

    Raises:
        ValueError: trees are what makes the memory too small.
    """
    if available - scratch < longest <= available:
        raise ValueError(
            f"num_speculative_tokens: trees need {_mib(scratch)} MiB of scratch KV "
            f"blocks, which leaves {_mib(available - scratch)} of {_mib(available)} "
            f"MiB, and a request of max_model_len tokens needs {_mib(longest)}; lower "
            "num_speculative_tokens, depth, top_k, max_num_seqs or max_model_len, give "
            "the cache more memory (gpu_memory_utilization, on a CPU "
            'VLLM_CPU_KVCACHE_SPACE), or use "shape": "chain"'
        )


def _mib(num_bytes: int) -> int:
    return num_bytes >> 20
