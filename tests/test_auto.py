"""`auto` in the engine: budgets change from step to step, the text does not."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from tests.engine_run import EngineHandle
from tests.greedy_workloads import MAX_MODEL_LEN, PlainRuns, workload
from tests.near_ties import differing
from tests.tree_engine import JudgedStep, counter, judged_steps, run_counted, runner_of
from vllm_eagle3.drafter import TreeShape
from vllm_eagle3.policy import DraftPlan

pytestmark = pytest.mark.engine

OFF = DraftPlan(None)
CHAIN = DraftPlan(TreeShape.chain(5))
# Ends where no confidence is left, so requests and steps get chains of other lengths.
SHORT_CHAIN = DraftPlan(TreeShape.chain(4), min_masses=(0.7,) * 3)
TREE = DraftPlan(TreeShape(16, 4, 6))
SMALL_TREE = DraftPlan(TreeShape(16, 4, 2), min_masses=(0.5,))
SWITCHING = [OFF, OFF, CHAIN, TREE, OFF, SHORT_CHAIN, SMALL_TREE, TREE, CHAIN, OFF, OFF]

# Small steps, few blocks and cached prefixes: chunks, preemption, shared blocks.
SETTINGS: dict[str, Any] = {
    "num_speculative_tokens": 16,
    "additional_config": {"vllm_eagle3": {"shape": "auto"}},
    "max_model_len": MAX_MODEL_LEN,
    "max_num_batched_tokens": 64,
    "enable_prefix_caching": True,
    "num_gpu_blocks_override": 60,
}


@pytest.fixture(scope="module")
def plain(engine: Any) -> PlainRuns:
    return PlainRuns(engine)


@pytest.fixture
def auto(engine: Any, plain: PlainRuns) -> EngineHandle:
    plain("f1", "long")  # before the other engine
    return engine("f1", "h1", **SETTINGS)


def policy_of(handle: EngineHandle) -> Any:
    return handle.llm.llm_engine.engine_core.engine_core.scheduler.budget.policy


@contextmanager
def forced(handle: EngineHandle, plans: Callable[[int], DraftPlan]) -> Iterator[None]:
    """The budget plans by step number, and verifies what the best half of nodes is."""
    policy, steps = policy_of(handle), iter(range(10**9))

    def half(drafts: Any, context: int) -> np.ndarray:
        real = np.isfinite(drafts.scores)
        # The better half; the parents of a node are never worse than it.
        median = np.median(drafts.scores[real]) if real.any() else 0.0
        turn = next(steps) % 3
        return real & (drafts.scores >= median) if turn else real

    policy.plan = lambda *_: plans(next(steps))
    policy.choose = half
    try:
        yield
    finally:
        del policy.plan, policy.choose


def in_turn(plans: Sequence[DraftPlan]) -> Callable[[int], DraftPlan]:
    return lambda step: plans[step % len(plans)]


def test_text_is_the_plain_run_s_whatever_the_budget_does(
    auto: EngineHandle, plain: PlainRuns
) -> None:
    reference, work = plain("f1", "long"), workload("f1", "long")
    before = counter(auto, "vllm:num_preemptions")
    with forced(auto, in_turn(SWITCHING)), judged_steps(auto) as steps:
        run, commits = run_counted(auto, work.prompts, work.params())
    assert [len(reply) for reply in run.token_ids] == work.lengths
    assert len(differing(reference, run.token_ids)) <= 2
    assert counter(auto, "vllm:num_preemptions") > before
    assert run.accepted > 100
    assert commits.branches > 0
    sizes = {len(step.token_ids) for step in steps}
    assert {1, 2, 5} < sizes and max(sizes) > 8
    chains = [s.parents == list(range(-1, len(s.parents) - 1)) for s in steps]
    assert any(chains) and not all(chains)


def test_text_is_the_plain_run_s_under_the_real_budget(
    auto: EngineHandle, plain: PlainRuns
) -> None:
    reference, work = plain("f1", "long"), workload("f1", "long")
    run = auto.run(work.prompts, work.params())
    assert [len(reply) for reply in run.token_ids] == work.lengths
    assert len(differing(reference, run.token_ids)) <= 2
    assert run.accepted > 0
    policy = policy_of(auto)
    assert policy.cost.is_known
    assert policy.acceptance.trials.sum() > 0


def steps_after_waiting(handle: EngineHandle, waits: bool) -> list[JudgedStep]:
    """Drafts of requests that begin with plain steps, of which some rows wait."""
    runner, work = runner_of(handle), workload("f1", "long")
    handle.llm.reset_prefix_cache()
    # Rows that still wait since an earlier run are caught up by whoever comes next.
    runner._head_may_wait, allowed = False, runner._head_may_wait
    handle.run(work.prompts[:1], work.params()[:1])
    runner._head_may_wait = waits
    caught_up, catch_up = [], runner.drafter.catch_up

    def counting(token_ids: Any, *others: Any) -> None:
        caught_up.append(len(token_ids))
        catch_up(token_ids, *others)

    runner.drafter.catch_up = counting
    plans = [OFF] * 45 + [CHAIN, TREE] * 4 + [OFF] * 6 + [TREE] * 20
    try:
        with forced(handle, in_turn(plans)), judged_steps(handle) as steps:
            handle.run(work.prompts[:4], work.params()[:4])
    finally:
        runner._head_may_wait = allowed
        del runner.drafter.catch_up
    assert bool(caught_up) == waits
    assert not waits or max(caught_up) > 32
    return steps


def test_a_head_that_waited_drafts_as_one_that_never_did(auto: EngineHandle) -> None:
    always, later = (steps_after_waiting(auto, waits) for waits in (False, True))
    assert len(later) > 30
    assert sum(len(step.emitted) - 1 for step in later) > 0

    def drafts(steps: list[JudgedStep]) -> list[tuple[Any, ...]]:
        return [(s.num_before, s.token_ids, s.parents, s.emitted) for s in steps]

    assert drafts(later) == drafts(always)


def test_requests_that_never_draft_cost_no_pass_of_the_head(
    auto: EngineHandle, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, work = runner_of(auto), workload("f1", "long")
    # Nobody looks for the blocks of requests that have ended.
    monkeypatch.setattr(runner.cache_config, "enable_prefix_caching", False)
    params = work.params()
    for each in params:
        each.skip_reading_prefix_cache = True
    passes: list[int] = []
    hook = runner.drafter.model.register_forward_hook(lambda *_: passes.append(1))
    preemptions = counter(auto, "vllm:num_preemptions")
    try:
        with forced(auto, in_turn([OFF])):
            run = auto.run(work.prompts, params)
        assert [len(reply) for reply in run.token_ids] == work.lengths
        assert counter(auto, "vllm:num_preemptions") > preemptions
        assert not passes
        with forced(auto, in_turn([TREE])):
            run = auto.run(work.prompts[:2], work.params()[:2])
        assert passes and run.accepted > 0
    finally:
        hook.remove()
