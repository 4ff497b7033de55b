"""Hits in the prefix cache that end inside a block.

A head's KV entry of a token depends on the token behind it. So the entry of the last
cached token may be another request's, and vLLM drops the last block of a hit, which is
then computed once more. Only its last token needs that: here the request gets a copy of
the block (vLLM's copy-on-write of partial hits) and computes from that token on. So do
prompts that end with a block, all of which is computed again without drafts.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from vllm.v1.core.kv_cache_coordinator import UnitaryKVCacheCoordinator
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.request import Request


class PrefixHits:
    """Lengthens the hits of one scheduler.

    Args:
        scheduler: vLLM's. Hits stay vLLM's where blocks are not simply those of full
            attention, where a connector moves blocks, and where new blocks are zeroed,
            since a copy would be zeroed too.
    """

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self._manager = scheduler.kv_cache_manager
        coordinator = self._manager.coordinator
        managers = coordinator.single_type_managers
        self._is_on = (
            type(coordinator) is UnitaryKVCacheCoordinator
            and type(managers[0]) is FullAttentionManager
            and coordinator.dcp_world_size == coordinator.pcp_world_size == 1
            and scheduler.use_eagle_block_drop
            and scheduler.connector is None
            and not scheduler.needs_kv_cache_zeroing
        )

    def lengthen(
        self, request: Request, hit: KVCacheBlocks, num_tokens: int
    ) -> tuple[KVCacheBlocks, int]:
        """The hit up to the last token of the cached blocks.

        Args:
            hit: whole blocks, as found by vLLM.
            num_tokens: in them.
        """
        more = list(self._blocks_behind(request, num_tokens))
        if not more:
            return hit, num_tokens
        num_tokens += len(more) * self._manager.coordinator.block_size - 1
        blocks = self._manager.create_kv_cache_blocks(([*hit.blocks[0], *more],))
        return blocks, num_tokens

    def _blocks_behind(
        self, request: Request, num_tokens: int
    ) -> Iterator[KVCacheBlock]:
        """Cached blocks of the request after its first `num_tokens`."""
        if not self._is_on or not self._manager.prefix_cache_lookup_enabled(request):
            return
        coordinator = self._manager.coordinator
        size: int = coordinator.block_size
        for index in range(num_tokens // size, len(request.block_hashes)):
            found = coordinator.block_pool.get_cached_block(
                request.block_hashes[index], [0]
            )
            if found is None or self._is_filled_in_this_step(found[0], index):
                return
            yield found[0]

    def _is_filled_in_this_step(self, block: KVCacheBlock, index: int) -> bool:
        """Whether it is not filled yet when the step begins, with its copies."""
        coordinator = self._manager.coordinator
        tables = coordinator.single_type_managers[0].req_to_blocks
        end = (index + 1) * coordinator.block_size
        return any(
            request.num_computed_tokens < end
            and block in tables[request.request_id][index : index + 1]
            for request in self._scheduler.running
        )
