"""Three ways for a CPU's attention to verify a tree: python examples/attention_forms.py

    causal   one causal run of as many rows: the floor, and wrong for a tree
    runs     what the engine does: causal runs of vLLM's kernel, whose branches read
             copies of the prefix's last block; with those copies, the scratch writes
             and the copies that commit the accepted path
    mask     gather and unpack the whole context, then PyTorch's attention with a mask

All layers of a target, one request, its cache laid out as vLLM does. Prints medians in
milliseconds and the largest difference between `runs` and `mask`.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable, Iterator

import numpy as np
import torch

from vllm_eagle3 import preload
from vllm_eagle3.integration.block_copies import BlockCopies
from vllm_eagle3.tree_runs import batch_trees, plan_commit, plan_scratch

# Depth first, four children of the root, 16 nodes, depth 5.
PARENTS = np.array([-1, 0, 1, 2, 3, 1, 0, 6, -1, 8, 9, 8, -1, 12, -1, 14])
DEPTH = 5
ISA = "vec"  # whose layout `unpacked` knows


class Case:
    """A request with so much context in `layers` caches, and one step's rows."""

    def __init__(self, arguments: argparse.Namespace, context: int, size: int) -> None:
        self.heads, self.kv_heads, self.width = arguments.heads
        self.size, self.context = size, context
        self.dtype = getattr(torch, arguments.dtype)
        rows = len(PARENTS) + 1
        own = -(-(context + rows) // size)
        branches = int((np.arange(-1, rows - 2) != PARENTS).sum())
        self.scratch = own + np.arange(2 * branches).reshape(branches, 2)
        shape = (arguments.layers, own + 2 * branches, self.kv_heads, 2 * size)
        self.caches = torch.zeros(*shape, self.width, dtype=self.dtype)
        self.table = np.arange(own)[None]
        self.batch = batch_trees(np.array([0, rows]), np.array([context]), {0: PARENTS})
        self.copies = BlockCopies(list(self.caches))
        self.q = self._random(rows, self.heads)
        self.k = self._random(rows, self.kv_heads)
        self.v = self._random(rows, self.kv_heads)
        prefix = self._random(context, self.kv_heads)
        for cache in self.caches:
            self.write(cache, prefix, prefix, torch.arange(context))

    def _random(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, self.width, dtype=self.dtype)

    def write(
        self, cache: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor
    ) -> None:
        from vllm import _custom_ops as ops

        ops.cpu_attn_reshape_and_cache(k, v, *cache.chunk(2, dim=2), slots, ISA)

    def attend(
        self, starts: np.ndarray, lens: np.ndarray, table: np.ndarray
    ) -> Callable[[torch.Tensor], torch.Tensor]:
        """vLLM's kernel over causal runs, for any of the caches."""
        from vllm import _custom_ops as ops

        run_starts, seq_lens, blocks = (
            torch.from_numpy(np.ascontiguousarray(array, np.int32))
            for array in (starts, lens, table)
        )
        plan = ops.cpu_attn_get_scheduler_metadata(
            len(lens), self.heads, self.kv_heads, self.width, seq_lens, self.dtype,
            run_starts, True, -1, ISA, True,
        )  # fmt: skip

        def attention(cache: torch.Tensor) -> torch.Tensor:
            out = torch.empty_like(self.q)
            ops.cpu_attention_with_kv_cache(
                self.q, *cache.chunk(2, dim=2), out, run_starts, seq_lens,
                self.width**-0.5, True, None, -1, blocks, 0.0, plan, None,
            )  # fmt: skip
            return out

        return attention

    def causal(self) -> torch.Tensor:
        rows = len(self.q)
        attention = self.attend(
            np.array([0, rows]), np.array([self.context + rows]), self.table
        )
        slots = self.context + torch.arange(rows)
        for cache in self.caches:
            self.write(cache, self.k, self.v, slots)
            out = attention(cache)
        return out

    def runs(self) -> torch.Tensor:
        batch = self.batch
        plan = plan_scratch(batch, self.table, self.size, self.scratch)
        self._copy(plan.copy_from, plan.copy_to)
        attention = self.attend(batch.run_starts, batch.seq_lens, plan.block_table)
        rows, slots = map(torch.from_numpy, (plan.rows, plan.slots))
        linear = self.context + torch.arange(len(self.q))
        for cache in self.caches:
            self.write(cache, self.k, self.v, linear)
            self.write(cache, self.k[rows], self.v[rows], slots)
            out = attention(cache)
        last = int(batch.run_starts[2]) - 1  # the last row of the first branch
        self._copy(*plan_commit(batch, plan, self.table, self.size, {0: last}))
        return out

    def _copy(self, source: np.ndarray, target: np.ndarray) -> None:
        self.copies.copy(torch.from_numpy(source), torch.from_numpy(target))

    def mask(self) -> torch.Tensor:
        rows, end = len(self.q), self.context + len(self.q)
        seen = torch.eye(rows, dtype=torch.bool)
        seen[:, 0] = True
        for node, parent in enumerate(PARENTS):
            seen[node + 1] |= seen[parent + 1]
        seen = torch.cat([torch.ones(rows, self.context, dtype=torch.bool), seen], 1)
        slots = self.context + torch.arange(rows)
        for cache in self.caches:
            self.write(cache, self.k, self.v, slots)
            k, v = (part[:, :end][None] for part in self._unpacked(cache))
            out = torch.nn.functional.scaled_dot_product_attention(
                self.q.transpose(0, 1)[None], k, v, seen, enable_gqa=True
            )
        return out[0].transpose(0, 1)

    def _unpacked(self, cache: torch.Tensor) -> Iterator[torch.Tensor]:
        """Keys and values of the request, [kv_heads, tokens, width]."""
        k, v = cache[torch.from_numpy(self.table[0])].chunk(2, dim=2)
        k = k.reshape(len(k), self.kv_heads, self.width, self.size)
        yield k.permute(1, 0, 3, 2).reshape(self.kv_heads, -1, self.width)
        yield v.permute(1, 0, 2, 3).reshape(self.kv_heads, -1, self.width)


def _milliseconds(form: Callable[[], torch.Tensor], repeats: int) -> float:
    spent = []
    for _ in range(repeats + 2):
        begun = time.perf_counter()
        form()
        spent.append(time.perf_counter() - begun)
    return 1000 * statistics.median(spent[2:])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--contexts", default="250,1000,4000")
    parser.add_argument("--block-sizes", default="32,128")
    parser.add_argument("--heads", type=int, nargs=3, default=(9, 3, 64))
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--repeats", type=int, default=15)
    arguments = parser.parse_args()
    preload.restart_with_preload()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    print("context  block   causal     runs     mask    apart")
    for context in map(int, arguments.contexts.split(",")):
        for size in map(int, arguments.block_sizes.split(",")):
            case = Case(arguments, context, size)
            forms = (case.causal, case.runs, case.mask)
            times = [_milliseconds(form, arguments.repeats) for form in forms]
            apart = float((case.runs().float() - case.mask().float()).abs().max())
            shown = (f"{value:8.2f}" for value in times)
            print(f"{context:7} {size:6}", *shown, f"{apart:8.4f}")


if __name__ == "__main__":
    main()
