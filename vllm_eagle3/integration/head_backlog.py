"""Rows that the head still has to be run on.

While nothing is drafted the head has nothing to say, but its KV cache must be as if it
had been run on every token: drafting goes on from there, and so do other requests that
find the blocks in the prefix cache. A pass over one row costs almost what one over
thirty does, so the rows of plain steps wait here and the head catches up in one pass:

    before it drafts or prefills again,
    before a request leaves the batch, while its blocks are still its own,
    and after `MAX_STEPS` steps.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from vllm.v1.attention.backend import CommonAttentionMetadata

from .proposer import Eagle3Proposer

MAX_STEPS = 32


@dataclass(frozen=True)
class _PlainStep:
    """One row for each request of a step.

    Attributes:
        req_ids: one a row.
        token_ids: [num_reqs], the tokens that followed.
        positions: [num_reqs].
        features: [num_reqs, taps * hidden], of the target.
    """

    req_ids: list[str]
    token_ids: torch.Tensor
    positions: torch.Tensor
    features: torch.Tensor


class HeadBacklog:
    """The waiting rows of one engine."""

    def __init__(self, drafter: Eagle3Proposer) -> None:
        self.drafter = drafter
        self._steps: list[_PlainStep] = []
        self._metadata: CommonAttentionMetadata | None = None

    @property
    def req_ids(self) -> set[str]:
        """Requests with waiting rows."""
        return {req_id for step in self._steps for req_id in step.req_ids}

    @property
    def is_full(self) -> bool:
        """Whether the rows of one more step have no place."""
        widest = max((len(step.req_ids) for step in self._steps), default=0)
        rows = (len(self._steps) + 1) * widest
        return len(self._steps) >= MAX_STEPS or rows > self.drafter.max_num_tokens

    def keep(
        self,
        req_ids: list[str],
        token_ids: torch.Tensor,  # [num_reqs], sampled in this step
        positions: torch.Tensor,  # [num_reqs]
        aux_hidden_states: list[torch.Tensor],  # each [rows, hidden]
        metadata: CommonAttentionMetadata,
    ) -> None:
        """Take the rows of a step that had one for each request."""
        rows = len(req_ids)
        features = torch.cat([hidden[:rows] for hidden in aux_hidden_states], dim=-1)
        step = _PlainStep(
            list(req_ids), token_ids.clone(), positions[:rows].clone(), features
        )
        self._steps.append(step)
        self._metadata = metadata

    def catch_up(self, input_batch: Any) -> None:
        """Run the head on all waiting rows; their requests are still in the batch."""
        if not self._steps:
            return
        steps, self._steps = self._steps, []
        req_ids = [req_id for step in steps for req_id in step.req_ids]
        requests = np.array([input_batch.req_id_to_index[r] for r in req_ids])
        order = np.argsort(requests, kind="stable")  # by request, oldest first
        index = torch.from_numpy(order).to(self.drafter.device)
        positions = torch.cat([step.positions for step in steps])[index]
        self.drafter.catch_up(
            torch.cat([step.token_ids for step in steps])[index],
            positions,
            torch.cat([step.features for step in steps])[index],
            self._rows_of(requests[order], positions, input_batch),
        )

    def _rows_of(
        self,
        requests: np.ndarray,  # [rows], place in the batch, rising
        positions: torch.Tensor,  # [rows]
        input_batch: Any,
    ) -> CommonAttentionMetadata:
        """Metadata of a pass over these rows."""
        assert self._metadata is not None
        drafter, device = self.drafter, self.drafter.device
        places, first, counts = np.unique(
            requests, return_index=True, return_counts=True
        )
        starts = torch.from_numpy(np.append(first, len(requests)).astype(np.int32))
        table = input_batch.block_table[drafter.kv_cache_gid].block_table.np[places]
        block_table = torch.from_numpy(table).to(device)
        last = torch.from_numpy(first + counts - 1).to(device)
        seq_lens = (positions[last] + 1).to(self._metadata.seq_lens.dtype)
        row_table = block_table.repeat_interleave(
            torch.from_numpy(counts).to(device), dim=0
        )
        block = (positions // drafter.block_size)[:, None].long()
        block_ids = row_table.gather(1, block)[:, 0].long()
        return replace(
            self._metadata,
            num_reqs=len(places),
            num_actual_tokens=len(requests),
            max_query_len=int(counts.max()),
            max_seq_len=int(seq_lens.max()),
            query_start_loc=starts.to(device),
            query_start_loc_cpu=starts,
            seq_lens=seq_lens,
            seq_lens_cpu_upper_bound=seq_lens.cpu(),
            block_table_tensor=block_table,
            slot_mapping=block_ids * drafter.block_size
            + positions % drafter.block_size,
            is_prefilling=None,
            positions=None,
            _num_computed_tokens_cache=None,
            _token_to_req_indices_cache=None,
        )
