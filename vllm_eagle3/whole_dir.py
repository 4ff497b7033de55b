"""Directories that are either whole or absent, with a manifest to tell.

A directory is filled under a temporary name beside its place, flushed to disk and
renamed, under a lock; a reader therefore never sees a part of it.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vllm_eagle3.wheel_asset import file_sha256

MANIFEST = "vllm_eagle3_manifest.json"
# Larger files are compared by size alone, so that a check takes milliseconds.
_HASH_AT_MOST = 8 << 20


def is_whole(directory: Path, recipe: dict[str, Any]) -> bool:
    """True if `directory` was made by `recipe` and its files are as they were."""
    manifest = _read_manifest(directory)
    if manifest is None or manifest.get("recipe") != recipe:
        return False
    return all(_matches(directory / n, e) for n, e in manifest["files"].items())


def build(
    directory: Path,
    recipe: dict[str, Any],
    fill: Callable[[Path, Path], None],
    bytes_needed: int,
) -> None:
    """Make `directory` whole, unless it is; two processes do the work once.

    Args:
        directory: the place; absent, empty, or an earlier build of ours.
        recipe: what identifies the content, compared with the manifest's.
        fill: called with (directory to fill, scratch directory).
        bytes_needed: disk space for the content and the scratch files.

    Raises:
        ValueError: place taken by other files, not writable, or disk too small.
    """
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        with _lock(directory):
            if is_whole(directory, recipe):
                return
            _check_place(directory)
            _remove_leftovers(directory)
            _check_space(directory.parent, bytes_needed)
            _build_locked(directory, recipe, fill)
    except OSError as error:
        raise ValueError(
            f"{directory}: cannot be written ({error.strerror or error}); choose "
            "another place with --out DIR, or set XDG_CACHE_HOME to a folder with "
            f"{bytes_needed >> 20} MiB to spare"
        ) from error


def _build_locked(
    directory: Path, recipe: dict[str, Any], fill: Callable[[Path, Path], None]
) -> None:
    partial = Path(tempfile.mkdtemp(prefix=_prefix(directory), dir=directory.parent))
    try:
        content, scratch = partial / "content", partial / "scratch"
        content.mkdir()
        scratch.mkdir()
        fill(content, scratch)
        files = sorted(p for p in content.iterdir() if p.is_file())
        entries = {p.name: _entry(p) for p in files}
        manifest = content / MANIFEST
        text = json.dumps({"recipe": recipe, "files": entries}, indent=2)
        manifest.write_text(text + "\n", encoding="utf-8")
        for path in [*files, manifest]:
            path.chmod(0o644)  # safetensors writes 0600
            _flush(path)
        _flush(content)
        _put_in_place(content, directory, partial / "replaced")
        _flush(directory.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _put_in_place(content: Path, directory: Path, replaced: Path) -> None:
    """Rename; an earlier build stays where it was if that fails."""
    if directory.exists():
        os.replace(directory, replaced)
    try:
        os.replace(content, directory)
    except OSError:
        if replaced.exists():
            os.rename(replaced, directory)
        raise


def _read_manifest(directory: Path) -> dict[str, Any] | None:
    try:
        manifest = json.loads((directory / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError):
        return None
    known = isinstance(manifest, dict) and isinstance(manifest.get("files"), dict)
    return manifest if known else None


def _entry(path: Path) -> dict[str, Any]:
    return {"bytes": path.stat().st_size, "sha256": file_sha256(path)}


def _matches(path: Path, entry: dict[str, Any]) -> bool:
    if not path.is_file() or path.stat().st_size != entry["bytes"]:
        return False
    return entry["bytes"] > _HASH_AT_MOST or file_sha256(path) == entry["sha256"]


def _check_place(directory: Path) -> None:
    if not directory.exists() or (directory / MANIFEST).is_file():
        return
    if not directory.is_dir() or any(directory.iterdir()):
        raise ValueError(
            f"{directory}: holds something that this command did not write; choose "
            "an absent or empty folder with --out DIR, or remove it"
        )


def _check_space(parent: Path, bytes_needed: int) -> None:
    free = shutil.disk_usage(parent).free
    if free < bytes_needed:
        raise ValueError(
            f"{parent}: {free >> 20} MiB free, want {bytes_needed >> 20} MiB; free "
            "some space, choose another disk with --out DIR, or set XDG_CACHE_HOME"
        )


def _remove_leftovers(directory: Path) -> None:
    """Clear what a killed run left; the lock says that nobody is using it."""
    for path in directory.parent.glob(f"{_prefix(directory)}*"):
        if path.is_dir():
            shutil.rmtree(path)


def _prefix(directory: Path) -> str:
    return f".{directory.name}.partial-"


@contextmanager
def _lock(directory: Path) -> Iterator[None]:
    path = directory.parent / f".{directory.name}.lock"
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
