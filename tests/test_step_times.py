"""The stopwatch of steps, on objects that look like an engine's."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm_eagle3.engine import StepTimes
from vllm_eagle3.integration.step_times import StepStopwatch

TICK = 0.01


class Runner:
    """A model runner whose parts take ticks: 3 to run, 1 of 2 to commit, 4 to draft.

    Of these one is spent when drafts are proposed, three when they are taken.
    """

    def execute_model(self, scheduler_output: Any) -> None:
        time.sleep(3 * TICK)

    def _sample(self) -> None:
        time.sleep(TICK)
        self._commit()

    def _commit(self) -> None:
        time.sleep(TICK)

    def propose_draft_token_ids(self) -> None:
        time.sleep(TICK)

    def take_draft_token_ids(self) -> None:
        time.sleep(3 * TICK)


def engine(new_requests: list[str]) -> tuple[Any, Any]:
    """An engine of `llm`, and its core, whose steps take in these requests."""
    runner = Runner()

    def step() -> str:
        time.sleep(2 * TICK)
        runner.execute_model(SimpleNamespace(scheduled_new_reqs=new_requests))
        runner._sample()
        runner.propose_draft_token_ids()
        return "outputs"

    worker = SimpleNamespace(model_runner=runner)
    executor = SimpleNamespace(driver_worker=SimpleNamespace(worker=worker))
    core = SimpleNamespace(
        step_fn=step,
        post_step=lambda: runner.take_draft_token_ids(),
        model_executor=executor,
    )
    client = SimpleNamespace(engine_core=core)
    return SimpleNamespace(llm_engine=SimpleNamespace(engine_core=client)), core


def test_a_part_inside_another_counts_for_itself_alone() -> None:
    llm, core = engine(new_requests=[])
    stopwatch = StepStopwatch(llm)
    for _ in range(2):
        assert core.step_fn() == "outputs"
        core.post_step()
    total = stopwatch.total
    assert total.steps == 2
    ticks = {"verify": 4, "commit": 1, "draft": 4, "rest": 2}
    for part, expected in ticks.items():
        # A sleep is never shorter than asked for, and a busy machine makes it longer.
        assert 2 * expected * TICK <= getattr(total, part) < 2 * expected * TICK + 0.5


def test_prefills_are_left_out() -> None:
    llm, core = engine(new_requests=["a"])
    stopwatch = StepStopwatch(llm)
    core.step_fn()
    core.post_step()
    assert stopwatch.total == StepTimes()


def test_engine_of_another_process_is_refused() -> None:
    client = SimpleNamespace(llm_engine=SimpleNamespace(engine_core=object()))
    with pytest.raises(ValueError, match="step_times: got an engine of another"):
        StepStopwatch(client)  # type: ignore[arg-type]
