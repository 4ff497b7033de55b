"""Copies of KV blocks, however the layers lie in memory."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("vllm")

from vllm_eagle3.integration.block_copies import BlockCopies

LAYERS, BLOCKS = 4, 6


def _contiguous() -> list[torch.Tensor]:
    return list(torch.empty(LAYERS, BLOCKS, 2, 3))


def _interleaved() -> list[torch.Tensor]:
    """A block holds all layers."""
    return list(torch.empty(BLOCKS, LAYERS, 2, 3).transpose(0, 1))


def _backwards() -> list[torch.Tensor]:
    return _contiguous()[::-1]


def _uneven() -> list[torch.Tensor]:
    return [*_contiguous()[:2], *_contiguous()[1:], torch.empty(BLOCKS, 2, 3)]


def _of_two_kinds() -> list[torch.Tensor]:
    return [*torch.empty(2, BLOCKS, 2, 3), *torch.empty(2, BLOCKS, 2, 5)]


@pytest.mark.parametrize(
    "make", [_contiguous, _interleaved, _backwards, _uneven, _of_two_kinds]
)
def test_blocks_are_copied_in_every_layer(make) -> None:
    caches = make()
    for number, cache in enumerate(caches):
        cache.copy_(torch.arange(cache.numel()).view(cache.shape) + 1000 * number)
    wanted = [cache.clone() for cache in caches]
    for want in wanted:
        want[[4, 5, 1]] = want[[0, 0, 2]]
    BlockCopies(caches).copy(torch.tensor([0, 0, 2]), torch.tensor([4, 5, 1]))
    for cache, want in zip(caches, wanted, strict=True):
        assert torch.equal(cache, want)


def test_nothing_to_copy_is_no_copy() -> None:
    caches = [torch.ones(BLOCKS, 2)]
    none = torch.tensor([], dtype=torch.int64)
    BlockCopies(caches).copy(none, none)
    assert caches[0].sum() == BLOCKS * 2
