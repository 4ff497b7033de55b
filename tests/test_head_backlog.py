"""Rows that wait for the head: kept, dropped, and run request by request."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.v1.attention.backend import CommonAttentionMetadata

from vllm_eagle3.integration import head_backlog
from vllm_eagle3.integration.head_backlog import HeadBacklog

BLOCK, HIDDEN = 4, 2
METADATA = CommonAttentionMetadata(
    query_start_loc=torch.zeros(1, dtype=torch.int32),
    query_start_loc_cpu=torch.zeros(1, dtype=torch.int32),
    seq_lens=torch.zeros(1, dtype=torch.int32),
    num_reqs=0,
    num_actual_tokens=0,
    max_query_len=0,
    max_seq_len=0,
    block_table_tensor=torch.zeros(1, 1, dtype=torch.int32),
    slot_mapping=torch.zeros(1, dtype=torch.int64),
)


class Head:
    """Remembers the passes that it is asked for."""

    device = torch.device("cpu")
    kv_cache_gid, block_size = 0, BLOCK

    def __init__(self, max_num_tokens: int = 100) -> None:
        self.max_num_tokens = max_num_tokens
        self.passes: list[tuple[list[Any], ...]] = []
        self.metadata: list[CommonAttentionMetadata] = []

    def catch_up(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        features: torch.Tensor,
        metadata: CommonAttentionMetadata,
    ) -> None:
        self.passes.append((token_ids.tolist(), positions.tolist(), features.tolist()))
        self.metadata.append(metadata)


def batch_of(*req_ids: str) -> Any:
    """A batch whose n-th request has the blocks 10 n, 10 n + 1, ..."""
    table = 10 * np.arange(len(req_ids))[:, None] + np.arange(10)
    block_table = SimpleNamespace(block_table=SimpleNamespace(np=table.astype("int32")))
    places = {req_id: place for place, req_id in enumerate(req_ids)}
    return SimpleNamespace(req_id_to_index=places, block_table=[block_table])


def keep(backlog: HeadBacklog, **rows: tuple[int, int]) -> None:
    """A step with rows of each request, from one position to before another."""
    counts = [end - first for first, end in rows.values()]
    positions = torch.cat([torch.arange(*span) for span in rows.values()])
    # The token behind position p of the request "c" is 300 + p.
    of = torch.tensor([ord(r) - ord("a") + 1 for r in rows]).repeat_interleave(
        torch.tensor(counts)
    )
    token_ids = 100 * of + positions
    taps = [torch.stack([token_ids, of], dim=-1).float()] * 3
    starts = np.cumsum([0, *counts])
    backlog.keep(list(rows), starts, token_ids, positions, taps, METADATA)


def test_rows_are_run_request_by_request_oldest_first() -> None:
    head = Head()
    backlog = HeadBacklog(head)
    keep(backlog, b=(0, 6), a=(9, 10))
    keep(backlog, a=(10, 11), b=(6, 7), c=(0, 2))
    assert (backlog.num_rows, backlog.req_ids) == (11, {"a", "b", "c"})
    backlog.catch_up(batch_of("c", "a", "b"))
    ((token_ids, positions, features),) = head.passes
    assert positions == [0, 1, 9, 10, 0, 1, 2, 3, 4, 5, 6]
    assert token_ids == [300, 301, 109, 110, *range(200, 207)]
    assert [row[:HIDDEN] for row in features] == [[t, t // 100] for t in token_ids]
    (metadata,) = head.metadata
    assert metadata.query_start_loc.tolist() == [0, 2, 4, 11]
    assert metadata.seq_lens.tolist() == [2, 11, 7]
    assert (metadata.max_query_len, metadata.max_seq_len) == (7, 11)
    # Position 9 of "a", second in the batch, lies in its block 12 at offset 1.
    assert metadata.slot_mapping.tolist()[2:5] == [4 * 12 + 1, 4 * 12 + 2, 4 * 20]
    assert (backlog.num_rows, backlog.req_ids) == (0, set())


def test_dropped_rows_are_never_run() -> None:
    head = Head()
    backlog = HeadBacklog(head)
    keep(backlog, a=(0, 5), b=(0, 3))
    keep(backlog, b=(3, 4))
    backlog.drop({"b", "stranger"})
    assert (backlog.num_rows, backlog.req_ids) == (5, {"a"})
    # It was preempted, say, and comes back from its beginning.
    keep(backlog, b=(0, 1))
    backlog.catch_up(batch_of("a", "b"))
    ((_, positions, _),) = head.passes
    assert positions == [0, 1, 2, 3, 4, 0]


def test_nothing_is_run_where_all_was_dropped() -> None:
    head = Head()
    backlog = HeadBacklog(head)
    keep(backlog, a=(0, 5))
    backlog.drop({"a"})
    backlog.catch_up(batch_of())
    assert head.passes == []


def test_more_rows_than_a_pass_holds_are_run_in_pieces() -> None:
    head = Head(max_num_tokens=4)
    backlog = HeadBacklog(head)
    keep(backlog, a=(0, 6), b=(0, 3))
    backlog.catch_up(batch_of("a", "b"))
    assert [positions for _, positions, _ in head.passes] == [
        [0, 1, 2, 3],
        [4, 5, 0, 1],
        [2],
    ]
    assert [m.query_start_loc.tolist() for m in head.metadata] == [
        [0, 4],
        [0, 2, 4],
        [0, 1],
    ]
    # A request that is cut goes on behind its first piece.
    assert [m.seq_lens.tolist() for m in head.metadata] == [[4], [6, 2], [3]]


def test_it_is_full_by_the_bytes_of_features(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head_backlog, "MAX_BYTES", 5 * 3 * HIDDEN * 4)
    backlog = HeadBacklog(Head())
    keep(backlog, a=(0, 2), b=(0, 2))
    assert not backlog.is_full
    keep(backlog, a=(2, 3))
    assert backlog.is_full
    backlog.drop({"a", "b"})
    assert not backlog.is_full
