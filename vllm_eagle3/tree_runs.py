"""A draft tree as causal runs: how attention without masks verifies a tree.

In depth-first order every node that does not follow its parent starts a new run, a
piece of one root-to-leaf path:

    root ─┬─ 0 "the" ─┬─ 1 "cat"       rows        root  0   1   2   3
          │           └─ 2 "dog"       runs        root  0   1 | 2 | 3
          └─ 3 "a"

To a causal kernel each run is a sequence of its own: run `2` has the prefix and
root, 0, 2 as its keys and only 2 as its query. The first run lies where a plain run
would lie. Every other run (a branch) reads the last, partly filled block of the prefix
and its own path from scratch blocks, so no kernel is changed and every layout, dtype
and feature of the kernel (windows, soft caps, grouped heads) is kept.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

Array = np.ndarray


@dataclass(frozen=True)
class TreeBatch:
    """The rows of one step, some requests with trees; host arrays.

    Attributes:
        starts: [num_reqs + 1], first row of each request.
        contexts: [num_reqs], tokens in the cache before each request's first row.
        depths: [num_rows], offset of each row's position from its context.
        run_starts: [num_runs + 1], first row of each run.
        run_request: [num_runs] -> request.
        branch_runs: [num_branches] -> run.
        branch_paths: [num_branches, longest], rows from the root to the run's last
            row, padded with -1.
    """

    starts: Array
    contexts: Array
    depths: Array
    run_starts: Array
    run_request: Array
    branch_runs: Array
    branch_paths: Array

    @property
    def seq_lens(self) -> Array:
        """[num_runs]: keys that each run's last row sees."""
        last = self.run_starts[1:] - 1
        return self.contexts[self.run_request] + self.depths[last] + 1

    @property
    def branch_lengths(self) -> Array:
        """[num_branches]: rows on each branch's path, the root included."""
        return (self.branch_paths >= 0).sum(1)


@dataclass(frozen=True)
class ScratchPlan:
    """What one layer's cache needs before attention, and the block table to read.

    Attributes:
        block_table: [num_runs, width]: block ids of each run.
        copy_from, copy_to: block ids; prefixes' partial blocks go to scratch.
        rows, slots: [num_writes]: rows whose keys and values go to scratch slots.
    """

    block_table: Array
    copy_from: Array
    copy_to: Array
    rows: Array
    slots: Array


def depth_first(parents: Array) -> Array:
    """Order of the nodes of each tree such that children follow parents at once.

    Args:
        parents: [num_reqs, num_nodes], parents before children; -1 is the root.

    Returns:
        [num_reqs, num_nodes]: old index of each node in the new order.
    """
    paths = lineage(parents)  # ancestors by depth, -1 where the path has ended
    # A path sorts before its continuations, and siblings by their old index.
    keys = np.moveaxis(paths[..., 1:], -1, 0)[::-1]
    return np.lexsort(keys, axis=-1)


def lineage(parents: Array) -> Array:
    """Rows from the root to each node, by depth: [num_reqs, num_nodes, deepest + 1].

    Row 0 is the root, row i + 1 is node i; -1 behind the node itself.
    """
    num_reqs, num_nodes = parents.shape
    upward = [np.broadcast_to(np.arange(1, num_nodes + 1), parents.shape)]
    parent_rows = np.concatenate([np.zeros((num_reqs, 1), int), parents + 1], axis=1)
    while (upward[-1] > 0).any():
        upward.append(np.take_along_axis(parent_rows, upward[-1], axis=1))
    steps = np.stack(upward, axis=-1)  # node, parent, ..., root, root, ...
    depth = (steps > 0).sum(-1, keepdims=True)
    index = depth - np.arange(steps.shape[-1])
    found = np.take_along_axis(steps, index.clip(min=0), axis=-1)
    return np.where(index >= 0, found, -1)


def batch_trees(starts: Array, contexts: Array, trees: dict[int, Array]) -> TreeBatch:
    """Lay a step's rows out as runs.

    Args:
        starts: [num_reqs + 1], first row of each request.
        contexts: [num_reqs], tokens before the first row.
        trees: request -> parents of its nodes in depth-first order; the request's
            rows are the root and then the nodes. Others are plain causal rows.
    """
    num_rows = int(starts[-1])
    begins = np.zeros(num_rows, dtype=bool)
    begins[starts[:-1][starts[:-1] < num_rows]] = True
    depths = np.arange(num_rows) - np.repeat(starts[:-1], np.diff(starts))
    requests = np.fromiter(trees, int, len(trees))
    sizes = np.array([len(parents) for parents in trees.values()], int)
    padded = _pad(list(trees.values()), sizes)
    paths = lineage(padded)
    used = np.arange(padded.shape[1]) < sizes[:, None]
    rows = starts[requests][:, None] + 1 + np.arange(padded.shape[1])
    depths[rows[used]] = (paths >= 0).sum(-1)[used] - 1
    follows = padded == np.arange(-1, padded.shape[1] - 1)
    begins[rows[used & ~follows]] = True
    run_starts = np.append(np.flatnonzero(begins), num_rows)
    run_request = np.searchsorted(starts, run_starts[:-1], side="right") - 1
    branches = np.flatnonzero(starts[run_request] != run_starts[:-1])
    tree_of = np.zeros(len(starts), int)
    tree_of[requests] = np.arange(len(requests))
    owner = run_request[branches]
    last_node = run_starts[branches + 1] - 2 - starts[owner]
    relative = paths[tree_of[owner], last_node]
    return TreeBatch(
        starts,
        contexts,
        depths,
        run_starts,
        run_request,
        branches,
        np.where(relative >= 0, relative + starts[owner][:, None], -1),
    )


def _pad(trees: list[Array], sizes: Array) -> Array:
    """Parents side by side; padding nodes hang on the root."""
    padded = np.full((len(trees), int(sizes.max())), -1)
    for row, parents in zip(padded, trees, strict=True):
        row[: len(parents)] = parents
    return padded


def num_branches(parents: Array) -> int:
    """Runs of one depth-first tree that need scratch blocks."""
    return int((parents != np.arange(-1, len(parents) - 1)).sum())


def have_likelier_siblings(
    parents: Array,  # [num_reqs, num_nodes], -1 for the root and for padding
    scores: Array,  # [num_reqs, num_nodes]
) -> Array:
    """Nodes that are a branch more once they are verified, bool [num_reqs, num_nodes].

    Of the likeliest nodes of a tree, the first child of each parent goes on with its
    parent's run, and every other child begins one.
    """
    order = np.argsort(-scores, axis=1, kind="stable")
    family = np.take_along_axis(parents, order, axis=1)
    family += np.arange(len(parents))[:, None] * (parents.shape[1] + 1)
    _, first = np.unique(family, return_index=True)
    later = np.ones(family.size, dtype=bool)
    later[first] = False
    found = np.empty(parents.shape, dtype=bool)
    np.put_along_axis(found, order, later.reshape(parents.shape), axis=1)
    return found


def blocks_per_branch(longest_path: int, block_size: int) -> int:
    """Scratch blocks that hold any path of so many rows, wherever the prefix ends."""
    return (longest_path + block_size - 2) // block_size + 1


def plan_scratch(
    batch: TreeBatch,
    block_table: Array,  # [num_reqs, width]
    block_size: int,
    scratch: Array,  # [at least num_branches, blocks_per_branch], block ids
) -> ScratchPlan:
    """Give every branch scratch blocks in place of the blocks behind its prefix."""
    table = block_table[batch.run_request].copy()
    num = len(batch.branch_runs)
    owner = batch.run_request[batch.branch_runs]
    context, scratch = batch.contexts[owner], scratch[:num]
    first_block = context // block_size
    end = context + batch.branch_lengths
    column = first_block[:, None] + np.arange(scratch.shape[1])
    needed = column * block_size < end[:, None]
    branch, offset = np.nonzero(needed)
    table[batch.branch_runs[branch], column[branch, offset]] = scratch[branch, offset]
    partial = np.flatnonzero(context % block_size)
    branch, place = np.nonzero(batch.branch_paths >= 0)
    position = context[branch] + place
    block = scratch[branch, position // block_size - first_block[branch]]
    return ScratchPlan(
        table,
        block_table[owner[partial], first_block[partial]],
        scratch[partial, 0],
        batch.branch_paths[branch, place],
        block * block_size + position % block_size,
    )


def plan_commit(
    batch: TreeBatch,
    plan: ScratchPlan,
    block_table: Array,
    block_size: int,
    last_rows: dict[int, int],
) -> tuple[Array, Array]:
    """Blocks to copy so that accepted paths lie where a plain run has them.

    Args:
        last_rows: request -> row of its last accepted node (or of its root).

    Returns:
        (from, to): block ids. Paths inside a first run lie right already.
    """
    requests = np.fromiter(last_rows, int, len(last_rows))
    rows = np.fromiter(last_rows.values(), int, len(last_rows))
    runs = np.searchsorted(batch.run_starts, rows, side="right") - 1
    moved = np.flatnonzero(batch.run_starts[runs] != batch.starts[requests])
    requests, runs = requests[moved], runs[moved]
    first = batch.contexts[requests] // block_size
    last = (batch.contexts[requests] + batch.depths[rows[moved]]) // block_size
    column = first[:, None] + np.arange(int((last - first).max(initial=-1)) + 1)
    which, offset = np.nonzero(column <= last[:, None])
    columns = column[which, offset]
    return plan.block_table[runs[which], columns], block_table[requests[which], columns]
