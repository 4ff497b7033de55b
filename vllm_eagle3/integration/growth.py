"""Where the rows of a growing draft go in the head's KV cache: two `Advance`s.

A chain grows into the slots behind the request's own tokens, which vLLM reserves. The
branches of a tree cannot all lie there, so each row of a level owns scratch blocks: a
copy of its parent's, and its own key and value behind. To attention every row is a
request of one token, and whole blocks are copied, so no kernel or layout is involved.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.spec_decode.utils import PADDING_SLOT_ID

from ..drafter import HeadOutput, TreeShape
from .block_copies import BlockCopies


class HeadRunner(Protocol):
    """What growth needs of the proposer."""

    arange: torch.Tensor
    device: torch.device
    block_size: int
    max_model_len: int

    def run_level(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        features: torch.Tensor,
        metadata: CommonAttentionMetadata,
        level: int,
    ) -> tuple[torch.Tensor, torch.Tensor]: ...


def single_rows(
    metadata: CommonAttentionMetadata, arange: torch.Tensor, num_rows: int
) -> CommonAttentionMetadata:
    """Metadata of `num_rows` requests of one row each."""
    starts = np.arange(num_rows + 1, dtype=np.int32)
    return replace(
        metadata,
        num_reqs=num_rows,
        num_actual_tokens=num_rows,
        max_query_len=1,
        query_start_loc=arange[: num_rows + 1],
        query_start_loc_cpu=torch.from_numpy(starts),
        is_prefilling=None,
        _num_computed_tokens_cache=None,
        _token_to_req_indices_cache=None,
    )


@dataclass(frozen=True)
class _Rows:
    """Where the rows of every level lie, worked out once for all of them.

    A level is a short pass, and each small operation beside it waits for a cold cache.

    Attributes:
        positions, seq_lens, slots: [levels, num_reqs, rows].
    """

    positions: torch.Tensor
    seq_lens: torch.Tensor
    slots: torch.Tensor

    @classmethod
    def of(cls, *tensors: torch.Tensor) -> _Rows:
        """Of tensors that broadcast; kernels read those of a level without strides."""
        return cls(*(each.contiguous() for each in torch.broadcast_tensors(*tensors)))


class ChainGrowth:
    """Chains: row after row behind each request's last confirmed token."""

    def __init__(
        self,
        proposer: HeadRunner,
        metadata: CommonAttentionMetadata,
        positions: torch.Tensor,  # [num_reqs], of the last confirmed tokens
        seq_lens: torch.Tensor,  # [num_reqs], with them
        depth: int,  # of the chain
    ) -> None:
        self.proposer = proposer
        self.positions = positions
        self.seq_lens = seq_lens
        self.metadata = metadata
        self.depth = depth

    def advance(
        self,
        level: int,
        token_ids: torch.Tensor,  # [num_reqs, 1]
        features: torch.Tensor,  # [num_reqs, 1, hidden]
        parent_row: torch.Tensor,
    ) -> HeadOutput:
        if level == 1:
            self._begin()
        rows, limit = self.rows, self.proposer.max_model_len
        metadata = replace(
            self.single,
            seq_lens=rows.seq_lens[level - 1, :, 0],
            max_seq_len=min(self.metadata.max_seq_len + level, limit),
            slot_mapping=rows.slots[level - 1, :, 0],
            seq_lens_cpu_upper_bound=self._upper_bound(level),
        )
        fed_back, logits = self.proposer.run_level(
            token_ids[:, 0],
            rows.positions[level - 1, :, 0],
            features[:, 0],
            metadata,
            level,
        )
        return HeadOutput(fed_back[:, None], logits[:, None])

    def _begin(self) -> None:
        self.single = single_rows(
            self.metadata, self.proposer.arange, len(self.positions)
        )
        steps = self.proposer.arange[1 : self.depth, None]
        positions = self.positions + steps  # [levels, num_reqs]
        inside = positions < self.proposer.max_model_len
        # A draft past the limit is never scheduled; its row only must do no harm.
        positions = torch.where(inside, positions, 0)
        seq_lens = torch.where(inside, self.seq_lens + steps, 1)
        block = (positions // self.proposer.block_size).long()
        block_ids = self.metadata.block_table_tensor.gather(1, block.T).T
        in_block = positions % self.proposer.block_size
        slots = block_ids * self.proposer.block_size + in_block
        self.rows = _Rows.of(
            positions[..., None],
            seq_lens.to(self.metadata.seq_lens.dtype)[..., None],
            torch.where(inside, slots, PADDING_SLOT_ID)[..., None],
        )

    def _upper_bound(self, level: int) -> torch.Tensor | None:
        bound = self.metadata.seq_lens_cpu_upper_bound
        return None if bound is None else bound + level


class TreeGrowth:
    """Trees: every row of a level in scratch blocks of its own.

    Args:
        layers: the head's attention layers.
        scratch: [num_branches, blocks_per_branch], block ids; two halves take turns.
    """

    def __init__(
        self,
        proposer: HeadRunner,
        layers: list[Any],
        block_size: int,
        scratch: np.ndarray,
    ) -> None:
        self.proposer = proposer
        self.blocks = BlockCopies([layer.kv_cache for layer in layers])
        self.block_size = block_size
        half = len(scratch) // 2
        ids = torch.from_numpy(scratch[: 2 * half]).to(proposer.device)
        self.halves = ids.view(2, half, -1)
        self.max_rows = half  # of a level, all trees together

    def begin(
        self,
        metadata: CommonAttentionMetadata,
        positions: torch.Tensor,  # [num_reqs], of the last confirmed tokens
        shape: TreeShape,
    ) -> None:
        """Start the trees of one proposal; no level has more rows than `top_k`."""
        self.metadata = metadata
        self.positions = positions
        self.shape = shape

    def advance(
        self,
        level: int,
        token_ids: torch.Tensor,  # [num_reqs, rows]
        features: torch.Tensor,  # [num_reqs, rows, hidden]
        parent_row: torch.Tensor,  # [num_reqs, rows]
    ) -> HeadOutput:
        if level == 1:
            self._begin()
        num_reqs, num_rows = token_ids.shape
        self._copy_blocks(level, parent_row)
        rows = self.rows
        fed_back, logits = self.proposer.run_level(
            token_ids.flatten(),
            rows.positions[level - 1, :, :num_rows].flatten(),
            features.flatten(0, 1),
            replace(
                self._single_rows(num_reqs * num_rows),
                seq_lens=rows.seq_lens[level - 1, :, :num_rows].flatten(),
                seq_lens_cpu_upper_bound=None,
                max_seq_len=self.metadata.max_seq_len + level,
                block_table_tensor=self.tables[level % 2, :, :num_rows].flatten(0, 1),
                slot_mapping=rows.slots[level - 1, :, :num_rows].flatten(),
            ),
            level,
        )
        shape = (num_reqs, num_rows, -1)
        return HeadOutput(fed_back.view(shape), logits.view(shape))

    def _begin(self) -> None:
        num_reqs, top_k, size = len(self.positions), self.shape.top_k, self.block_size
        self.first_block = (self.positions + 1) // size
        steps = self.proposer.arange[1 : self.shape.depth].long()
        positions = self.positions + steps[:, None]  # [levels, num_reqs]
        column = (positions // size - self.first_block)[..., None, None].long()
        # [2, num_reqs, top_k, width]: the blocks of each row, by turns
        self.own = self.halves[:, : num_reqs * top_k].view(2, num_reqs, top_k, -1)
        own = self.own[steps % 2]
        block_ids = own.gather(3, column.expand(-1, -1, top_k, -1))[..., 0]
        in_block = (positions % size)[..., None]
        lens = (positions + 1).to(self.metadata.seq_lens.dtype)
        # Rotary tables end at the model's length; so do drafts that matter.
        inside = positions.clamp(max=self.proposer.max_model_len - 1)
        self.rows = _Rows.of(
            inside[..., None], lens[..., None], block_ids * size + in_block
        )
        self._make_tables()
        self.single: CommonAttentionMetadata | None = None

    def _make_tables(self) -> None:
        """Block tables of the rows, [2, num_reqs, top_k, columns]."""
        _, num_reqs, top_k, width = self.own.shape
        # Drafts may leave the table's last block; columns behind it hold scratch.
        table = torch.nn.functional.pad(self.metadata.block_table_tensor, (0, width))
        self.root_block = table.gather(1, self.first_block[:, None].long())
        self.tables = table[None, :, None].repeat(2, 1, top_k, 1)
        columns = self.first_block[:, None] + self.proposer.arange[:width]
        self.tables.scatter_(
            3,
            columns[None, :, None].expand(2, num_reqs, top_k, width).long(),
            self.own.to(table.dtype),
        )

    def _single_rows(self, num_rows: int) -> CommonAttentionMetadata:
        if self.single is None or self.single.num_reqs != num_rows:
            self.single = single_rows(self.metadata, self.proposer.arange, num_rows)
        return self.single

    def _copy_blocks(self, level: int, parent_row: torch.Tensor) -> None:
        """Fill the blocks of each row with what its parent sees."""
        own = self.own[level % 2, :, : parent_row.shape[1]]
        if level == 1:
            source = self.root_block.expand_as(own[..., 0])
            self.blocks.copy(source.flatten(), own[..., 0].flatten())
            return
        parents = self.own[1 - level % 2].gather(
            1, parent_row[..., None].expand(-1, -1, own.shape[2])
        )
        self.blocks.copy(parents.flatten(), own.flatten())
