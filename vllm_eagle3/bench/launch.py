"""The environment of an engine process: threads, libraries, and who is switched on.

All of it has to be there before Python starts, which is why methods are processes.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from vllm_eagle3 import preload
from vllm_eagle3.bench.methods import Method
from vllm_eagle3.engine import EngineMode

KV_CACHE_GIB = 1  # per engine, by default; several are loaded at once


def worker_environ(
    method: Method,
    mode: EngineMode,
    base: Mapping[str, str] | None = None,
    kv_cache_gib: int = KV_CACHE_GIB,
) -> dict[str, str]:
    """The environment for a method's process.

    `kv_cache_gib` is the KV cache of an engine on a CPU; what the user's environment
    says goes before it.

    Stock methods run with this package off but for those patches without which vLLM's
    own text is wrong on a CPU (`for_baselines` in `integration/patches.py`).
    """
    environ = dict(os.environ if base is None else base)
    environ.pop("VLLM_EAGLE3_CPU_FIXES", None)
    environ["VLLM_EAGLE3"] = "1" if method.is_ours else "0"
    if not method.is_ours:
        environ["VLLM_EAGLE3_CPU_FIXES"] = "1"
    environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1" if mode.separate_process else "0"
    environ.setdefault("VLLM_CPU_KVCACHE_SPACE", str(kv_cache_gib))
    environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    environ.setdefault("VLLM_LOGGING_LEVEL", "INFO")
    environ["HF_HUB_OFFLINE"] = "1"  # targets and heads are directories
    environ["OMP_NUM_THREADS"] = str(mode.threads or available_cores())
    if mode.separate_process:
        # vLLM would keep a core for its scheduler, which sleeps while the model runs.
        environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    environ["KMP_BLOCKTIME"] = str(mode.block_time_ms)
    if mode.preload:
        return preload.child_environment(environ)
    environ.pop("LD_PRELOAD", None)
    return environ


def available_cores() -> int:
    """Physical cores this process may use; fewer than the machine's in a container.

    Two hardware threads of a core share what a matrix product needs, so a second
    OpenMP thread on it only waits.
    """
    return len({_core(cpu) for cpu in os.sched_getaffinity(0)})


def _core(cpu: int) -> str:
    topology = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
    return topology.read_text() if topology.is_file() else str(cpu)
