"""Copies of whole KV blocks in several layers at once.

Whole blocks need no knowledge of their layout. vLLM gives layers of one kind one
allocation, so that one view holds a block of all of them. On a CPU a plain copy of a
block moves 30 GB/s, an indexed copy of several a tenth of it, so blocks are copied one
by one there.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


class BlockCopies:
    """The KV caches of some layers.

    Args:
        caches: [num_blocks, ...] of each layer.
    """

    def __init__(self, caches: Sequence[torch.Tensor]) -> None:
        self._stacks = _stacked(list(caches))

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy blocks `source` to blocks `target` in every layer; both [num_copies]."""
        for stack in self._stacks:
            if stack.device.type != "cpu":
                stack[:, target] = stack[:, source]
                continue
            for old, new in zip(source.tolist(), target.tolist(), strict=True):
                stack[:, new].copy_(stack[:, old])


def _stacked(caches: list[torch.Tensor]) -> list[torch.Tensor]:
    """Views [num_layers, num_blocks, ...] of as many layers each as lie evenly."""
    stacks: list[torch.Tensor] = []
    while caches:
        first, count = caches[0], 1
        step = _distance(first, caches[1]) if len(caches) > 1 else 0
        while count < len(caches) and _distance(first, caches[count]) == step * count:
            count += 1
        if step <= 0:
            step, count = 0, 1
        stacks.append(
            first.as_strided(
                (count, *first.shape), (step, *first.stride()), first.storage_offset()
            )
        )
        caches = caches[count:]
    return stacks


def _distance(first: torch.Tensor, other: torch.Tensor) -> int:
    """Elements from one layer to another of the same make; 0 if there is none."""
    alike = (
        first.shape == other.shape
        and first.stride() == other.stride()
        and first.dtype == other.dtype
        and first.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
    )
    return int(other.storage_offset() - first.storage_offset()) if alike else 0
