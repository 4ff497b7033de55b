"""Check the Triton kernel of tree attention on a GPU against PyTorch, then time it.

    python examples/check_tree_attention_gpu.py

Ends with an error where the kernel and the reference differ, where a call waits for the
device, or where a CUDA graph replays something else. Times are medians in microseconds
of one layer's attention, beside PyTorch's own attention on keys that are gathered to a
dense tensor first. It needs a CUDA device, torch with Triton, and no vLLM.
"""

from __future__ import annotations

import itertools
import sys
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F

from vllm_eagle3.tree_attention import (
    gather_positions,
    reference_tree_attention,
    tree_attention,
)
from vllm_eagle3.tree_bits import ancestor_bits, visible_keys

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
BLOCK_SIZE = 16

_T = torch.Tensor
# q, k_cache, v_cache, block_table, context_lens, query_start_loc, ancestor_bits
Arguments = tuple[_T, _T, _T, _T, _T, _T, _T]


@dataclass(frozen=True)
class Shape:
    """Heads of a layer, and the requests that it sees."""

    contexts: tuple[int, ...]
    num_nodes: int
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    dtype: torch.dtype = torch.bfloat16


def random_batch(shape: Shape, device: str) -> Arguments:
    """A random tree for every request, and blocks in random order."""
    num_reqs, num_rows = len(shape.contexts), shape.num_nodes + 1
    num_blocks = -(-(max(shape.contexts) + num_rows) // BLOCK_SIZE)
    table = torch.randperm(num_reqs * num_blocks, device=device).int()
    # Key and value of a block lie side by side, as vLLM has them.
    cache = torch.randn(
        (table.numel(), 2, BLOCK_SIZE, shape.num_kv_heads, shape.head_dim),
        device=device,
        dtype=shape.dtype,
    )
    q = torch.randn(
        (num_reqs * num_rows, shape.num_heads, shape.head_dim),
        device=device,
        dtype=shape.dtype,
    )
    nodes = torch.arange(shape.num_nodes, device=device)
    parents = (
        torch.rand(num_reqs, shape.num_nodes, device=device) * (nodes + 1)
    ).long()
    return (
        q,
        cache[:, 0],
        cache[:, 1],
        table.view(num_reqs, num_blocks),
        torch.tensor(shape.contexts, device=device, dtype=torch.int32),
        torch.arange(num_reqs + 1, device=device, dtype=torch.int32) * num_rows,
        ancestor_bits(parents - 1),
    )


def check(shape: Shape, softcap: float, window: int | None, device: str) -> None:
    """Raise AssertionError where kernel and reference differ."""
    args = random_batch(shape, device)
    options = (shape.head_dim**-0.5, softcap, window)
    expected = reference_tree_attention(*args, *options)
    tree_attention(*args, *options)  # compiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    out = tree_attention(*args, *options)
    torch.cuda.set_sync_debug_mode("default")
    limit = TOLERANCE[shape.dtype]
    torch.testing.assert_close(out, expected, atol=limit, rtol=limit)


def check_all(device: str) -> int:
    """Check every combination; return how many there were."""
    combinations = itertools.product(
        [torch.bfloat16, torch.float16, torch.float32],
        [32, 64, 80, 96, 128, 256],
        [(4, 4), (9, 3), (32, 8)],
        [(0.0, None), (30.0, None), (0.0, 5), (0.0, 700)],
        [((1023,), 7), ((15, 2050, 16, 0, 17), 64)],
    )
    count = 0
    for dtype, head_dim, heads, (softcap, window), (contexts, nodes) in combinations:
        shape = Shape(contexts, nodes, *heads, head_dim, dtype)
        try:
            check(shape, softcap, window, device)
        except AssertionError as error:
            sys.exit(f"{shape}, softcap={softcap}, window={window}: {error}")
        count += 1
    return count


def check_graph(device: str) -> None:
    """A captured call must follow new contents of its arguments."""
    shape = Shape((300, 1000), 16)
    args, scale = random_batch(shape, device), shape.head_dim**-0.5
    tree_attention(*args, scale)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = tree_attention(*args, scale)
    contexts, bits = args[4], args[6]
    contexts -= 100
    bits.copy_(bits.flip(0))
    graph.replay()
    limit = TOLERANCE[shape.dtype]
    expected = reference_tree_attention(*args, scale)
    torch.testing.assert_close(out, expected, atol=limit, rtol=limit)


def dense_attention(args: Arguments, mask: torch.Tensor) -> torch.Tensor:
    """PyTorch's attention on gathered keys, for requests of one length."""
    q, k_cache, v_cache, table, *_ = args
    num_reqs, num_rows, num_keys = mask.shape
    positions = torch.arange(num_keys, device=q.device)
    k, v = (
        torch.stack([gather_positions(cache, blocks, positions) for blocks in table])
        for cache in (k_cache, v_cache)
    )
    return F.scaled_dot_product_attention(
        q.view(num_reqs, num_rows, *q.shape[1:]).transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=mask[:, None],
        enable_gqa=True,
    )


def time_all(device: str) -> None:
    from triton.testing import do_bench

    print("requests  context  nodes  kernel  dense PyTorch")
    for num_reqs, context, nodes in itertools.product(
        [1, 8, 32], [256, 1024, 4096, 16384], [8, 16, 64]
    ):
        shape = Shape((context,) * num_reqs, nodes)
        args, scale = random_batch(shape, device), shape.head_dim**-0.5
        mask = torch.stack([visible_keys(b, context, None)[0] for b in args[6]])
        ours = do_bench(partial(tree_attention, *args, scale), quantiles=[0.5])
        dense = do_bench(partial(dense_attention, args, mask), quantiles=[0.5])
        print(
            f"{num_reqs:8d}  {context:7d}  {nodes:5d}  "
            f"{1000 * ours:6.0f}  {1000 * dense:13.0f}"
        )


def main() -> None:
    if not torch.cuda.is_available():
        sys.exit("no CUDA device: the kernel is checked without one by `make test`")
    import triton

    torch.manual_seed(0)
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, "
        f"triton {triton.__version__}, blocks of {BLOCK_SIZE}"
    )
    print(f"{check_all('cuda')} combinations equal the reference")
    check_graph("cuda")
    print("a CUDA graph replays with new contexts and trees")
    print(f"times for {Shape((), 0)}")
    time_all("cuda")


if __name__ == "__main__":
    main()
