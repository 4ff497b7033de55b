"""The preview marks what a first draft step is trained to predict, and counts it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console

from tests.models.shapes import byte_tokenizer
from vllm_eagle3.train.data import Row
from vllm_eagle3.train.data_command import run_data_preview
from vllm_eagle3.train.preview import supervised

ROW = Row("qa", tuple(range(10, 20)), ((3, 6, 0.0), (8, 10, 0.7)))


def test_all_of_a_reply_but_its_first_token_is_supervised() -> None:
    assert [place for place, on in enumerate(supervised(ROW)) if on] == [4, 5, 9]


@pytest.fixture
def target(tmp_path: Path) -> Path:
    folder = tmp_path / "target"
    byte_tokenizer(256).save_pretrained(folder)
    (folder / "config.json").write_text("{}")
    return folder


def write(folder: Path, *rows: Row) -> str:
    path = folder / "rows.jsonl"
    lines = [
        json.dumps({"kind": r.kind, "ids": r.ids, "spans": r.spans}) + "\n"
        for r in rows
    ]
    path.write_text("".join(lines))
    return str(path)


def test_text_and_counts_are_shown(target: Path, tmp_path: Path) -> None:
    console = Console(record=True, width=100, force_terminal=True)
    rows = write(tmp_path, ROW, ROW, Row("chat", (1, 2, 3), ()))
    run_data_preview([rows], str(target), 1, 64, console)
    shown = console.export_text(styles=False)
    text = byte_tokenizer(256).decode(ROW.ids[3:6])
    assert f"[T=0]{text}" in shown and "[T=0.7]" in shown
    line = next(line for line in shown.splitlines() if "qa, T=0/0.7" in line)
    assert [cell.strip() for cell in line.split("│")[2:6]] == ["2", "20", "6", "30%"]
    assert "skipped: no reply of at least two tokens" in shown


def test_rows_of_another_target_are_refused(target: Path, tmp_path: Path) -> None:
    rows = write(tmp_path, Row("x", (1, 2, 3000, 4), ((1, 4, 0.0),)))
    with pytest.raises(ValueError, match=r"token id 3000.*another target"):
        run_data_preview([rows], str(target), 1, 64, Console())
