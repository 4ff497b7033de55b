"""The Triton kernel compiles for GPUs, which needs none, and fits their memory."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed"
)

# dtype, head size, queries a KV head, compute capability, softcap, window, splits
QUICK = ["bf16 128 68 90 0 0 8"]
ALL = [
    "bf16 64 68 90 0 0 1",
    "bf16 80 20 89 0 0 1",
    "bf16 256 68 80 30 512 8",
    "bf16 256 260 90 0 0 1",
    "fp16 32 260 80 0 0 1",
    "fp32 64 68 80 0 0 1",
    "fp32 128 68 90 0 0 8",
    "fp32 256 68 80 30 512 1",
]
# The least that a block may have on the capabilities above (8.9).
SHARED_MEMORY = 99 * 1024


@pytest.mark.parametrize(
    "target", [*QUICK, *(pytest.param(t, marks=pytest.mark.slow) for t in ALL)]
)
def test_kernel_compiles_and_fits(target: str, tmp_path: Path) -> None:
    # In a process of its own: an interpreting Triton could not compile.
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernel_compile", *target.split()],
        cwd=Path(__file__).parent.parent,
        env={**env, "TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    assert 0 < int(done.stdout) <= SHARED_MEMORY
