"""The log of a run: lines and curves of the same figures, without steps made twice."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from vllm_eagle3.train.run_log import RunLog


def record(step: int) -> dict[str, Any]:
    return {"event": "step", "step": step, "of": 40, "loss": 1 / step, "hits": [0.5, 1]}


def lines(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]


def test_lines_and_curves_say_the_same(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log = RunLog(tmp_path, 0)
    for step in (10, 20):
        log.write(record(step))
    log.close()
    assert lines(tmp_path) == [record(10), record(20)]
    curves = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert set(curves.Tags()["scalars"]) == {"step/loss", "step/hits/0", "step/hits/1"}
    found = [(e.step, e.value) for e in curves.Scalars("step/loss")]
    assert found == [(10, pytest.approx(0.1)), (20, pytest.approx(0.05))]


def test_steps_that_are_made_again_are_logged_once(tmp_path: Path) -> None:
    first = RunLog(tmp_path, 0)
    for step in (10, 20, 30):
        first.write(record(step))
    first.close()
    with (tmp_path / "log.jsonl").open("a") as file:
        file.write('{"event": "st')  # torn by a kill
    again = RunLog(tmp_path, 15)  # the checkpoint is of step 15
    again.write(record(20))
    again.close()
    assert [line["step"] for line in lines(tmp_path)] == [10, 20]
