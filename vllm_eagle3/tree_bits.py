"""Ancestor bits: which nodes of its tree a node sees, in one int64 a node.

A row sees the whole prefix, the root, and the nodes of its own path:

    root ─┬─ 0 ─┬─ 2          row   prefix  root  0  1  2  3    bits
          │     └─ 3          root     x     x    .  .  .  .    0b0000
          └─ 1                0        x     x    x  .  .  .    0b0001
                              1        x     x    .  x  .  .    0b0010
                              2        x     x    x  .  x  .    0b0101
                              3        x     x    x  .  .  x    0b1001

Bit i of a node's mask says that it sees node i. The number of bits is the depth, so the
masks hold all there is to know about the shape of a tree of up to 64 nodes.
"""

from __future__ import annotations

import torch

MAX_NODES = 64


def ancestor_bits(parents: torch.Tensor) -> torch.Tensor:
    """Bit masks of the nodes that each node sees, itself included.

    Args:
        parents: [num_reqs, num_nodes], node index or -1 for the root; always below
            the node's own index.

    Returns:
        int64 [num_reqs, num_nodes]; bit 63 is the sign bit.

    Raises:
        ValueError: more than 64 nodes.
    """
    num_nodes = parents.shape[1]
    if num_nodes > MAX_NODES:
        raise ValueError(
            f"tree: got {num_nodes} nodes, want at most {MAX_NODES}; "
            "lower num_speculative_tokens"
        )
    nodes = torch.arange(num_nodes, device=parents.device)
    bits = (torch.ones_like(nodes) << nodes).expand_as(parents)
    # Each round doubles the number of ancestors that a node knows.
    up = parents.to(torch.int64)
    for _ in range(max(num_nodes - 1, 0).bit_length()):
        has_parent, at = up >= 0, up.clamp(min=0)
        bits = bits | torch.where(has_parent, bits.gather(1, at), 0)
        up = torch.where(has_parent, up.gather(1, at), up)
    return bits


def unpack_bits(bits: torch.Tensor) -> torch.Tensor:
    """[..., num_nodes] masks -> bool [..., num_nodes, num_nodes]: i sees j."""
    nodes = torch.arange(bits.shape[-1], device=bits.device)
    return (bits[..., None] >> nodes) & 1 != 0


def visible_keys(
    bits: torch.Tensor,  # [num_nodes]
    context_len: int,
    sliding_window: int | None,
) -> tuple[torch.Tensor, int]:
    """What the rows of one request see: (bool [1 + num_nodes, keys], first key).

    Keys are positions from `first key` on: the prefix and then the rows. With a sliding
    window of W a row at position p (`context_len` + depth) sees positions above p - W,
    so prefix positions before `first key` are seen by no row and are never read.
    """
    num_rows, device = bits.shape[0] + 1, bits.device
    first = max(0, context_len - sliding_window + 1) if sliding_window else 0
    visible = torch.ones(
        num_rows, context_len - first + num_rows, dtype=torch.bool, device=device
    )
    visible[0, -num_rows:] = torch.arange(num_rows, device=device) == 0
    visible[1:, context_len - first + 1 :] = unpack_bits(bits)
    if sliding_window:
        depths = torch.zeros(num_rows, dtype=torch.int64, device=device)
        depths[1:] = unpack_bits(bits).sum(-1)
        prefix = torch.arange(first, context_len, device=device)
        key_positions = torch.cat([prefix, context_len + depths])
        distance = (context_len + depths)[:, None] - key_positions
        visible &= distance < sliding_window
    return visible, first
