"""Temperature above 0: a tree's text follows the target's own law exactly.

Ranked drafts are judged by sample-and-match, sampled ones by recursive rejection.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.law_runs import worst_excess
from tests.laws import LIMIT, Sampling
from tests.mutant import Edit
from tests.tree_engine import counted_commits, counted_draws, tree_settings
from vllm_eagle3 import rejection

pytestmark = pytest.mark.engine

SAMPLES = 400  # of each law


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


CASES = [
    ("h2", (4, 3, 12), "greedy"),
    ("h4", (4, 3, 12), "probabilistic"),
    slow("h2", (4, 3, 12), "probabilistic"),
    slow("h4", (4, 3, 12), "greedy"),
    slow("h4", (4, 3, 12), None),
    *(slow("h4", (8, 1, 8), drafts) for drafts in ("greedy", "probabilistic")),
    *(slow("h2", (2, 3, 4), drafts) for drafts in ("greedy", "probabilistic")),
    *(slow("h2", (8, 4, 64), drafts) for drafts in ("greedy", "probabilistic")),
    slow("h4", (8, 4, 64), "probabilistic"),
]


@pytest.mark.parametrize(("head", "shape", "drafts"), CASES)
def test_mixed_batch_follows_every_request_s_own_law(
    engine: Any, head: str, shape: tuple[int, int, int], drafts: str | None
) -> None:
    handle = engine(
        "f2",
        head,
        max_num_seqs=64,
        draft_sample_method=drafts,
        **tree_settings(*shape),
    )
    with counted_commits(handle) as commits, counted_draws(handle) as draws:
        worst, drafted = worst_excess(handle, SAMPLES)
    assert drafted > 0
    assert commits.branches > SAMPLES
    assert (len(draws) > SAMPLES) == (drafts != "greedy")
    assert worst < LIMIT


MUTANTS = [
    Edit("residual not updated", "_residual(p, q), p)", "p, p)"),
    slow(Edit("recovered token from p", "left[~goes_on]", "p[~goes_on]")),
    slow(Edit("one sibling's coin for all", "accept_noise[reqs, child]", "0.5")),
]


@pytest.mark.parametrize("edit", MUTANTS, ids=lambda edit: edit.name)
def test_a_wrong_verifier_in_the_engine_is_seen(
    engine: Any, monkeypatch: pytest.MonkeyPatch, edit: Edit
) -> None:
    from vllm_eagle3.integration import drawn_drafts

    mutant = edit.of(rejection, "judge_children")
    monkeypatch.setattr(drawn_drafts, "judge_children", mutant)
    handle = engine(
        "f2",
        "h4",
        max_num_seqs=64,
        draft_sample_method="probabilistic",
        **tree_settings(4, 3, 12),
    )
    worst, _ = worst_excess(handle, 2 * SAMPLES, [Sampling(1.0)])
    assert worst > LIMIT
