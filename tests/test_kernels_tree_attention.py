"""The Triton kernel equals its reference, in Triton's interpreter; no GPU is needed."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.tree_cases import CASES, make_batch
from vllm_eagle3.tree_attention import reference_tree_attention

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed"
)

# Both compute in fp32 there, so a bf16 result may differ in its last bit only.
TOLERANCE = {torch.float32: (2e-6, 2e-6), torch.bfloat16: (1e-6, 2**-7)}


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """What the kernel says to every case."""
    file = tmp_path_factory.mktemp("kernel") / "out.pt"
    subprocess.run(
        [sys.executable, "-m", "tests.kernel_runs", str(file)],
        cwd=Path(__file__).parent.parent,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        check=True,
        timeout=600,
    )
    return torch.load(file)


@pytest.mark.parametrize("name", CASES)
def test_kernel_equals_reference(name: str, outputs: dict[str, torch.Tensor]) -> None:
    case = CASES[name]
    batch = make_batch(case)
    expected = reference_tree_attention(
        *batch.args, batch.scale, case.softcap, case.sliding_window, case.first_row
    )
    atol, rtol = TOLERANCE[case.dtype]
    torch.testing.assert_close(outputs[name], expected, atol=atol, rtol=rtol)
