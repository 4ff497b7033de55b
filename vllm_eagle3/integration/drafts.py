"""The drafts of a step, as the target's pass holds them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

from ..verify import PADDING


@dataclass(frozen=True)
class Drafts:
    """The drafts of a step as padded trees, beside the rows of their logits.

    Attributes:
        token_ids, parents: [num_reqs, num_nodes]; padding nodes are never reached.
        num_nodes: [num_reqs].
        rows: [num_reqs, num_nodes + 1], row of the logits of the root and each node.
    """

    token_ids: torch.Tensor
    parents: torch.Tensor
    num_nodes: torch.Tensor
    rows: torch.Tensor


def read_drafts(
    metadata: SpecDecodeMetadata, trees: dict[int, torch.Tensor], num_rows: int
) -> Drafts:
    """Make a rectangle of a step's drafts.

    Args:
        trees: request -> parents of its nodes; the others are chains.
        num_rows: rows of logits.
    """
    device = metadata.draft_token_ids.device
    num_nodes = torch.tensor(metadata.num_draft_tokens, device=device)
    columns = torch.arange(metadata.max_spec_len + 1, device=device)
    first_row = metadata.cu_num_sampled_tokens - num_nodes - 1
    # Rows behind a request's own are never read, they only must exist.
    rows = (first_row[:, None] + columns).clamp(max=num_rows - 1)
    in_use = columns[1:] <= num_nodes[:, None]
    token_ids = torch.full_like(rows[:, 1:], PADDING, dtype=torch.int64)
    token_ids[in_use] = metadata.draft_token_ids.long()
    parents = (columns[1:] - 2).expand_as(token_ids).clone()
    for request, tree in trees.items():
        parents[request, : len(tree)] = tree.to(device)
    return Drafts(token_ids, parents, num_nodes, rows)
