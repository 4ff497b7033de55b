"""Where the rows of a growing draft go in the head's KV cache: two `Advance`s.

A chain grows into the slots behind the request's own tokens, which vLLM reserves. The
branches of a tree cannot all lie there, so each row of a level owns scratch blocks: a
copy of its parent's, and its own key and value behind. To attention every row is a
request of one token, and whole blocks are copied, so no kernel or layout is involved.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import torch
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.spec_decode.utils import PADDING_SLOT_ID

from ..drafter import HeadOutput
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


class ChainGrowth:
    """Chains: row after row behind each request's last confirmed token."""

    def __init__(
        self,
        proposer: HeadRunner,
        metadata: CommonAttentionMetadata,
        positions: torch.Tensor,  # [num_reqs], of the last confirmed tokens
        seq_lens: torch.Tensor,  # [num_reqs], with them
    ) -> None:
        self.proposer = proposer
        self.positions = positions
        self.seq_lens = seq_lens
        self.metadata = single_rows(metadata, proposer.arange, positions.shape[0])

    def advance(
        self,
        level: int,
        token_ids: torch.Tensor,  # [num_reqs, 1]
        features: torch.Tensor,  # [num_reqs, 1, hidden]
        lineage: torch.Tensor,
    ) -> HeadOutput:
        proposer, limit = self.proposer, self.proposer.max_model_len
        positions = self.positions + level
        inside = positions < limit
        # A draft past the limit is never scheduled; its row only must do no harm.
        positions = torch.where(inside, positions, 0)
        seq_lens = torch.where(inside, self.seq_lens + level, 1)
        block = positions // proposer.block_size
        block_ids = self.metadata.block_table_tensor.gather(1, block[:, None].long())
        slots = block_ids[:, 0] * proposer.block_size + positions % proposer.block_size
        metadata = replace(
            self.metadata,
            seq_lens=seq_lens.to(self.metadata.seq_lens.dtype),
            max_seq_len=min(self.metadata.max_seq_len + level, limit),
            slot_mapping=torch.where(inside, slots, PADDING_SLOT_ID),
            seq_lens_cpu_upper_bound=self._upper_bound(level),
        )
        fed_back, logits = proposer.run_level(
            token_ids[:, 0], positions, features[:, 0], metadata, level
        )
        return HeadOutput(fed_back[:, None], logits[:, None])

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
        ids = torch.from_numpy(scratch).to(proposer.device)
        self.halves = ids[:half], ids[half : 2 * half]
        self.max_rows = half  # of a level, all trees together
        self.last_level = self.halves[0]  # blocks of the rows of the level before

    def begin(
        self,
        metadata: CommonAttentionMetadata,
        positions: torch.Tensor,  # [num_reqs], of the last confirmed tokens
    ) -> None:
        """Start the trees of one proposal."""
        self.metadata = metadata
        self.positions = positions
        self.first_block = (positions + 1) // self.block_size
        # Drafts may leave the table's last block; columns behind it hold scratch.
        width = self.halves[0].shape[1]
        self.table = torch.nn.functional.pad(metadata.block_table_tensor, (0, width))

    def advance(
        self,
        level: int,
        token_ids: torch.Tensor,  # [num_reqs, rows]
        features: torch.Tensor,  # [num_reqs, rows, hidden]
        lineage: torch.Tensor,  # [num_reqs, rows, level]
    ) -> HeadOutput:
        num_reqs, rows = token_ids.shape
        blocks = self._own_blocks(level, lineage)  # [num_reqs, rows, width]
        positions = (self.positions + level)[:, None].expand(num_reqs, rows)
        offset = positions // self.block_size - self.first_block[:, None]
        own = blocks.gather(2, offset[..., None])[..., 0]
        slots = own * self.block_size + positions % self.block_size
        table = self.table[:, None].repeat(1, rows, 1)
        width = torch.arange(blocks.shape[2], device=blocks.device)
        columns = self.first_block[:, None] + width
        columns = columns[:, None].expand_as(blocks)
        table.scatter_(2, columns, blocks.to(table.dtype))
        lens = (positions + 1).flatten()
        metadata = single_rows(self.metadata, self.proposer.arange, num_reqs * rows)
        fed_back, logits = self.proposer.run_level(
            token_ids.flatten(),
            # Rotary tables end at the model's length; so do drafts that matter.
            positions.flatten().clamp(max=self.proposer.max_model_len - 1),
            features.flatten(0, 1),
            replace(
                metadata,
                seq_lens=lens.to(metadata.seq_lens.dtype),
                seq_lens_cpu_upper_bound=None,
                max_seq_len=self.metadata.max_seq_len + level,
                block_table_tensor=table.flatten(0, 1),
                slot_mapping=slots.flatten(),
            ),
            level,
        )
        shape = (num_reqs, rows, -1)
        return HeadOutput(fed_back.view(shape), logits.view(shape))

    def _own_blocks(self, level: int, lineage: torch.Tensor) -> torch.Tensor:
        """Give each row its blocks, filled with what its parent sees."""
        num_reqs, rows, _ = lineage.shape
        own = self.halves[level % 2][: num_reqs * rows].view(num_reqs, rows, -1)
        if level == 1:
            columns = self.first_block[:, None].long()
            source = self.table.gather(1, columns).long().expand(num_reqs, rows)
            self.blocks.copy(source.flatten(), own[..., 0].flatten())
        else:
            reqs = torch.arange(num_reqs, device=lineage.device)[:, None]
            parents = self.last_level[reqs, lineage[..., -2]]
            self.blocks.copy(parents.flatten(), own.flatten())
        self.last_level = own
        return own
