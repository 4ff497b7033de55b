"""The examples run as they stand, on fixture models."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("vllm")
ROOT = Path(__file__).parent.parent


@pytest.mark.engine
@pytest.mark.parametrize("shape", ["chain", "tree"])
def test_offline_example_drafts_and_accepts(
    models: Callable[[str], Path], shape: str
) -> None:
    command = [sys.executable, "examples/offline.py", "--shape", shape]
    command += ["--target", str(models("f2")), "--head", str(models("h2"))]
    done = subprocess.run(
        [*command, "--max-tokens", "24", "--eager"],
        cwd=ROOT,
        env=dict(os.environ),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    line = done.stdout.strip().splitlines()[-1]
    # The exact head is right on every draft: 5 in a chain, 2 in so bushy a tree.
    assert line.startswith("acceptance length")
    assert float(line.split()[2]) > 2.5
