"""`auto` above temperature 0: the text's law is the target's, whatever is planned.

Plans change from step to step between nothing, ranked drafts, which are cut by their
scores, and sampled ones, of which nothing may be left out for what was drawn.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import cycle
from typing import Any

import pytest

from tests.engine_run import EngineHandle
from tests.law_runs import worst_excess
from tests.laws import LIMIT, Sampling
from tests.test_auto import policy_of
from tests.tree_engine import counted_commits, counted_draws
from vllm_eagle3.drafter import TreeShape
from vllm_eagle3.policy import DraftPlan

pytestmark = pytest.mark.engine

SAMPLES = 400  # of each law
PLANS = [
    DraftPlan(TreeShape(12, 4, 3), sampled=True),
    DraftPlan(None),
    DraftPlan(TreeShape(12, 4, 3)),
    DraftPlan(TreeShape.chain(2), sampled=True),
    DraftPlan(TreeShape(6, 4, 2), sampled=True),
    DraftPlan(TreeShape.chain(3)),
]


@pytest.fixture
def auto(engine: Any) -> EngineHandle:
    return engine(
        "f2",
        "h2",
        max_num_seqs=64,
        num_speculative_tokens=12,
        draft_sample_method=None,
        additional_config={"vllm_eagle3": {"shape": "auto", "depth": 3}},
    )


@contextmanager
def planned(handle: EngineHandle, plans: list[DraftPlan]) -> Iterator[None]:
    """The budget plans in turn, and chooses as it does."""
    policy, turns = policy_of(handle), cycle(plans)
    policy.plan = lambda *_: next(turns)
    try:
        yield
    finally:
        del policy.plan


def test_mixed_batch_follows_every_law_under_changing_plans(auto: EngineHandle) -> None:
    with (
        planned(auto, PLANS),
        counted_draws(auto) as draws,
        counted_commits(auto) as commits,
    ):
        worst, drafted = worst_excess(auto, SAMPLES)
    assert drafted > 0
    assert len(draws) > SAMPLES and commits.branches > SAMPLES // 2
    assert worst < LIMIT


def test_the_budget_tries_sampled_drafts_by_itself(auto: EngineHandle) -> None:
    from vllm import SamplingParams

    unseeded = SamplingParams(max_tokens=200, ignore_eos=True, detokenize=False)
    seeded = SamplingParams(max_tokens=200, ignore_eos=True, detokenize=False, seed=1)
    with counted_draws(auto) as draws:
        run = auto.run([[9, 65]] * 2, [unseeded] * 2)
    assert draws and run.accepted > 0
    with counted_draws(auto) as draws:
        run = auto.run([[9, 65]], [seeded])
    assert not draws and run.drafted > 0


def test_drafts_left_out_for_what_was_drawn_are_seen(
    auto: EngineHandle, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm_eagle3.integration.scheduler import _Drafted

    best = _Drafted.best

    def cut(self: Any, count: int) -> Any:
        wanted = not self.token_ids or self.token_ids[0] % 2
        return best(self, count if wanted else 0)

    monkeypatch.setattr(_Drafted, "best", cut)
    sampled = [plan for plan in PLANS if plan.sampled]
    with planned(auto, sampled), counted_draws(auto) as draws:
        worst, drafted = worst_excess(auto, 4 * SAMPLES, [Sampling(1.0)])
    assert drafted > 0 and draws
    assert worst > LIMIT
