"""The fixture models by name, built in one place.

| name | what it is |
|---|---|
| f1 | random Llama-type target, vocabulary 512: shows faults of KV, mask, position |
| h1 | head overfitted on f1's greedy replies to `random_llama.known_prompts()` |
| h3 | random head for f1: everything is refused |
| f2 | bigram target, vocabulary 128: its law is a formula |
| f3 | f2 with attention: text that depends on the cache, most of it known to h2 |
| h2 | exact head for f2: q = p |
| h4 | h2, but wrong after every odd token |
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import tempfile
from pathlib import Path

import torch
from filelock import FileLock

from tests.models import bigram, random_llama
from vllm_eagle3 import draft_head

NAMES = ("f1", "f2", "f3", "h1", "h2", "h3", "h4")


def build(root: Path, name: str) -> Path:
    """Folder of a fixture below `root`; built whole or not at all, once.

    Raises:
        ValueError: unknown name.
    """
    if name not in NAMES:
        raise ValueError(f"fixture model: got {name!r}, want one of {NAMES}")
    folder = root / name
    if folder.is_dir():
        return folder
    root.mkdir(parents=True, exist_ok=True)
    # Tests run in two processes, and one of them builds.
    with FileLock(root / f".{name}.lock"):
        if not folder.is_dir():
            _build_whole(folder)
    return folder


def _build_whole(folder: Path) -> None:
    root, name = folder.parent, folder.name
    unfinished = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=root))
    threads = torch.get_num_threads()
    # Such small matrices are quickest on one thread.
    torch.set_num_threads(1)
    try:
        _build(unfinished, root, name)
        os.replace(unfinished, folder)
    finally:
        torch.set_num_threads(threads)
        shutil.rmtree(unfinished, ignore_errors=True)


def _build(folder: Path, root: Path, name: str) -> None:
    if name == "h1":
        random_llama.build_h1(folder, build(root, "f1"))
        return
    {
        "f1": random_llama.build_f1,
        "f2": bigram.build_f2,
        "f3": bigram.build_f3,
        "h2": bigram.build_h2,
        "h3": random_llama.build_h3,
        "h4": bigram.build_h4,
    }[name](folder)


def digest() -> str:
    """Name of everything the fixtures depend on, so that a change rebuilds them."""
    sources = [*Path(__file__).parent.glob("*.py"), Path(draft_head.__file__)]
    content = b"".join(path.read_bytes() for path in sorted(sources))
    return hashlib.sha256(content + torch.__version__.encode()).hexdigest()[:16]


if __name__ == "__main__":  # python -m tests.models.builders ROOT NAME...
    for fixture in sys.argv[2:]:
        print(build(Path(sys.argv[1]), fixture))
