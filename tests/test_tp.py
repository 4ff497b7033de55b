"""Ranks follow one verdict, a check names the odd one, bad shards are refused."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

from vllm.v1.outputs import SamplerOutput

from vllm_eagle3.integration.head_sharding import check_sharding
from vllm_eagle3.integration.ranks import Ranks
from vllm_eagle3.verify import Verdict


class Threads:
    """Ranks as threads of one process that send each other values."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.values: list[Any] = [None] * size
        self.barrier = threading.Barrier(size, timeout=30)

    def exchange(self, rank: int, value: Any) -> list[Any]:
        self.values[rank] = value
        self.barrier.wait()
        values = list(self.values)
        self.barrier.wait()
        return values


class ThreadGroup:
    def __init__(self, threads: Threads, rank: int) -> None:
        self.threads, self.rank_in_group = threads, rank
        self.world_size = threads.size

    def broadcast(self, input_: torch.Tensor, src: int = 0) -> torch.Tensor:
        sent = self.threads.exchange(self.rank_in_group, input_)[src]
        assert sent.shape == input_.shape and sent.dtype == input_.dtype
        return input_.copy_(sent)


def on_ranks(size: int, act: Callable[[Ranks, int], Any], checks: bool = False) -> list:
    """What every rank returns or raises."""
    threads = Threads(size)

    def gather(group: Any, digest: str) -> list[str]:
        return group.threads.exchange(group.rank_in_group, digest)

    def run(rank: int) -> Any:
        try:
            return act(Ranks(ThreadGroup(threads, rank), checks, gather), rank)
        except RuntimeError as error:
            return error

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))


# Two requests with trees of three nodes; the ranks walked differently far.
VERDICTS = [
    Verdict(torch.tensor([[7, 8, 9], [4, -1, -1]]), torch.tensor([[0, 2], [-1, -1]])),
    Verdict(torch.tensor([[7], [5]]), torch.empty(2, 0, dtype=torch.int64)),
]


@pytest.mark.parametrize("first", [0, 1])
def test_the_verdict_is_the_first_rank_s(first: int) -> None:
    own = [VERDICTS[first], VERDICTS[1 - first], VERDICTS[1 - first]]
    settled = on_ranks(3, lambda ranks, rank: ranks.settle(own[rank], num_nodes=3))
    for verdict in settled:
        assert torch.equal(verdict.token_ids, own[0].token_ids)
        assert torch.equal(verdict.nodes, own[0].nodes)


def test_tokens_of_a_step_without_drafts_are_the_first_rank_s() -> None:
    def act(ranks: Ranks, rank: int) -> list[list[int]]:
        tokens = torch.tensor([[rank], [10 + rank]], dtype=torch.int32)
        return ranks.settle_tokens(SamplerOutput(tokens, None)).sampled_token_ids

    assert [t.tolist() for t in on_ranks(2, act)] == [[[0], [10]]] * 2


def test_one_rank_keeps_its_own_and_sends_nothing() -> None:
    (verdict,) = on_ranks(1, lambda ranks, _: ranks.settle(VERDICTS[0], 3), checks=True)
    assert verdict is VERDICTS[0]


@pytest.mark.parametrize("odd", [1, 2])
def test_check_names_the_rank_that_differs(odd: int) -> None:
    def act(ranks: Ranks, rank: int) -> None:
        tree = torch.tensor([[1, 2, 3 if rank == odd else 0]])
        ranks.compare("trees", torch.zeros(2), tree)

    errors = on_ranks(3, act, checks=True)
    assert all(f"trees of rank {odd} differs" in str(error) for error in errors)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.zeros(2, 3), torch.zeros(3, 2)),
        (torch.tensor([1.0]), torch.tensor([1.0 + 1e-7])),
    ],
    ids=["shape", "last bit"],
)
def test_check_sees_shapes_and_every_bit(
    one: torch.Tensor, other: torch.Tensor
) -> None:
    values = [one, other]
    errors = on_ranks(2, lambda ranks, r: ranks.compare("q", values[r]), checks=True)
    assert all(isinstance(error, RuntimeError) for error in errors)


def test_check_is_silent_when_equal_or_not_asked_for() -> None:
    assert on_ranks(2, lambda r, _: r.compare("q", torch.ones(3)), checks=True) == [
        None,
        None,
    ]
    assert on_ranks(2, lambda r, i: r.compare("q", torch.tensor(i))) == [None, None]


HEAD = {"num_attention_heads": 8, "num_key_value_heads": 2, "intermediate_size": 96}


@pytest.mark.parametrize(
    ("changes", "draft_size", "target_size"),
    [({}, None, 2), ({}, 1, 16), ({}, 4, 4), ({"num_attention_heads": 9}, 1, 2)],
)
def test_heads_that_fit_their_ranks(
    changes: dict[str, int], draft_size: int | None, target_size: int
) -> None:
    check_sharding(HEAD | changes, draft_size, target_size)


@pytest.mark.parametrize(
    ("changes", "draft_size", "message"),
    [
        ({}, 3, "draft_tensor_parallel_size: got 3 with tensor_parallel_size 2, want"),
        ({"num_attention_heads": 9}, None, "num_attention_heads: the head has 9"),
        ({"num_key_value_heads": 3}, 2, "num_key_value_heads: the head has 3"),
        ({"intermediate_size": 95}, 2, "intermediate_size: the head has 95"),
    ],
)
def test_bad_shards_are_refused_with_field_and_remedy(
    changes: dict[str, int], draft_size: int | None, message: str
) -> None:
    with pytest.raises(ValueError, match=message) as refusal:
        check_sharding(HEAD | changes, draft_size, 2)
    assert "want" in str(refusal.value) or "whole head" in str(refusal.value)
