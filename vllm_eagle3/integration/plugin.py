"""Entry point `vllm.general_plugins`: runs once in every process of vLLM.

It never raises and touches no device. Environment:

* `VLLM_EAGLE3=0` switches the package off;
* `VLLM_EAGLE3_CPU_FIXES=1` then still applies the fixes that stock baselines need to
  be lossless on a CPU.

Two copies of the package in one process (an upgrade under a running notebook, a
checkout before an installed copy) would wrap vLLM twice; the second one stays out.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import NamedTuple

from .. import __version__

# Not vLLM's logger: this module is imported before vLLM has set up its own, and must
# import nothing heavy when the package is switched off.
logger = logging.getLogger("vllm.vllm_eagle3")


class HookStatus(NamedTuple):
    """One hook or patch: its name, whether it is active, and why (not)."""

    name: str
    active: bool
    reason: str


_status: list[HookStatus] = []
# Where the copy that hooks a process leaves its name: an attribute of vLLM's package.
_MARK = "_hooked_by_vllm_eagle3"


def register() -> None:
    """Install the hooks; idempotent."""
    if _status:
        return
    # Whatever goes wrong in a vLLM that we do not know must not stop it from starting.
    try:
        _status.extend(_install())
    except Exception as error:
        logger.exception("vllm_eagle3 is inactive: its hooks could not be installed")
        _status.append(HookStatus("vllm_eagle3", False, f"{error!r}"))


def status() -> list[HookStatus]:
    """State of every hook and patch in this process; installs them first."""
    register()
    return list(_status)


def _install() -> list[HookStatus]:
    if os.environ.get("VLLM_EAGLE3", "1") == "0":
        off = HookStatus("vllm_eagle3", False, "switched off by VLLM_EAGLE3=0")
        if os.environ.get("VLLM_EAGLE3_CPU_FIXES", "0") != "1":
            return [off]
        from .patches import apply_cpu_fixes

        return [off, *(HookStatus(*patch) for patch in apply_cpu_fixes())]

    if first := _other_copy():
        logger.error("vllm_eagle3 stays out of this process: %s", first)
        return [HookStatus("vllm_eagle3", False, first)]

    from . import engine_config, fingerprints
    from .patches import apply_all

    mismatches = fingerprints.check()
    engine_config.install(unsupported=_explain(mismatches))
    hooks = HookStatus(
        "engine hooks",
        not mismatches,
        _explain(mismatches) or "every overridden function is as tested",
    )
    return [hooks, *(HookStatus(*patch) for patch in apply_all())]


def _other_copy() -> str:
    """Why another load of this package has this process; empty if it is ours now."""
    import vllm

    mine = f"{__version__} ({Path(__file__).parents[1]})"
    first = vars(vllm).setdefault(_MARK, (mine, _status))
    if first[1] is _status:
        return ""
    return (
        f"vLLM is hooked by version {first[0]} already, this is {mine}; start a new "
        "process, and keep one of two installed copies"
    )


def _explain(mismatches: list) -> str:
    """One line on why this vLLM cannot be driven; empty if it can."""
    if not mismatches:
        return ""
    names = ", ".join(f"{m.function} {m.problem}" for m in mismatches[:3])
    more = f" and {len(mismatches) - 3} more" if len(mismatches) > 3 else ""
    return f"vLLM {mismatches[0].version} is not one that was tested: {names}{more}"
