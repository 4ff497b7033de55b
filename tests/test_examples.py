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


@pytest.mark.engine
@pytest.mark.slow
def test_step_cost_has_a_line_for_every_size(models: Callable[[str], Path]) -> None:
    command = [sys.executable, "examples/step_cost.py", "--eager", "--steps", "3"]
    command += ["--target", str(models("f2")), "--head", str(models("h2"))]
    done = subprocess.run(
        [*command, "--rows", "1,5,9", "--contexts", "40,80"],
        cwd=ROOT,
        env=dict(os.environ),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [line.split() for line in done.stdout.splitlines()]
    lines = lines[lines.index(next(n for n in lines if n[:1] == ["context"])) + 1 :]
    sizes = [(int(line[0]), int(line[1])) for line in lines]
    assert sizes == [(c, r) for c in (40, 80) for r in (1, 5, 9)]
    for line in lines:
        *parts, step = map(float, line[2:])
        assert min(parts) >= 0
        assert sum(parts) == pytest.approx(step, abs=0.1)


@pytest.mark.engine
def test_record_example_feeds_the_simulator(
    models: Callable[[str], Path], tmp_path: Path
) -> None:
    from vllm_eagle3.recording import ACCEPTANCE, STEPS
    from vllm_eagle3.simulate import read_traces

    prompts, folder = tmp_path / "prompts.txt", tmp_path / "record"
    prompts.write_text("What is a fox?\nName a river.\n")
    command = [sys.executable, "examples/record.py", str(folder), "--eager"]
    command += ["--target", str(models("f2")), "--head", str(models("h2"))]
    command += ["--prompts", str(prompts), "--batch", "1,3", "--max-tokens", "40"]
    done = subprocess.run(
        command, cwd=ROOT, env=dict(os.environ), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    drafts = read_traces(folder / ACCEPTANCE)
    assert {len(draft.scores) for draft in drafts} == {16}
    assert sum(int(draft.accepted.sum()) for draft in drafts) > len(drafts)
    assert len((folder / STEPS).read_text().splitlines()) > 10
