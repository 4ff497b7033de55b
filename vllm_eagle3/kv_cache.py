"""Commit: move the accepted nodes' keys and values to where a plain run has them."""

from __future__ import annotations

import torch


def commit_path(
    cache: torch.Tensor,  # [..., length, head_dim]
    start: int,
    path: torch.Tensor,  # [num_accepted], rising rows of the tree
) -> torch.Tensor:
    """Keep `cache` up to `start` and, behind it, only the rows `start + path`.

        start=3, path=[0, 2]     x x x a b c d   ->   x x x a c

    Rows above `path` belong to refused drafts and are dropped.
    """
    kept = torch.arange(start, device=cache.device)
    return cache.index_select(-2, torch.cat([kept, start + path.to(cache.device)]))
