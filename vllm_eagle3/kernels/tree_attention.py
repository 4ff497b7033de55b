"""Tree attention over a paged cache in one Triton kernel, split by keys when few run.

A program owns a tile of (row, head) pairs of one request that share a KV head, so keys
are read once for a whole group of heads. It walks the prefix, which every row sees, and
then the tree's rows, which the bit masks choose from, with one online softmax. Where
requests and heads are too few to fill the device, the prefix is shared out to several
programs and a second kernel merges their results by log-sum-exp.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

MAX_SPLITS = 16


@triton.jit
def _num_bits(x):
    """Set bits of int64, all 64 of them: sums of neighbours, two, four, eight wide."""
    x = x - ((x >> 1) & 0x5555555555555555)
    x = (x & 0x3333333333333333) + ((x >> 2) & 0x3333333333333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F0F0F0F0F
    x = x + (x >> 8)
    x = x + (x >> 16)
    x = x + (x >> 32)
    return (x & 0x7F).to(tl.int32)


@triton.jit
def _load_keys(
    head_ptr,  # the cache at one KV head
    block_ptr,  # this request's row of the block table
    positions,  # [BLOCK_N]
    valid,  # [BLOCK_N]
    stride_block,
    stride_slot,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Keys or values at `positions`, [BLOCK_N, BLOCK_D], zero where not valid."""
    block = tl.load(block_ptr + positions // BLOCK_SIZE, mask=valid, other=0)
    # Whole caches exceed 2^31 elements.
    slot = block.to(tl.int64) * stride_block + positions % BLOCK_SIZE * stride_slot
    dim = tl.arange(0, BLOCK_D)
    mask = valid[:, None] & (dim < HEAD_DIM)[None, :]
    return tl.load(head_ptr + slot[:, None] + dim[None, :], mask=mask, other=0.0)


@triton.jit
def _attend(
    q,  # [BLOCK_M, BLOCK_D]
    k_ptr,
    v_ptr,
    block_ptr,
    positions,  # [BLOCK_N]
    valid,  # [BLOCK_N]
    visible,  # [BLOCK_M, BLOCK_N]
    acc,  # [BLOCK_M, BLOCK_D]
    peak,  # [BLOCK_M]
    total,  # [BLOCK_M]
    stride_k_block,
    stride_k_slot,
    stride_v_block,
    stride_v_slot,
    scale,
    SOFTCAP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Add the keys of one tile to the online softmax."""
    k = _load_keys(
        k_ptr,
        block_ptr,
        positions,
        valid,
        stride_k_block,
        stride_k_slot,
        BLOCK_SIZE,
        HEAD_DIM,
        BLOCK_D,
    ).to(q.dtype)
    v = _load_keys(
        v_ptr,
        block_ptr,
        positions,
        valid,
        stride_v_block,
        stride_v_slot,
        BLOCK_SIZE,
        HEAD_DIM,
        BLOCK_D,
    ).to(q.dtype)
    # "ieee": fp32 must not become tf32, or greedy ids would change.
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    if SOFTCAP > 0:
        # tanh(x) = 2 sigmoid(2x) - 1
        scores = SOFTCAP * (2 * tl.sigmoid(scores * (2 / SOFTCAP)) - 1)
    scores = tl.where(visible, scores, float("-inf"))
    new_peak = tl.maximum(peak, tl.max(scores, 1))
    # A row may have seen no key yet; -inf minus -inf would be NaN.
    base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    weights = tl.exp(scores - base[:, None])
    decay = tl.exp(peak - base)
    acc = acc * decay[:, None]
    acc += tl.dot(weights.to(q.dtype), v, input_precision="ieee")
    return acc, new_peak, total * decay + tl.sum(weights, 1)


# Sizes that change from step to step must not compile the kernel anew.
@triton.jit(do_not_specialize=["first_row", "num_rows", "num_nodes", "stride_bits"])
def _tree_attention_kernel(
    out_ptr,  # [NUM_SPLITS, num_rows, num_heads, HEAD_DIM]
    lse_ptr,  # [NUM_SPLITS, num_rows, num_heads]; unused for one split
    q_ptr,  # [num_rows, num_heads, HEAD_DIM]
    k_ptr,  # [num_blocks, BLOCK_SIZE, num_kv_heads, HEAD_DIM]
    v_ptr,  # [num_blocks, BLOCK_SIZE, num_kv_heads, HEAD_DIM]
    block_table_ptr,  # [num_reqs, max_blocks]
    context_lens_ptr,  # [num_reqs]
    query_start_ptr,  # [num_reqs + 1]
    bits_ptr,  # [num_reqs, num_nodes]
    scale,
    first_row,
    num_rows,
    num_nodes,
    stride_q_row,
    stride_q_head,
    stride_k_block,
    stride_k_slot,
    stride_k_head,
    stride_v_block,
    stride_v_slot,
    stride_v_head,
    stride_table,
    stride_bits,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    WINDOW: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    DOT_DTYPE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    tile, kv_head = tl.program_id(0), tl.program_id(1)
    k_ptr += kv_head * stride_k_head
    v_ptr += kv_head * stride_v_head
    req, split = tl.program_id(2) // NUM_SPLITS, tl.program_id(2) % NUM_SPLITS
    first_query = tl.load(query_start_ptr + req)
    num_queries = tl.load(query_start_ptr + req + 1) - first_query
    if tile * BLOCK_M >= num_queries * GROUP:
        return
    context_len = tl.load(context_lens_ptr + req)
    block_ptr = block_table_ptr + req.to(tl.int64) * stride_table
    req_bits_ptr = bits_ptr + req.to(tl.int64) * stride_bits

    # The tile's (row, head) pairs.
    pair = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    query, head = pair // GROUP, kv_head * GROUP + pair % GROUP
    row = first_row + query  # row of the tree; 0 is the root
    in_use = (query < num_queries) & (row <= num_nodes)
    bits = tl.load(req_bits_ptr + row - 1, mask=in_use & (row > 0), other=0)
    position = context_len + _num_bits(bits)
    dim = tl.arange(0, BLOCK_D)
    q_row = (first_query + query).to(tl.int64)
    q = tl.load(
        q_ptr + (q_row * stride_q_row + head * stride_q_head)[:, None] + dim[None, :],
        mask=in_use[:, None] & (dim < HEAD_DIM)[None, :],
        other=0.0,
    ).to(DOT_DTYPE)
    acc = tl.zeros([BLOCK_M, BLOCK_D], dtype=tl.float32)
    peak = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    total = tl.zeros([BLOCK_M], dtype=tl.float32)

    # The prefix: this split's share of the tiles that any row may see.
    oldest = tl.maximum(context_len - WINDOW + 1, 0) if WINDOW > 0 else 0
    share = tl.cdiv(tl.cdiv(context_len - oldest, BLOCK_N), NUM_SPLITS) * BLOCK_N
    begin = oldest + split * share
    end = tl.minimum(begin + share, context_len)
    for start in range(begin, end, BLOCK_N):
        key = start + tl.arange(0, BLOCK_N)
        valid = key < context_len
        visible = valid[None, :] & in_use[:, None]
        if WINDOW > 0:
            visible = visible & (position[:, None] - key[None, :] < WINDOW)
        acc, peak, total = _attend(
            q,
            k_ptr,
            v_ptr,
            block_ptr,
            key,
            valid,
            visible,
            acc,
            peak,
            total,
            stride_k_block,
            stride_k_slot,
            stride_v_block,
            stride_v_slot,
            scale,
            SOFTCAP,
            BLOCK_SIZE,
            HEAD_DIM,
            BLOCK_D,
        )

    # The tree: the last split's, whose share of the prefix is the smallest.
    if split == NUM_SPLITS - 1:
        num_tree_rows = tl.minimum(first_row + num_queries, num_nodes + 1)
        for start in range(0, num_tree_rows, BLOCK_N):
            key_row = start + tl.arange(0, BLOCK_N)
            valid = key_row < num_tree_rows
            key_node = tl.maximum(key_row - 1, 0)
            seen = (bits[:, None] >> key_node[None, :].to(tl.int64)) & 1 != 0
            visible = seen | (key_row == 0)[None, :]
            visible = visible & valid[None, :] & in_use[:, None]
            if WINDOW > 0:
                key_bits = tl.load(
                    req_bits_ptr + key_row - 1, mask=valid & (key_row > 0), other=0
                )
                key_position = context_len + _num_bits(key_bits)
                near = position[:, None] - key_position[None, :] < WINDOW
                visible = visible & near
            acc, peak, total = _attend(
                q,
                k_ptr,
                v_ptr,
                block_ptr,
                context_len + key_row,
                valid,
                visible,
                acc,
                peak,
                total,
                stride_k_block,
                stride_k_slot,
                stride_v_block,
                stride_v_slot,
                scale,
                SOFTCAP,
                BLOCK_SIZE,
                HEAD_DIM,
                BLOCK_D,
            )

    # A split may have had no key to see; its weight in the merge is then zero.
    mean = acc / tl.where(total > 0, total, 1.0)[:, None]
    out_row = split.to(tl.int64) * num_rows + q_row
    out_pair = out_row * NUM_HEADS + head
    tl.store(
        out_ptr + (out_pair * HEAD_DIM)[:, None] + dim[None, :],
        mean.to(out_ptr.dtype.element_ty),
        mask=in_use[:, None] & (dim < HEAD_DIM)[None, :],
    )
    if NUM_SPLITS > 1:
        tl.store(lse_ptr + out_pair, peak + tl.log(total), mask=in_use)


@triton.jit
def _merge_splits_kernel(
    out_ptr,  # [num_rows, num_heads, HEAD_DIM]
    partial_ptr,  # [NUM_SPLITS, num_rows, num_heads, HEAD_DIM]
    lse_ptr,  # [NUM_SPLITS, num_rows, num_heads]
    num_pairs,  # num_rows * num_heads, the number of programs
    HEAD_DIM: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    pair = tl.program_id(0).to(tl.int64)
    split, dim = tl.arange(0, NUM_SPLITS), tl.arange(0, BLOCK_D)
    lse = tl.load(lse_ptr + split * num_pairs + pair)
    # Queries of no request have no weight anywhere, and are zero.
    highest = tl.max(lse, 0)
    weights = tl.exp(lse - tl.where(highest == float("-inf"), 0.0, highest))
    partial = tl.load(
        partial_ptr + ((split * num_pairs + pair) * HEAD_DIM)[:, None] + dim[None, :],
        mask=(lse > float("-inf"))[:, None] & (dim < HEAD_DIM)[None, :],
        other=0.0,
    )
    total = tl.sum(weights, 0)
    merged = tl.sum(weights[:, None] * partial, 0) / tl.where(total > 0, total, 1.0)
    tl.store(
        out_ptr + pair * HEAD_DIM + dim,
        merged.to(out_ptr.dtype.element_ty),
        mask=dim < HEAD_DIM,
    )


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
    """The op of `vllm_eagle3.tree_attention`; never waits for the device."""
    q, k_cache, v_cache = (_packed(x) for x in (q, k_cache, v_cache))
    block_table, bits = _packed(block_table), _packed(ancestor_bits)
    num_rows, num_heads, head_dim = q.shape
    num_reqs, num_nodes = bits.shape
    num_kv_heads = k_cache.shape[2]
    group = num_heads // num_kv_heads
    max_pairs = (num_nodes + 1 - first_row) * group
    tiles = tile_sizes(max_pairs, head_dim, q.element_size())
    grid_m = triton.cdiv(max_pairs, tiles["BLOCK_M"])
    splits = num_splits(
        q.device,
        grid_m * num_kv_heads * num_reqs,
        triton.cdiv(block_table.shape[1] * k_cache.shape[1], tiles["BLOCK_N"]),
    )
    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    if num_reqs == 0 or num_rows == 0:
        return out
    partial, lse = out, out
    if splits > 1:
        lse = q.new_full((splits, num_rows, num_heads), -torch.inf, dtype=torch.float32)
        partial = q.new_empty((splits, *q.shape), dtype=torch.float32)
    _tree_attention_kernel[(grid_m, num_kv_heads, num_reqs * splits)](
        partial,
        lse,
        q,
        k_cache,
        v_cache,
        block_table,
        context_lens,
        query_start_loc,
        bits,
        scale,
        first_row,
        num_rows,
        num_nodes,
        *q.stride()[:2],
        *k_cache.stride()[:3],
        *v_cache.stride()[:3],
        block_table.stride(0),
        bits.stride(0),
        NUM_HEADS=num_heads,
        GROUP=group,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=k_cache.shape[1],
        SOFTCAP=softcap,
        WINDOW=sliding_window or 0,
        NUM_SPLITS=splits,
        DOT_DTYPE=dot_dtype(q.dtype),
        **tiles,
    )
    if splits > 1:
        _merge_splits_kernel[(num_rows * num_heads,)](
            out,
            partial,
            lse,
            num_rows * num_heads,
            HEAD_DIM=head_dim,
            NUM_SPLITS=splits,
            BLOCK_D=tiles["BLOCK_D"],
        )
    return out


def tile_sizes(max_pairs: int, head_dim: int, element_size: int) -> dict[str, int]:
    """Tiles that hold a usual tree's pairs and fit 99 KiB of shared memory.

    Exact fp32 products run on the ordinary cores and are unrolled in full, so that
    larger tiles would only make the code long and its compilation slow.
    """
    block_d = max(16, triton.next_power_of_2(head_dim))
    if element_size == 4:
        limit_m, block_n = 32, 32 if block_d <= 128 else 16
    else:
        limit_m, block_n = (128, 64) if block_d <= 128 else (64, 32)
    block_m = min(limit_m, max(16, triton.next_power_of_2(max_pairs)))
    return {
        "BLOCK_M": block_m,
        "BLOCK_N": block_n,
        "BLOCK_D": block_d,
        "num_warps": 8 if block_m * block_d > 64 * 64 else 4,
        "num_stages": 2,
    }


def num_splits(device: torch.device, num_programs: int, max_tiles: int) -> int:
    """Splits that fill the device, a power of two; 1 where programs suffice.

    The longest context that the block table could hold decides, not the contexts of
    this step, because those are on the device.
    """
    if device.type != "cuda":
        return 1
    cores = torch.cuda.get_device_properties(device).multi_processor_count
    splits = 1
    while splits < min(MAX_SPLITS, max_tiles) and 2 * splits * num_programs <= cores:
        splits *= 2
    return splits


def dot_dtype(dtype: torch.dtype) -> tl.dtype:
    """Operands of the matrix products: as they are, but fp32 in the interpreter.

    Triton's interpreter multiplies the bit patterns of bf16 (triton issue 11584).
    """
    names = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
    if triton.knobs.runtime.interpret:
        return tl.float32
    return names.get(dtype, tl.float32)


def _packed(x: torch.Tensor) -> torch.Tensor:
    """`x` with neighbours in its last dimension, which the kernel takes for granted."""
    return x if x.stride(-1) == 1 else x.contiguous()
