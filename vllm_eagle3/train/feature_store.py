"""Features kept on disk, so that the target reads each row once and not every epoch.

A batch whose rows are not all stored goes through the target and becomes one shard:

    DIR/manifest.json          what the features depend on (target, taps, format)
    DIR/ROWS.safetensors       per row: KEY.taps  [tokens, num_taps * hidden]
                                        KEY.last  [supervised, hidden]
                                        KEY.mass  [supervised], fp32: log-sum-exp
                                        KEY.best  [supervised], int64: argmax

States are kept in the target's dtype. The law is rebuilt from `last` on the draft
vocabulary alone; the log-sum-exp over the whole vocabulary was taken once. A shard is
renamed into place when it is whole.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from .data import Batch, Row
from .features import Features, Readings, TargetFeatures

_FORMAT = 1
_MARGIN = 1.1  # room kept beyond the estimate before a run may start


class StoredFeatures:
    """`TargetFeatures` with a memory on disk; called the same way.

    Args:
        target: who reads rows that are not stored yet.
        directory: of the shards; made if missing.

    Raises:
        ValueError: the directory holds features of another target or other taps.
    """

    def __init__(self, target: TargetFeatures, directory: Path | str) -> None:
        self.target = target
        self.directory = Path(directory)
        self.directory.mkdir(parents=True, exist_ok=True)
        self._check_manifest()
        self._shard_of: dict[str, Path] = {}
        self._seen: set[Path] = set()
        self._find_shards()

    def require_room(self, rows: Sequence[Row]) -> int:
        """Return the bytes still to be written for `rows`.

        Raises:
            OSError: the disk has no room for them.
        """
        missing = [row for row in rows if row_key(row) not in self._shard_of]
        needed = sum(self._bytes(row) for row in missing)
        free = shutil.disk_usage(self.directory).free
        if needed * _MARGIN > free:
            raise OSError(
                f"features_dir: {self.directory} needs {needed / 1e9:.1f} GB for "
                f"{len(missing)} rows, and {free / 1e9:.1f} GB are free; choose "
                "another disk, fewer rows, or leave features_dir out (every epoch "
                "then runs the target again)"
            )
        return needed

    def __call__(self, batch: Batch) -> Features:
        if not self._has(batch.rows):
            self._find_shards()  # another rank may have read them by now
        if not self._has(batch.rows):
            self._write(batch.rows, self.target.read(batch))
        return self.target.features(batch, self._read(batch))

    def _has(self, rows: Sequence[Row]) -> bool:
        return all(row_key(row) in self._shard_of for row in rows)

    def _find_shards(self) -> None:
        for shard in sorted(set(self.directory.glob("*.safetensors")) - self._seen):
            with safe_open(shard, "pt") as stored:
                names = stored.keys()
            self._index(shard, {name.split(".")[0] for name in names})

    def _bytes(self, row: Row) -> int:
        width = self.target.lm_head.shape[1]
        state = self.target.model.dtype.itemsize * width
        per_token, per_supervised = state * len(self.target.tap_ids), state + 12
        return per_token * len(row.ids) + per_supervised * row.num_reply_tokens

    def _write(self, rows: Sequence[Row], readings: Readings) -> None:
        """Store the rows that are not stored yet: each has one place."""
        tensors: dict[str, torch.Tensor] = {}
        keys: dict[str, None] = {}  # an ordered set
        begin = 0
        for r, row in enumerate(rows):
            end = begin + row.num_reply_tokens
            key = row_key(row)
            if key not in self._shard_of:
                keys[key] = None
                tensors[f"{key}.taps"] = readings.taps[r, : len(row.ids)].clone()
                tensors[f"{key}.last"] = readings.last[begin:end]
                tensors[f"{key}.mass"] = readings.mass[begin:end]
                tensors[f"{key}.best"] = readings.best[begin:end]
            begin = end
        # Named by content: several ranks may write into one folder.
        name = hashlib.sha256("".join(keys).encode()).hexdigest()[:20]
        shard = self.directory / f"{name}.safetensors"
        partial = shard.with_suffix(f".{os.getpid()}.partial")
        save_file({name: t.contiguous() for name, t in tensors.items()}, partial)
        os.replace(partial, shard)
        self._index(shard, set(keys))

    def _index(self, shard: Path, keys: set[str]) -> None:
        self._seen.add(shard)
        for key in keys:
            self._shard_of.setdefault(key, shard)

    def _read(self, batch: Batch) -> Readings:
        stored = [self._read_row(row) for row in batch.rows]
        taps = torch.nn.utils.rnn.pad_sequence(
            [row["taps"] for row in stored], batch_first=True
        )
        last, mass, best = (
            torch.cat([row[name] for row in stored])
            for name in ("last", "mass", "best")
        )
        return Readings(taps, last, mass, best)

    def _read_row(self, row: Row) -> dict[str, torch.Tensor]:
        key = row_key(row)
        with safe_open(self._shard_of[key], "pt", device=self.target.device) as stored:
            names = ("taps", "last", "mass", "best")
            return {name: stored.get_tensor(f"{key}.{name}") for name in names}

    def _check_manifest(self) -> None:
        path = self.directory / "manifest.json"
        ours = {"format": _FORMAT, **self.target.fingerprint()}
        if not path.is_file():
            path.write_text(json.dumps(ours, indent=2) + "\n", encoding="utf-8")
            return
        theirs: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        for field in sorted(ours.keys() | theirs.keys()):
            if ours.get(field) != theirs.get(field):
                raise ValueError(
                    f"features_dir: {self.directory} was made with {field} "
                    f"{theirs.get(field)}, this run has {ours.get(field)}; choose "
                    "another folder or delete this one"
                )


def row_key(row: Row) -> str:
    """Name of a row's features: its ids and spans, not its place in a file."""
    content = json.dumps([row.ids, [span[:2] for span in row.spans]])
    return hashlib.sha256(content.encode()).hexdigest()[:20]
