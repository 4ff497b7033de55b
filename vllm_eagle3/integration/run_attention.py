"""Make a target's attention layers see trees as causal runs (see `tree_runs`).

Two calls of every attention backend are wrapped on the instances of one engine: the
metadata builder gets runs in place of requests, and the update of a layer's KV cache
writes the branches' rows to their scratch blocks too. No kernel is changed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from vllm.v1.attention.backend import CommonAttentionMetadata

from ..tree_runs import ScratchPlan, TreeBatch, plan_commit, plan_scratch
from .block_copies import BlockCopies


class RunAttention:
    """The attention of one engine's target; without a tree it is vLLM's own.

    Args:
        builders: metadata builders of the target's layers.
        layers: the target's attention layers.
        block_size: tokens per KV block.
        scratch: [num_branches, blocks_per_branch], block ids.
    """

    def __init__(
        self,
        builders: list[Any],
        layers: list[Any],
        block_size: int,
        scratch: np.ndarray,
        device: torch.device,
    ) -> None:
        self.blocks = BlockCopies([layer.kv_cache for layer in layers])
        self.block_size = block_size
        self.scratch = scratch
        self.device = device
        self.batch: TreeBatch | None = None
        self._plan: ScratchPlan | None = None
        self._table: np.ndarray | None = None
        # (slot mapping of a pass, rows and slots with those of the branches)
        self._writes: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
        for builder in builders:
            builder.build = self._build_runs(builder.build)
        for layer in layers:
            layer.impl.do_kv_cache_update = self._update_runs(
                layer.impl.do_kv_cache_update
            )

    def enter(self, batch: TreeBatch, block_table: np.ndarray) -> None:
        """The next forward pass sees these trees."""
        plan = plan_scratch(batch, block_table, self.block_size, self.scratch)
        self.batch, self._plan, self._table = batch, plan, block_table
        self._rows, self._slots = map(self._to_device, (plan.rows, plan.slots))
        self._writes = None
        # What the prefix left in its last block is there before the pass begins.
        self._copy(plan.copy_from, plan.copy_to)

    def leave(self) -> None:
        """The next forward pass is vLLM's own."""
        self.batch = self._plan = self._table = self._writes = None

    def commit(self, last_rows: dict[int, int]) -> None:
        """Move accepted paths to where a plain run has them.

        Args:
            last_rows: request -> row of its last accepted node, or of its root.
        """
        assert self.batch is not None
        assert self._plan is not None and self._table is not None
        source, target = plan_commit(
            self.batch, self._plan, self._table, self.block_size, last_rows
        )
        self._copy(source, target)

    def _copy(self, source: np.ndarray, target: np.ndarray) -> None:
        self.blocks.copy(self._to_device(source), self._to_device(target))

    def _build_runs(self, build: Callable[..., Any]) -> Callable[..., Any]:
        def build_runs(
            common_prefix_len: int,
            common_attn_metadata: CommonAttentionMetadata,
            fast_build: bool = False,
        ) -> Any:
            if self.batch is not None:
                common_attn_metadata = self._as_runs(common_attn_metadata)
            return build(common_prefix_len, common_attn_metadata, fast_build)

        return build_runs

    def _as_runs(self, metadata: CommonAttentionMetadata) -> CommonAttentionMetadata:
        batch, plan = self.batch, self._plan
        assert batch is not None and plan is not None
        starts = torch.from_numpy(batch.run_starts.astype(np.int32))
        lens = torch.from_numpy(batch.seq_lens.astype(np.int32))
        table, prefilling = metadata.block_table_tensor, metadata.is_prefilling
        if prefilling is not None:
            prefilling = prefilling[torch.from_numpy(batch.run_request)]
        return replace(
            metadata,
            is_prefilling=prefilling,
            _num_computed_tokens_cache=None,
            _token_to_req_indices_cache=None,
            query_start_loc=starts.to(self.device),
            query_start_loc_cpu=starts,
            seq_lens=lens.to(self.device),
            seq_lens_cpu_upper_bound=lens,
            num_reqs=len(lens),
            max_query_len=int(np.diff(batch.run_starts).max()),
            max_seq_len=int(lens.max()),
            block_table_tensor=self._to_device(plan.block_table).to(table.dtype),
        )

    def _update_runs(self, update: Callable[..., None]) -> Callable[..., None]:
        def update_runs(
            layer: Any,
            key: torch.Tensor,  # [num_rows, num_kv_heads, head_dim]
            value: torch.Tensor,
            kv_cache: torch.Tensor,  # [num_blocks, ...]
            slot_mapping: torch.Tensor,
        ) -> None:
            if self.batch is not None:
                rows, slot_mapping = self._with_branches(slot_mapping)
                key, value = key.index_select(0, rows), value.index_select(0, rows)
            update(layer, key, value, kv_cache, slot_mapping)

        return update_runs

    def _with_branches(
        self, slot_mapping: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(rows, slots) of all writes of a layer; laid out once for layers alike.

        A row that several branches share is written for each of them.
        """
        if self._writes is None or self._writes[0] is not slot_mapping:
            every = torch.arange(len(slot_mapping), device=self.device)
            rows = torch.cat([every, self._rows])
            slots = torch.cat([slot_mapping, self._slots.to(slot_mapping.dtype)])
            self._writes = slot_mapping, rows, slots
        return self._writes[1:]

    def _to_device(self, ids: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(ids, np.int64)).to(self.device)
