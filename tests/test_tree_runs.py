"""Trees as causal runs: the drawn example, and attention over random trees."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from vllm_eagle3.tree_runs import (
    TreeBatch,
    batch_trees,
    blocks_per_branch,
    depth_first,
    have_likelier_siblings,
    lineage,
    num_branches,
    plan_commit,
    plan_scratch,
)

# The tree that is drawn in tree_runs.py.
DRAWN = np.array([-1, 0, 0, -1])


def test_drawn_tree_has_the_drawn_runs() -> None:
    batch = batch_trees(np.array([0, 5]), np.array([40]), {0: DRAWN})
    assert batch.run_starts.tolist() == [0, 3, 4, 5]
    assert batch.depths.tolist() == [0, 1, 2, 2, 1]
    assert batch.branch_paths.tolist() == [[0, 1, 3], [0, 4, -1]]
    assert batch.seq_lens.tolist() == [43, 43, 42]
    assert num_branches(DRAWN) == len(batch.branch_runs) == 2


def test_lineage_runs_from_the_root_to_the_node() -> None:
    assert lineage(DRAWN[None])[0].tolist() == [
        [0, 1, -1],
        [0, 1, 2],
        [0, 1, 3],
        [0, 4, -1],
    ]


def test_level_order_becomes_depth_first_with_siblings_in_order() -> None:
    level_order = np.array([[-1, -1, 0, 0, 1]])
    assert depth_first(level_order).tolist() == [[0, 2, 3, 1, 4]]


@pytest.mark.parametrize("context", [32, 33, 62, 63])
@pytest.mark.parametrize("longest", [1, 2, 32, 33, 40])
def test_scratch_holds_every_path(context: int, longest: int) -> None:
    blocks = (context + longest - 1) // 32 - context // 32 + 1
    assert blocks <= blocks_per_branch(longest, 32)


def random_tree(rng: np.random.Generator, size: int) -> np.ndarray:
    parents = np.array([rng.integers(-1, i) for i in range(size)])
    order = depth_first(parents[None])[0]
    new_index = np.empty(size, int)
    new_index[order] = np.arange(size)
    old = parents[order]
    return np.where(old >= 0, new_index[old], -1)


BLOCK, HEADS, DIM = 4, 2, 8


class PagedCache:
    """Keys and values in blocks, and a causal kernel that knows nothing of trees."""

    def __init__(self, num_blocks: int) -> None:
        self.kv = torch.zeros(num_blocks, BLOCK, 2, HEADS, DIM)

    def write(self, slots: np.ndarray, kv: torch.Tensor) -> None:
        self.kv.view(-1, 2, HEADS, DIM)[torch.from_numpy(slots)] = kv

    def copy(self, source: np.ndarray, target: np.ndarray) -> None:
        self.kv[torch.from_numpy(target)] = self.kv[torch.from_numpy(source)]

    def read(self, blocks: np.ndarray, length: int) -> torch.Tensor:
        return self.kv[torch.from_numpy(blocks)].view(-1, 2, HEADS, DIM)[:length]

    def attend(
        self, q: torch.Tensor, starts: np.ndarray, lens: np.ndarray, table: np.ndarray
    ) -> torch.Tensor:
        out = []
        for i, length in enumerate(lens):
            rows = q[starts[i] : starts[i + 1]]
            kv = self.read(table[i], int(length))
            out.append(causal(rows, kv))
        return torch.cat(out)


def causal(q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
    rows, length = q.shape[0], kv.shape[0]
    visible = torch.ones(rows, length, dtype=torch.bool).tril(length - rows)
    k, v = (kv[:, i].transpose(0, 1) for i in (0, 1))
    out = F.scaled_dot_product_attention(q.transpose(0, 1), k, v, attn_mask=visible)
    return out.transpose(0, 1)


@pytest.mark.parametrize("seed", range(12))
def test_runs_attend_as_unrolled_paths_and_commit_as_a_plain_run(seed: int) -> None:
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    contexts = rng.integers(1, 14, 4)
    trees = {r: random_tree(rng, int(rng.integers(1, 9))) for r in (0, 2, 3)}
    lengths = [len(trees[r]) + 1 if r in trees else 3 for r in range(4)]
    starts = np.cumsum([0, *lengths])
    table = np.arange(4 * 8).reshape(4, 8)
    batch = batch_trees(starts, contexts, trees)
    longest = batch.branch_paths.shape[1]
    scratch = 32 + np.arange(40 * blocks_per_branch(longest, BLOCK)).reshape(40, -1)
    cache, history = PagedCache(32 + scratch.size), {}
    for r in range(4):
        history[r] = torch.randn(int(contexts[r]), 2, HEADS, DIM)
        cache.write(slots_of(table[r], 0, int(contexts[r])), history[r])
    kv, q = (
        torch.randn(starts[-1], *shape) for shape in ((2, HEADS, DIM), (HEADS, DIM))
    )
    for r in range(4):
        span = slice(starts[r], starts[r + 1])
        cache.write(slots_of(table[r], int(contexts[r]), lengths[r]), kv[span])
    plan = plan_scratch(batch, table, BLOCK, scratch)
    cache.kv[torch.from_numpy(plan.copy_to)] = cache.kv[
        torch.from_numpy(plan.copy_from)
    ]
    cache.write(plan.slots, kv[torch.from_numpy(plan.rows)])
    out = cache.attend(q, batch.run_starts, batch.seq_lens, plan.block_table)
    for r in range(4):
        for row in range(starts[r], starts[r + 1]):
            path = path_of(batch, trees.get(r), r, row)
            expected = causal(q[row : row + 1], torch.cat([history[r], kv[path]]))
            assert torch.allclose(out[row], expected[0], atol=1e-5), (r, row)
    last = {r: int(rng.integers(starts[r], starts[r + 1])) for r in trees}
    source, target = plan_commit(batch, plan, table, BLOCK, last)
    cache.copy(source, target)
    for r, row in last.items():
        path = path_of(batch, trees[r], r, row)
        plain = torch.cat([history[r], kv[path]])
        assert torch.equal(cache.read(table[r], len(plain)), plain)


def slots_of(blocks: np.ndarray, first: int, count: int) -> np.ndarray:
    positions = np.arange(first, first + count)
    return blocks[positions // BLOCK] * BLOCK + positions % BLOCK


def path_of(
    batch: TreeBatch, parents: np.ndarray | None, request: int, row: int
) -> list[int]:
    """Global rows from the root to `row`, by plain parent pointers."""
    start = int(batch.starts[request])
    if parents is None:
        return list(range(start, row + 1))
    path, node = [], row - start - 1
    while node >= 0:
        path.append(start + 1 + node)
        node = int(parents[node])
    return [start, *reversed(path)]


def test_later_children_are_the_branches_of_any_likeliest_nodes() -> None:
    rng = np.random.default_rng(0)
    parents = np.array([[rng.integers(-1, n) for n in range(12)] for _ in range(20)])
    scores = np.zeros(parents.shape)
    for node in range(12):
        above = np.take_along_axis(scores, parents[:, node : node + 1].clip(min=0), 1)
        above = np.where(parents[:, node] >= 0, above[:, 0], 0.0)
        scores[:, node] = above - rng.choice([0.0, 0.1, 1.0], size=20)
    found = have_likelier_siblings(parents, scores)
    for tree, values, more in zip(parents, scores, found, strict=True):
        order = np.argsort(-values, kind="stable")
        for count in range(13):
            kept = np.sort(order[:count])
            place = {int(node): new for new, node in enumerate(kept)} | {-1: -1}
            part = np.array([[place[int(p)] for p in tree[kept]]], dtype=int)
            runs = depth_first(part)[0] if count else kept
            new = np.argsort(runs)
            above = part[0][runs]
            sent = np.where(above >= 0, new[above.clip(min=0)], -1) if count else above
            assert (
                num_branches(np.array(sent, dtype=int).reshape(-1)) == more[kept].sum()
            )
