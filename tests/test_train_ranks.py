"""Real processes: two ranks learn what one does, and a killed run goes on exactly."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from tests.train_runs import values, write_rows

Models = Callable[[str], Path]
# In fp32, so that two orders of summation can be told from a fault.
SETTINGS = {"accumulate": 2, "precision": "fp32", "epochs": 12.0, "evaluate_every": 4}


def settings(models: Models, rows: Path, out: Path) -> dict[str, Any]:
    # Features are kept, so that they do not depend on the company of a row.
    return values(models, rows, out, **SETTINGS, features_dir=f"{out}-features")


@pytest.fixture(scope="module")
def rows(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rows(models, tmp_path_factory.mktemp("rows") / "rows.jsonl")


@pytest.fixture(scope="module")
def alone(models: Models, rows: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a run in one process, without a stop."""
    folder = tmp_path_factory.mktemp("alone")
    run = settings(models, rows, folder / "out")
    finish(write_config(folder / "run.yaml", run))
    assert checkpoint(folder / "out")["step"] >= 16
    return folder / "out"


def write_config(path: Path, run: dict) -> list[str]:
    path.write_text(yaml.safe_dump(run))
    return ["-m", "vllm_eagle3", "train", "-c", str(path)]


def finish(arguments: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, *arguments],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr


def checkpoint(out: Path) -> dict[str, Any]:
    return torch.load(out / "checkpoint.pt", weights_only=True)


def environment() -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def test_two_ranks_learn_what_one_learns(
    models: Models, rows: Path, alone: Path, tmp_path: Path
) -> None:
    run = settings(models, rows, tmp_path / "out") | {"accumulate": 1}
    command = write_config(tmp_path / "run.yaml", run)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    finish([*torchrun, *command])
    facts = checkpoint(tmp_path / "out")["facts"]
    assert facts["processes"] == 2 and facts["batches_per_step"] == 2
    ours, theirs = checkpoint(tmp_path / "out")["head"], checkpoint(alone)["head"]
    for name, weight in theirs.items():
        assert torch.allclose(ours[name], weight, atol=1e-5), name
    # Weights start as the target's final norm, which is 1, and have moved much further.
    assert (theirs["norm.weight"] - 1).abs().max() > 1e-2


def test_killed_run_goes_on_to_the_very_same_weights(
    models: Models, rows: Path, alone: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    run = settings(models, rows, out)
    command = write_config(tmp_path / "run.yaml", run)
    process = subprocess.Popen([sys.executable, *command], env=environment())
    try:
        wait_for(out / "checkpoint.pt", process)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    stopped = checkpoint(out)["step"]
    # What a kill in the middle of writing leaves behind.
    (out / "checkpoint.partial").write_bytes(b"half")
    finish(command)
    whole, resumed = checkpoint(alone), checkpoint(out)
    assert 0 < stopped < whole["step"] == resumed["step"]
    assert resumed["best"] == whole["best"]
    for name, weight in whole["head"].items():
        assert torch.equal(resumed["head"][name], weight), name
    for key, moments in whole["optimizer"]["state"].items():
        for name, value in moments.items():
            assert torch.equal(resumed["optimizer"]["state"][key][name], value)


def wait_for(path: Path, process: subprocess.Popen) -> None:
    deadline = time.monotonic() + 600
    while not path.is_file():
        assert process.poll() is None, "the run ended before its first checkpoint"
        assert time.monotonic() < deadline
        time.sleep(0.02)
