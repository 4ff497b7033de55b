"""Rows that the head still has to be run on.

While nothing is drafted the head has nothing to say, but when it drafts again its KV
cache must be as if it had been run on every token. A pass over one row costs almost
what one over thirty does, so the rows of steps without drafts wait here, those of
prompts too, and the head catches up in one pass:

    before it drafts again,
    before a request leaves the batch, while its blocks are still its own,
    and when no more rows have room.

A request that ends takes its rows with it where no other will read its blocks. So an
engine without a prefix cache pays nothing for the head while drafting does not pay.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from vllm.v1.attention.backend import CommonAttentionMetadata

from .proposer import Eagle3Proposer

# Of features. The head runs when the activations of the target's step are gone, so what
# an engine has set aside for those holds this and the copies of a pass.
MAX_BYTES = 2**28


@dataclass(frozen=True)
class _Step:
    """What one step leaves to the head.

    Attributes:
        spans: request -> its first row, and the one behind its last.
        token_ids: [rows], the tokens that followed.
        positions: [rows].
        features: [rows, taps * hidden], of the target.
    """

    spans: dict[str, tuple[int, int]]
    token_ids: torch.Tensor
    positions: torch.Tensor
    features: torch.Tensor


class HeadBacklog:
    """The waiting rows of one engine."""

    def __init__(self, drafter: Eagle3Proposer) -> None:
        self.drafter = drafter
        self._steps: list[_Step] = []
        self._waiting: dict[str, int] = {}  # rows of each request
        self._bytes = 0  # of all features, asked for in every step
        self._metadata: CommonAttentionMetadata | None = None

    @property
    def req_ids(self) -> set[str]:
        """Requests with waiting rows."""
        return set(self._waiting)

    @property
    def num_rows(self) -> int:
        """Rows that wait, of all requests."""
        return sum(self._waiting.values())

    @property
    def is_full(self) -> bool:
        """Whether the rows of one more step have no place."""
        return self._bytes >= MAX_BYTES

    def keep(
        self,
        req_ids: list[str],
        starts: np.ndarray,  # [num_reqs + 1], first row of each, and their number
        token_ids: torch.Tensor,  # [rows], the tokens that followed
        positions: torch.Tensor,  # [at least rows]
        aux_hidden_states: list[torch.Tensor],  # each [at least rows, hidden]
        metadata: CommonAttentionMetadata,
    ) -> None:
        """Take the rows of a step that judged no drafts."""
        rows, bounds = int(starts[-1]), starts.tolist()
        features = torch.cat([hidden[:rows] for hidden in aux_hidden_states], dim=-1)
        spans = dict(zip(req_ids, pairwise(bounds), strict=True))
        step = _Step(spans, token_ids.clone(), positions[:rows].clone(), features)
        self._steps.append(step)
        self._bytes += features.nbytes
        for req_id, (first, end) in spans.items():
            self._waiting[req_id] = self._waiting.get(req_id, 0) + end - first
        self._metadata = metadata

    def drop(self, req_ids: Iterable[str]) -> None:
        """Forget the rows of requests whose blocks nobody will read."""
        for req_id in self._waiting.keys() & set(req_ids):
            del self._waiting[req_id]
            for step in self._steps:
                step.spans.pop(req_id, None)
        self._steps = [step for step in self._steps if step.spans]
        self._bytes = sum(step.features.nbytes for step in self._steps)

    def catch_up(self, input_batch: Any) -> None:
        """Run the head on all waiting rows; their requests are still in the batch."""
        if not self._steps:
            return
        steps, self._steps, self._waiting, self._bytes = self._steps, [], {}, 0
        requests, index = _by_request(steps, input_batch.req_id_to_index)
        token_ids = torch.cat([step.token_ids for step in steps])
        positions = torch.cat([step.positions for step in steps])
        features = torch.cat([step.features for step in steps])
        for first in range(0, len(index), self.drafter.max_num_tokens):
            piece = slice(first, first + self.drafter.max_num_tokens)
            at = torch.from_numpy(index[piece]).to(self.drafter.device)
            metadata = self._rows_of(requests[piece], positions[at], input_batch)
            self.drafter.catch_up(token_ids[at], positions[at], features[at], metadata)

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
        row = torch.from_numpy(np.repeat(np.arange(len(places)), counts)).to(device)
        block_ids = block_table[row, positions.long() // drafter.block_size].long()
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


def _by_request(
    steps: list[_Step], place_of: dict[str, int]
) -> tuple[np.ndarray, np.ndarray]:
    """Waiting rows by request, oldest first: places in the batch, numbers of the rows.

    Rows are counted through all steps; both are [rows], and places rise.
    """
    behind = np.cumsum([0] + [len(step.token_ids) for step in steps])
    spans = [
        (place_of[req_id], offset + first, end - first)
        for step, offset in zip(steps, behind.tolist(), strict=False)
        for req_id, (first, end) in step.spans.items()
    ]
    spans.sort(key=lambda span: span[0])  # stable, so each request's stay in order
    places, firsts, counts = np.array(spans).T
    offsets = np.arange(counts.sum()) - np.repeat(counts.cumsum() - counts, counts)
    return np.repeat(places, counts), np.repeat(firsts, counts) + offsets
