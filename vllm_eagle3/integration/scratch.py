"""Scratch blocks: the part of the KV cache that the block manager never sees."""

from __future__ import annotations

from dataclasses import replace

from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheTensor

from ..drafter import TreeShape
from ..tree_runs import blocks_per_branch

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


def add_blocks(config: KVCacheConfig, extra: int) -> KVCacheConfig:
    """The same cache with `extra` more blocks behind its own."""
    grown = config.num_blocks + extra
    return replace(
        config,
        num_blocks=grown,
        kv_cache_tensors=[
            _grow(tensor, config.num_blocks, grown)
            for tensor in config.kv_cache_tensors
        ],
    )


def _grow(tensor: KVCacheTensor, old: int, new: int) -> KVCacheTensor:
    """Scale what counts blocks: the size, and strides where layers lie apart."""
    scaled = replace(tensor, size=tensor.size // old * new)
    if tensor.layer_stride != tensor.block_stride * old:
        return scaled
    return replace(
        scaled,
        layer_stride=tensor.block_stride * new,
        offset=tensor.offset // old * new,
    )
