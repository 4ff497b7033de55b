"""Batches of trees over a paged cache, for the attention's reference and its kernel."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from vllm_eagle3.tree_bits import ancestor_bits

Parents = list[int]


def chain(n: int) -> Parents:
    return list(range(-1, n - 1))


def wide(n: int) -> Parents:
    return [-1] * n


def deep(n: int) -> Parents:
    """Two long branches, taking turns."""
    return [max(i - 2, -1) for i in range(n)]


def random_tree(n: int, seed: int = 0) -> Parents:
    draw = torch.Generator().manual_seed(seed)
    return [
        int(torch.randint(-1, node, (), generator=draw)) if node else -1
        for node in range(n)
    ]


@dataclass(frozen=True)
class Case:
    """A batch of trees with contexts, and what the model and the cache look like."""

    trees: list[Parents]
    contexts: list[int]
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    block_size: int = 8
    dtype: torch.dtype = torch.float32
    softcap: float = 0.0
    sliding_window: int | None = None
    first_row: int = 0
    splits: int = 1  # forced on the kernel, which else would choose


@dataclass(frozen=True)
class Batch:
    """Arguments of `tree_attention` in their order, and the dense keys behind them."""

    args: tuple[torch.Tensor, ...]
    scale: float
    # Of each request, prefix and rows, [context + rows, kv_heads, head_dim].
    keys: list[torch.Tensor] = field(repr=False)
    values: list[torch.Tensor] = field(repr=False)
    # Of each request, all rows from the root on, [rows, heads, head_dim].
    queries: list[torch.Tensor] = field(repr=False)


def make_batch(case: Case, seed: int = 0) -> Batch:
    """Random tensors; blocks are in random order and NaN wherever nobody may look."""
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=draw).to(case.dtype)

    rows = [len(tree) + 1 for tree in case.trees]
    lengths = [c + r for c, r in zip(case.contexts, rows, strict=True)]
    blocks = [-(-length // case.block_size) for length in lengths]
    order = torch.randperm(sum(blocks) + 2, generator=draw).to(torch.int32)
    table = torch.full((len(rows), max(blocks)), int(order[-1]), dtype=torch.int32)
    shape = (len(order), case.block_size, case.kv_heads, case.head_dim)
    k_cache = torch.full(shape, torch.nan, dtype=case.dtype)
    v_cache = k_cache.clone()
    keys, values, queries, used = [], [], [], 0
    for req, (context, length) in enumerate(zip(case.contexts, lengths, strict=True)):
        table[req, : blocks[req]] = order[used : used + blocks[req]]
        used += blocks[req]
        keys.append(normal(length, case.kv_heads, case.head_dim))
        values.append(normal(length, case.kv_heads, case.head_dim))
        queries.append(normal(rows[req], case.heads, case.head_dim))
        window = case.sliding_window
        first = max(0, context - window + 1) if window else 0
        for position in range(first, length):
            block = table[req, position // case.block_size]
            k_cache[block, position % case.block_size] = keys[req][position]
            v_cache[block, position % case.block_size] = values[req][position]
    asked = [q[case.first_row :] for q in queries]
    width = max(rows) - 1
    parents = torch.tensor([t + [-1] * (width - len(t)) for t in case.trees])
    args = (
        torch.cat(asked),
        k_cache,
        v_cache,
        table,
        torch.tensor(case.contexts, dtype=torch.int32),
        torch.tensor([0, *(len(q) for q in asked)], dtype=torch.int32).cumsum(
            0, dtype=torch.int32
        ),
        ancestor_bits(parents.view(len(rows), width).long()),
    )
    return Batch(args, case.head_dim**-0.5, keys, values, queries)


MIXED = [chain(5), wide(6), deep(7), random_tree(9), []]

CASES = {
    "chain": Case([chain(6)], [11]),
    "wide": Case([wide(7)], [11]),
    "deep": Case([deep(9)], [11]),
    "random": Case([random_tree(12, 3)], [11]),
    "root alone": Case([[]], [9]),
    "empty prefix": Case([random_tree(5, 1)], [0]),
    "64 nodes": Case([random_tree(64, 5)], [5], heads=2, kv_heads=1),
    "64 in a chain": Case([chain(64)], [5], heads=2, kv_heads=1),
    "mixed batch": Case(MIXED, [3, 40, 17, 8, 25]),
    "before a block edge": Case([random_tree(6)] * 2, [7, 15]),
    "at a block edge": Case([random_tree(6)] * 2, [8, 16]),
    "after a block edge": Case([random_tree(6)] * 2, [9, 17]),
    "many key tiles": Case([random_tree(6)] * 2, [150, 128], heads=2, kv_heads=1),
    "block size 5": Case([random_tree(6)] * 2, [9, 17], block_size=5),
    "one head a KV head": Case(MIXED, [3, 40, 17, 8, 25], heads=2, kv_heads=2),
    "three heads a KV head": Case(MIXED, [3, 40, 17, 8, 25], heads=6, kv_heads=2),
    "four heads a KV head": Case(MIXED, [3, 40, 17, 8, 25], heads=4, kv_heads=1),
    "head size 64": Case([deep(6)], [10], head_dim=64),
    "head size 80": Case([deep(6)], [10], head_dim=80),
    "head size 96": Case([deep(6)], [10], head_dim=96),
    "head size 128": Case([deep(6)], [10], head_dim=128),
    "head size 256": Case([deep(6)], [10], head_dim=256),
    "softcap": Case([random_tree(8)], [13], softcap=0.7),
    "window inside the tree": Case(
        [chain(8), deep(9), random_tree(9)], [12, 3, 20], sliding_window=3
    ),
    "window in 64 nodes": Case(
        [chain(64), random_tree(64, 7)], [20, 50], 2, 1, sliding_window=40
    ),
    "window of one": Case([deep(6)], [12], sliding_window=1),
    "window into the prefix": Case(MIXED, [3, 40, 17, 8, 25], sliding_window=12),
    "window and tiles": Case([deep(8)], [200], sliding_window=100, kv_heads=1),
    "window and softcap": Case([deep(8)], [30], sliding_window=9, softcap=0.5),
    "level of a growing tree": Case([deep(8), deep(6)], [12, 30], first_row=5),
    "level behind a window": Case([deep(8)], [12], first_row=3, sliding_window=4),
    "two splits": Case(MIXED, [3, 140, 17, 8, 65], splits=2, kv_heads=1),
    "four splits and a window": Case(
        [deep(6), chain(4)], [300, 2], splits=4, sliding_window=180, kv_heads=1
    ),
    "bf16": Case(MIXED, [3, 40, 17, 8, 25], dtype=torch.bfloat16),
    "bf16, head size 128": Case(
        [deep(6)], [10], head_dim=128, dtype=torch.bfloat16, splits=2
    ),
}
