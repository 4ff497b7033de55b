"""Checkpoints that are whole or absent, so that a run goes on exactly where it was.

A checkpoint is written beside its place, flushed to disk and renamed over the last
one: whatever kills the run, the file under the final name is the last good one.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch


def save(path: Path, state: dict[str, Any]) -> None:
    """Replace the checkpoint at `path` by `state`.

    Raises:
        ValueError: it could not be written; the one before is untouched.
    """
    partial = path.with_suffix(".partial")
    try:
        with partial.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
        _sync_directory(path.parent)
    # torch reports a failed write of its archive as a RuntimeError.
    except (OSError, RuntimeError) as error:
        partial.unlink(missing_ok=True)
        kept = f"the last good one is {path}" if path.is_file() else "there is none yet"
        raise ValueError(
            f"out: the checkpoint of step {state.get('step')} cannot be written to "
            f"{path.parent} ({error}); {kept}; make room and start the run again, it "
            "goes on from there"
        ) from error


def load(path: Path) -> dict[str, Any] | None:
    """The state at `path`, or None where there is none. Never runs a pickle's code."""
    if not path.is_file():
        return None
    return torch.load(path, weights_only=True, map_location="cpu")


def require_same(path: Path, state: dict[str, Any], ours: dict[str, Any]) -> None:
    """Refuse to go on with a run that was started differently.

    Raises:
        ValueError: each field that differs, with both values.
    """
    theirs: dict[str, Any] = state["identity"]
    differing = [
        f"{field} was {theirs.get(field)}, is {ours.get(field)}"
        for field in sorted(ours.keys() | theirs.keys())
        if ours.get(field) != theirs.get(field)
    ]
    if differing:
        raise ValueError(
            f"{path} belongs to another run: {'; '.join(differing)}; choose another "
            "`out`, or restore what started it"
        )


def _sync_directory(directory: Path) -> None:
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
