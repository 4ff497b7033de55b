"""Runs the Triton kernel over all cases; a process of its own, because Triton decides
at its import whether it interprets.

    TRITON_INTERPRET=1 python -m tests.kernel_runs OUT_FILE
"""

from __future__ import annotations

import sys

import torch

from tests.tree_cases import CASES, Case, make_batch
from vllm_eagle3.kernels import tree_attention as kernel


def run(case: Case) -> torch.Tensor:
    batch = make_batch(case)
    kernel.num_splits = lambda *_: case.splits
    return kernel.tree_attention(
        *batch.args, batch.scale, case.softcap, case.sliding_window, case.first_row
    )


if __name__ == "__main__":
    torch.save({name: run(case) for name, case in CASES.items()}, sys.argv[1])
