import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.bench_helpers import fake_options
from vllm_eagle3.acceptance import DraftCounts
from vllm_eagle3.bench.plan import make_plan
from vllm_eagle3.bench.process import Timed
from vllm_eagle3.bench.report import LiveTable, notes, results_table, verdict
from vllm_eagle3.engine import Generation, StepTimes


def record(**changes: Any) -> dict[str, Any]:
    return {
        "method": "chain:3",
        "batch": 1,
        "prompts": 12,
        "requests": 12,
        "temperature": 0.0,
        "max_tokens": 64,
        "dtype": "bfloat16",
        "tokens_per_s": 30.0,
        "tokens_per_s_range": [29.0, 31.0],
        "speed_up": 1.25,
        "speed_up_interval": [1.2, 1.3],
        "repeats_needed": None,
        "token_counts_equal": True,
        "acceptance_length": 1.87,
        "identical": 10,
        "near_ties": 1,
        "different": 1,
        **changes,
    }


def off() -> dict[str, Any]:
    plain = record(method="off", acceptance_length=None, speed_up=1.0)
    del plain["identical"], plain["near_ties"], plain["different"]
    return plain


def shown(*runs: dict[str, Any]) -> str:
    console = Console(file=io.StringIO(), width=120)
    console.print(results_table(runs))
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_row_of_a_speculative_method() -> None:
    text = shown(off(), record())
    assert "30.0 (29.0..31.0)" in text
    assert "1.25 (1.20..1.30)" in text
    assert "1.87" in text
    assert "10 of 12, 1 near-tie, 1 DIFFERENT" in text


def test_one_repeat_has_no_range() -> None:
    text = shown(
        record(tokens_per_s_range=[30.0, 30.0], speed_up_interval=[1.25, 1.25])
    )
    assert ".." not in text


def test_what_was_not_compared_is_a_dash() -> None:
    text = shown(record(identical=None, near_ties=None, different=None))
    assert "of 12" not in text


@pytest.mark.parametrize(
    ("speed_up", "expected"),
    [
        (1.25, "Speculation pays here: chain:3 at batch 1 is 1.25 times"),
        (1.01, "Speculation changes little here: chain:3 at batch 1 is 1.01 times"),
        (0.71, "Speculation does not pay here: the best, chain:3 at batch 1"),
    ],
)
def test_verdict_says_what_is_true(speed_up: float, expected: str) -> None:
    interval = [speed_up - 0.05, speed_up + 0.05]
    run = record(speed_up=speed_up, speed_up_interval=interval)
    assert verdict([off(), run]).startswith(expected)


def test_a_gain_within_the_noise_is_not_called_one() -> None:
    run = record(speed_up=1.25, speed_up_interval=[0.95, 1.5])
    assert verdict([off(), run]).startswith("No telling whether speculation pays here")


def test_refused_speed_up_says_what_it_takes() -> None:
    refused = record(speed_up=None, speed_up_interval=None, repeats_needed=9)
    assert "too noisy: --repeats 9" in shown(off(), refused)
    assert verdict([off(), refused]) == ""
    (note,) = notes([off(), refused])
    assert "--repeats 9" in note


def test_note_on_replies_of_other_lengths() -> None:
    (note,) = notes([off(), record(token_counts_equal=False)])
    assert "chain:3" in note and "--ignore-eos" in note


def test_nothing_to_note() -> None:
    assert notes([off(), record()]) == []


def test_verdict_is_about_the_best_method() -> None:
    slow = record(speed_up=0.7, speed_up_interval=[0.6, 0.8])
    fast = record(method="ours:auto", speed_up=1.4, speed_up_interval=[1.3, 1.5])
    assert "ours:auto" in verdict([off(), slow, fast])


def test_no_verdict_without_a_plain_run() -> None:
    alone = record()
    del alone["speed_up"]
    assert verdict([alone]) == ""


def test_live_table_shows_the_setting_at_work(tmp_path: Path) -> None:
    plan = make_plan(fake_options(tmp_path, batch="1,2", methods="off,chain:2"))
    off, chain = plan.methods
    console = Console(file=io.StringIO(), width=100, force_terminal=True)
    counts = DraftCounts(drafts=2, draft_tokens=4, accepted_tokens=3)
    with LiveTable(plan, console) as watcher:
        watcher.started(off, 1.0)
        watcher.started(chain, 1.0)
        watcher.entering(plan.settings[1])
        reply = (Generation((1, 2, 3, 4)),)
        watcher.measured(chain, Timed(reply, 2.0, counts, StepTimes()))
        screen = Console(file=io.StringIO(), width=100)
        screen.print(watcher.table())
    text = screen.file.getvalue()  # type: ignore[attr-defined]
    assert "temperature 0, batch 2" in text
    (row,) = [line for line in text.splitlines() if "chain:2" in line]
    assert [cell.strip() for cell in row.split("│")[2:-1]] == [
        *("1/2", "2.0", "2.50", "2")
    ]
    (waiting,) = [line for line in text.splitlines() if " off " in line]
    assert "warming up" in waiting
