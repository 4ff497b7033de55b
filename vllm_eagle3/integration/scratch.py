"""Scratch blocks: the part of the KV cache that the block manager never sees."""

from __future__ import annotations

from dataclasses import replace

from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheTensor


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
