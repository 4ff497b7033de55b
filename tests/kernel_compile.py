"""Compiles the kernel to machine code for a GPU that need not be there.

python -m tests.kernel_compile DTYPE HEAD_DIM PAIRS CAPABILITY SOFTCAP WINDOW SPLITS

prints the bytes of shared memory that a block needs.
"""

from __future__ import annotations

import sys

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from vllm_eagle3.kernels import tree_attention as kernel

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def argument_types(names: list[str], dtype: str, splits: int) -> dict[str, str]:
    """Triton's name for the type of each argument that is not a constant."""
    pointers = dict.fromkeys(("q_ptr", "k_ptr", "v_ptr"), f"*{dtype}")
    pointers |= {"lse_ptr": "*fp32", "bits_ptr": "*i64"}
    pointers["out_ptr"] = "*fp32" if splits > 1 else f"*{dtype}"
    return {
        name: pointers.get(name, "*i32" if name.endswith("_ptr") else "i32")
        for name in names
    } | {"scale": "fp32"}


def compile_for(
    dtype: str,
    head_dim: int,
    pairs: int,
    capability: int,
    softcap: float,
    window: int,
    splits: int,
) -> int:
    tiles = kernel.tile_sizes(pairs, head_dim, DTYPES[dtype].itemsize)
    options = {key: tiles.pop(key) for key in ("num_warps", "num_stages")}
    constants = {
        "NUM_HEADS": 32,
        "GROUP": 4,
        "HEAD_DIM": head_dim,
        "BLOCK_SIZE": 16,
        "SOFTCAP": softcap,
        "WINDOW": window,
        "NUM_SPLITS": splits,
        "DOT_DTYPE": kernel.dot_dtype(DTYPES[dtype]),
        **tiles,
    }
    names = kernel._tree_attention_kernel.arg_names
    types = argument_types(names, dtype, splits) | dict.fromkeys(constants, "constexpr")
    # What a launch finds out by itself: tensors and strides are multiples of 16.
    aligned = [n for n in names if n in ("q_ptr", "k_ptr", "v_ptr", "out_ptr")]
    aligned += [n for n in names if n.startswith(("stride_q", "stride_k", "stride_v"))]
    source = ASTSource(
        fn=kernel._tree_attention_kernel,
        signature=types,
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    target = GPUTarget("cuda", capability, 32)
    if splits > 1:
        compile_merge(dtype, head_dim, splits, target)
    return triton.compile(source, target=target, options=options).metadata.shared


def compile_merge(dtype: str, head_dim: int, splits: int, target: GPUTarget) -> None:
    constants = {
        "HEAD_DIM": head_dim,
        "NUM_SPLITS": splits,
        "BLOCK_D": triton.next_power_of_2(head_dim),
    }
    names = kernel._merge_splits_kernel.arg_names
    types = {"out_ptr": f"*{dtype}", "partial_ptr": "*fp32", "lse_ptr": "*fp32"}
    source = ASTSource(
        fn=kernel._merge_splits_kernel,
        signature=types | {"num_pairs": "i32"} | dict.fromkeys(constants, "constexpr"),
        constexprs={(names.index(name),): value for name, value in constants.items()},
    )
    triton.compile(source, target=target)


if __name__ == "__main__":
    dtype, head_dim, pairs, capability, softcap, window, splits = sys.argv[1:]
    print(
        compile_for(
            dtype,
            int(head_dim),
            int(pairs),
            int(capability),
            float(softcap),
            int(window),
            int(splits),
        )
    )
