"""Stored features equal those of the target, outlive the process, and are guarded."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest
import torch

from vllm_eagle3.train.data import Batch, Row, collate
from vllm_eagle3.train.feature_store import StoredFeatures
from vllm_eagle3.train.features import Features, Readings, TargetFeatures
from vllm_eagle3.vocab import DraftVocab

Models = Callable[[str], Path]
TAPS = (1, 3, 5)


def some_rows(count: int) -> list[Row]:
    rng = random.Random(0)
    rows = []
    for _ in range(count):
        prompt, reply = rng.randint(2, 9), rng.randint(2, 20)
        ids = tuple(rng.randrange(3, 200) for _ in range(prompt + reply))
        rows.append(Row("x", ids, ((prompt, prompt + reply, 0.0),)))
    return rows


def target_of(
    models: Models,
    taps: tuple[int, ...] = TAPS,
    dtype: torch.dtype = torch.bfloat16,
) -> TargetFeatures:
    vocab = DraftVocab(torch.arange(0, 100, 2), 256)
    return TargetFeatures(models("f1"), taps, vocab, dtype)


def same(ours: Features, theirs: Features, batch: Batch) -> None:
    real = torch.arange(batch.ids.shape[1]) < batch.lengths[:, None]
    assert torch.equal(ours.taps[real], theirs.taps[real])
    assert not ours.taps[~real].any(), "padding is zero"
    for name in ("embeds", "law", "best", "law_row"):
        assert torch.equal(getattr(ours, name), getattr(theirs, name)), name


def alike(ours: Features, theirs: Features, batch: Batch) -> None:
    """As read in other company: CPUs may round by the rows of a product."""
    real = torch.arange(batch.ids.shape[1]) < batch.lengths[:, None]
    close = {"rtol": 1e-3, "atol": 1e-3}
    torch.testing.assert_close(ours.taps[real], theirs.taps[real], **close)
    torch.testing.assert_close(ours.law, theirs.law, **close)
    for name in ("embeds", "best", "law_row"):
        assert torch.equal(getattr(ours, name), getattr(theirs, name)), name


def unreadable(batch: Batch) -> NoReturn:
    raise AssertionError("the target was asked again")


def test_features_come_back_as_the_target_gave_them(
    models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, target = some_rows(7), target_of(models, dtype=torch.float32)
    StoredFeatures(target, tmp_path)(collate(rows[:4]))
    StoredFeatures(target, tmp_path)(collate(rows[4:]))
    again = StoredFeatures(target, tmp_path)
    # Rows that were stored together come back in any company.
    for mixed in ([rows[5], rows[0], rows[2]], rows[::-1]):
        batch = collate(mixed)
        expected = target(batch)
        with monkeypatch.context() as patch:
            patch.setattr(target, "read", unreadable)
            alike(again(batch), expected, batch)


def test_a_torn_shard_is_never_picked_up(
    models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, batch = target_of(models), collate(some_rows(3))

    def torn(tensors: object, path: Path) -> NoReturn:
        path.write_bytes(b"half")
        raise OSError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr("vllm_eagle3.train.feature_store.save_file", torn)
        with pytest.raises(OSError, match="no space left"):
            StoredFeatures(target, tmp_path)(batch)
    same(StoredFeatures(target, tmp_path)(batch), target(batch), batch)


def test_features_of_other_taps_are_refused(models: Models, tmp_path: Path) -> None:
    StoredFeatures(target_of(models), tmp_path)
    with pytest.raises(ValueError, match=r"made with tap_ids \[1, 3, 5\].*\[1, 2, 5\]"):
        StoredFeatures(target_of(models, (1, 2, 5)), tmp_path)
    manifest = tmp_path / "manifest.json"
    other = json.loads(manifest.read_text()) | {"weights": [1.0, 2.0]}
    manifest.write_text(json.dumps(other))
    with pytest.raises(ValueError, match="weights"):
        StoredFeatures(target_of(models), tmp_path)


def test_a_disk_without_room_is_refused_before_the_start(
    models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = some_rows(5)
    store = StoredFeatures(target_of(models), tmp_path)
    needed = store.require_room(rows)
    store(collate(rows))
    written = sum(f.stat().st_size for f in tmp_path.glob("*.safetensors"))
    headers = 400 * len(rows)
    assert needed <= written <= needed + headers
    assert store.require_room(rows) == 0

    class Full:
        free = 100

    monkeypatch.setattr("shutil.disk_usage", lambda _: Full)
    with pytest.raises(OSError, match=r"features_dir: .* needs .* GB are free"):
        store.require_room(some_rows(6)[5:])


def test_readings_hold_one_entry_per_supervised_token(models: Models) -> None:
    rows = some_rows(4)
    readings: Readings = target_of(models).read(collate(rows))
    supervised = sum(row.num_reply_tokens for row in rows)
    assert len(readings.last) == len(readings.mass) == len(readings.best) == supervised
