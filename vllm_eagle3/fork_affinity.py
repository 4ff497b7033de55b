"""Forked processes keep the CPUs of their parent, Intel's OpenMP or not.

Once a process has used libiomp5, which vLLM wants preloaded on CPUs, that library ties
every process forked from it to one CPU, for it and all it starts. `ray.init()` forks:
the whole cluster would run on one CPU.
"""

from __future__ import annotations

import functools
import os
import sys


@functools.cache
def keep_affinity_over_forks() -> None:
    """From now on; for `os.fork`, and `subprocess` with a `preexec_fn`.

    Hooks of Python run after those of the libraries, so ours has the last word.
    """
    if sys.platform != "linux":
        return
    allowed: set[int] = set()

    def remember() -> None:
        allowed.clear()
        allowed.update(os.sched_getaffinity(0))

    os.register_at_fork(
        before=remember, after_in_child=lambda: os.sched_setaffinity(0, allowed)
    )
