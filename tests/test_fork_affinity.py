"""A process forked after OpenMP was used runs on the CPUs of its parent."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from vllm_eagle3 import preload

AFFINITY_OF_A_CHILD = """
import os, subprocess, sys, torch
torch.ones(512, 512) @ torch.ones(512, 512)
if sys.argv[1] == "kept":
    from vllm_eagle3.fork_affinity import keep_affinity_over_forks
    keep_affinity_over_forks()
ask = "import os; print(len(os.sched_getaffinity(0)))"
subprocess.run([sys.executable, "-c", ask], preexec_fn=lambda: None, check=True)
"""


def cpus_of_a_child(how: str) -> int:
    environment = preload.child_environment() | {"OMP_NUM_THREADS": "2"}
    environment.pop("KMP_AFFINITY", None)
    command = [sys.executable, "-c", AFFINITY_OF_A_CHILD, how]
    done = subprocess.run(
        command, env=environment, check=True, capture_output=True, text=True
    )
    return int(done.stdout)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one CPU")
@pytest.mark.skipif(
    not any(lib.name == "libiomp5" and lib.path for lib in preload.wanted()),
    reason="Intel's OpenMP is not here",
)
def test_a_forked_process_keeps_its_cpus() -> None:
    assert cpus_of_a_child("as it is") == 1, "the library no longer does this"
    assert cpus_of_a_child("kept") == len(os.sched_getaffinity(0))
