"""Attention of a tree's rows to a paged cache: the reference, and the choice of kernel.

Row 0 of a request is the root and row i+1 is node i. Keys and values of row r lie at
position `context_len + r` of the request's blocks, whatever the row's depth; what a row
sees of them, `tree_bits.py` draws.
"""

from __future__ import annotations

import functools
import importlib.util
import warnings
from collections.abc import Callable

import torch

from .tree_bits import MAX_NODES, visible_keys

HAS_TRITON = importlib.util.find_spec("triton") is not None


def reference_tree_attention(
    q: torch.Tensor,  # [num_rows, num_heads, head_dim]
    k_cache: torch.Tensor,  # [num_blocks, block_size, num_kv_heads, head_dim]
    v_cache: torch.Tensor,  # [num_blocks, block_size, num_kv_heads, head_dim]
    block_table: torch.Tensor,  # [num_reqs, max_blocks]
    context_lens: torch.Tensor,  # [num_reqs]
    query_start_loc: torch.Tensor,  # [num_reqs + 1]
    ancestor_bits: torch.Tensor,  # [num_reqs, num_nodes]
    scale: float,
    softcap: float = 0.0,
    sliding_window: int | None = None,
    first_row: int = 0,
) -> torch.Tensor:
    """`tree_attention` request by request, in fp32, for any device."""
    out = torch.zeros_like(q)
    starts, contexts = query_start_loc.tolist(), context_lens.tolist()
    for req, context_len in enumerate(contexts):
        rows = slice(starts[req], starts[req + 1])
        num_nodes = first_row + rows.stop - rows.start - 1
        if rows.start == rows.stop:
            continue
        if num_nodes > ancestor_bits.shape[1]:
            raise ValueError(
                f"query_start_loc: request {req} has {num_nodes + 1} rows, want at "
                f"most {ancestor_bits.shape[1] + 1} (root and the nodes of "
                "ancestor_bits); give longer chunks to the engine's own attention"
            )
        visible, first = visible_keys(
            ancestor_bits[req, :num_nodes], context_len, sliding_window
        )
        positions = first + torch.arange(visible.shape[1], device=q.device)
        k = gather_positions(k_cache, block_table[req], positions)
        v = gather_positions(v_cache, block_table[req], positions)
        out[rows] = _attend(q[rows], k, v, visible[first_row:], scale, softcap)
    return out


def gather_positions(
    cache: torch.Tensor,  # [num_blocks, block_size, num_kv_heads, head_dim]
    blocks: torch.Tensor,  # [max_blocks]
    positions: torch.Tensor,  # [keys]
) -> torch.Tensor:
    """Keys or values at `positions` of one request, [keys, num_kv_heads, head_dim]."""
    block_size = cache.shape[1]
    return cache[blocks[positions // block_size].long(), positions % block_size]


def _attend(
    q: torch.Tensor,  # [rows, num_heads, head_dim]
    k: torch.Tensor,  # [keys, num_kv_heads, head_dim]
    v: torch.Tensor,  # [keys, num_kv_heads, head_dim]
    visible: torch.Tensor,  # [rows, keys]
    scale: float,
    softcap: float,
) -> torch.Tensor:
    group = q.shape[1] // k.shape[1]
    k = k.float().repeat_interleave(group, dim=1)
    v = v.float().repeat_interleave(group, dim=1)
    scores = torch.einsum("rhd,khd->hrk", q.float(), k) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
    return torch.einsum("hrk,khd->rhd", weights, v).to(q.dtype)


def tree_attention(
    q: torch.Tensor,  # [num_rows, num_heads, head_dim]
    k_cache: torch.Tensor,  # [num_blocks, block_size, num_kv_heads, head_dim]
    v_cache: torch.Tensor,  # [num_blocks, block_size, num_kv_heads, head_dim]
    block_table: torch.Tensor,  # [num_reqs, max_blocks]
    context_lens: torch.Tensor,  # [num_reqs]
    query_start_loc: torch.Tensor,  # [num_reqs + 1]
    ancestor_bits: torch.Tensor,  # [num_reqs, num_nodes]
    scale: float,
    softcap: float = 0.0,
    sliding_window: int | None = None,
    first_row: int = 0,
) -> torch.Tensor:
    """Attend from the rows of every request to its prefix and its own tree.

    A plain decode is a request of one row; a chunk of up to 65 prompt tokens is a
    chain. Longer chunks do not fit the masks and stay with the engine's own attention.

    Args:
        q: queries of all requests, back to back; of fp32, fp16 or bf16.
        k_cache: keys, any strides; the rows' own keys are already written.
        v_cache: values, likewise.
        block_table: block of each run of `block_size` positions.
        context_lens: length of the prefix, that is the position of the root.
        query_start_loc: first query of each request, and their total number. A request
            may have fewer rows than `ancestor_bits` has columns, or none.
        ancestor_bits: int64 masks as `tree_bits.ancestor_bits` makes them.
        scale: factor of the scores.
        softcap: scores s become softcap * tanh(s / softcap); 0 leaves them.
        sliding_window: positions that a row sees, its own included; None is all.
        first_row: row of each request's first query. A level of a growing tree has
            queries for its own rows only; those of earlier levels are in the cache.

    Returns:
        [num_rows, num_heads, head_dim] in the queries' dtype. Queries behind the last
        request are zero. Where a request has more rows than there are masks, the CPU
        raises and a GPU leaves them zero, because looking would stall it.

    Raises:
        ValueError: shapes or dtypes that do not fit together.
    """
    _check(q, k_cache, v_cache, block_table, context_lens, query_start_loc)
    _check_tree(ancestor_bits, context_lens, softcap, sliding_window, first_row)
    return implementation(q.device.type)(
        q,
        k_cache,
        v_cache,
        block_table,
        context_lens,
        query_start_loc,
        ancestor_bits,
        scale,
        softcap,
        sliding_window,
        first_row,
    )


@functools.cache
def implementation(device_type: str) -> Callable[..., torch.Tensor]:
    """The kernel on a GPU, the reference elsewhere; warns where Triton is missing."""
    if device_type != "cuda":
        return reference_tree_attention
    if not HAS_TRITON:
        warnings.warn(
            "tree attention: Triton is not installed, so that PyTorch computes it "
            "request by request, which is slow; pip install triton",
            stacklevel=3,
        )
        return reference_tree_attention
    from .kernels.tree_attention import tree_attention as kernel

    return kernel


def _check(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    context_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
) -> None:
    if q.ndim != 3 or not q.is_floating_point():
        raise ValueError(
            f"q: got {q.dtype} of shape {tuple(q.shape)}, "
            "want floating point [num_rows, num_heads, head_dim]"
        )
    if k_cache.ndim != 4 or k_cache.shape != v_cache.shape:
        raise ValueError(
            f"cache: got keys {tuple(k_cache.shape)} and values "
            f"{tuple(v_cache.shape)}, want both [num_blocks, block_size, "
            "num_kv_heads, head_dim]"
        )
    if {k_cache.dtype, v_cache.dtype} != {q.dtype}:
        raise ValueError(
            f"cache: got keys of {k_cache.dtype} and values of {v_cache.dtype}, want "
            f"the queries' {q.dtype}; a quantised cache is not supported"
        )
    if q.shape[2] != k_cache.shape[3] or q.shape[1] % k_cache.shape[2]:
        raise ValueError(
            f"heads: got {q.shape[1]} of size {q.shape[2]} for {k_cache.shape[2]} KV "
            f"heads of size {k_cache.shape[3]}, want a multiple and equal sizes"
        )
    num_reqs = context_lens.shape[0]
    if block_table.ndim != 2 or block_table.shape[0] != num_reqs:
        raise ValueError(
            f"block_table: got shape {tuple(block_table.shape)}, "
            f"want [{num_reqs}, max_blocks]"
        )
    if query_start_loc.shape != (num_reqs + 1,):
        raise ValueError(
            f"query_start_loc: got shape {tuple(query_start_loc.shape)}, "
            f"want [{num_reqs + 1}] for {num_reqs} requests"
        )


def _check_tree(
    ancestor_bits: torch.Tensor,
    context_lens: torch.Tensor,
    softcap: float,
    sliding_window: int | None,
    first_row: int,
) -> None:
    num_reqs = context_lens.shape[0]
    shape = tuple(ancestor_bits.shape)
    if ancestor_bits.dtype != torch.int64 or len(shape) != 2 or shape[0] != num_reqs:
        raise ValueError(
            f"ancestor_bits: got {ancestor_bits.dtype} of shape {shape}, "
            f"want int64 [{num_reqs}, num_nodes]"
        )
    if shape[1] > MAX_NODES:
        raise ValueError(
            f"ancestor_bits: got {shape[1]} nodes, want at most {MAX_NODES}; "
            "lower num_speculative_tokens"
        )
    if softcap < 0:
        raise ValueError(f"softcap: got {softcap}, want 0 (none) or more")
    if sliding_window is not None and sliding_window < 1:
        raise ValueError(
            f"sliding_window: got {sliding_window}, want None or at least 1"
        )
    if not 0 <= first_row <= shape[1]:
        raise ValueError(f"first_row: got {first_row}, want 0..{shape[1]}")
