"""A head's folder on disk: config.json and safetensors, read loudly, written whole."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


@dataclass(frozen=True)
class HeadFiles:
    """What a head's folder holds, uninterpreted."""

    path: Path
    config: dict[str, Any]
    tensors: dict[str, torch.Tensor]


def read_head_files(head_dir: str | os.PathLike[str]) -> HeadFiles:
    """Read config.json and every tensor.

    Raises:
        ValueError: a missing, broken or unsafe file, with its name and the remedy.
    """
    path = Path(head_dir)
    config = read_config(path, "head")
    tensors: dict[str, torch.Tensor] = {}
    for file in _weight_files(path, "head"):
        with _open_safetensors(file) as stored:
            for name in stored.keys():  # noqa: SIM118 (not a dict)
                if name in tensors:
                    raise ValueError(
                        f"{name}: stored twice, the second time in {file}; "
                        "remove the file that does not belong to the head"
                    )
                tensors[name] = stored.get_tensor(name)
    return HeadFiles(path, config, tensors)


def read_config(folder: Path, owner: str) -> dict[str, Any]:
    """config.json of a head or target folder; ValueError if missing or broken."""
    if not folder.is_dir():
        raise ValueError(f"{owner}: {folder} is no folder; give the {owner}'s folder")
    file = folder / CONFIG_FILE
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ValueError(
            f"{owner}: {file} is missing; give the folder of a complete {owner}"
        ) from error
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(
            f"{owner}: {file} cannot be read as JSON ({error}); fetch it again"
        ) from error
    if not isinstance(config, dict):
        raise ValueError(
            f"{owner}: {file} holds a {type(config).__name__}, want an object"
        )
    return config


def read_target_tensor(target_dir: Path, names: tuple[str, ...]) -> torch.Tensor | None:
    """The first of `names` that the target's weights hold, else None."""
    files = _weight_files(target_dir, "target")
    for name in names:
        for file in files:
            with _open_safetensors(file) as stored:
                if name in stored.keys():  # noqa: SIM118 (not a dict)
                    return stored.get_tensor(name)
    return None


def write_head_files(
    head_dir: str | os.PathLike[str],
    config: Mapping[str, Any],
    tensors: Mapping[str, torch.Tensor],
) -> None:
    """Write a head's folder, all of it or nothing.

    The files are made in a sibling folder that then takes the place of `head_dir`,
    so a reader never meets half a head and an interrupted run leaves the old one.

    Raises:
        ValueError: `head_dir` exists and holds anything but a head.
    """
    path = Path(head_dir)
    _require_replaceable(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    try:
        fresh.chmod(0o755)
        # Clones, because safetensors refuses tensors that share memory.
        stored = {n: t.detach().cpu().clone() for n, t in tensors.items()}
        save_file(stored, fresh / WEIGHTS_FILE, metadata={"format": "pt"})
        (fresh / WEIGHTS_FILE).chmod(0o644)  # safetensors leaves it to the owner
        text = json.dumps(dict(config), indent=2, sort_keys=True)
        (fresh / CONFIG_FILE).write_text(text + "\n", encoding="utf-8")
        _swap(fresh, path)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def _swap(fresh: Path, path: Path) -> None:
    if not path.exists():
        fresh.rename(path)
        return
    old = Path(tempfile.mkdtemp(prefix=f".{path.name}.old.", dir=path.parent))
    path.rename(old)  # onto an empty folder: one step on POSIX
    try:
        fresh.rename(path)
    except OSError:
        old.rename(path)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _require_replaceable(path: Path) -> None:
    """Refuse to replace a folder that holds files of anything but a head."""
    if not path.exists():
        return
    if not path.is_dir():
        raise ValueError(f"head: {path} is a file, want a folder to write into")
    ours = {CONFIG_FILE, WEIGHTS_FILE}
    if foreign := sorted(f.name for f in path.iterdir() if f.name not in ours):
        raise ValueError(
            f"head: {path} already holds {foreign[:5]}, which writing would delete; "
            "choose another folder or empty it"
        )


def _weight_files(folder: Path, owner: str) -> list[Path]:
    index = folder / INDEX_FILE
    if index.is_file():
        try:
            shards = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (OSError, json.JSONDecodeError, KeyError, AttributeError) as error:
            raise ValueError(
                f"{owner}: {index} is no weight index ({error}); fetch it again"
            ) from error
        if missing := [s for s in shards if not (folder / s).is_file()]:
            raise ValueError(
                f"{owner}: {folder} lacks {missing}, which {INDEX_FILE} lists; "
                "fetch the missing files"
            )
        return [folder / shard for shard in shards]
    if files := sorted(folder.glob("*.safetensors")):
        return files
    if pickles := sorted(f.name for f in folder.glob("*.bin")):
        raise ValueError(
            f"{owner}: {folder} has weights only as {pickles}, which can run code "
            "when read; convert them to safetensors first (torch.load with "
            "weights_only=True, then safetensors.torch.save_file to "
            f"{WEIGHTS_FILE})"
        )
    raise ValueError(
        f"{owner}: {folder} holds no *.safetensors file; "
        f"give the folder of a complete {owner}"
    )


@contextmanager
def _open_safetensors(file: Path) -> Iterator[Any]:
    try:
        with safe_open(file, framework="pt") as stored:
            yield stored
    except (SafetensorError, OSError) as error:
        raise ValueError(
            f"weights: {file} is broken or cut short ({error}); fetch it again"
        ) from error
