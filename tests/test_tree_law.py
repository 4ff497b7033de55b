"""Temperature above 0: a tree's text follows the target's own law exactly.

Ranked drafts are judged by sample-and-match, sampled ones by recursive rejection.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

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
    # Of an exact head the first sampled child is taken, whatever stands beside it, so
    # only requests whose parameters the head does not know leave the first path.
    seldom = head == "h4" and drafts != "greedy"
    assert commits.branches > (SAMPLES // 8 if seldom else SAMPLES // 2)
    assert (len(draws) > SAMPLES) == (drafts != "greedy")
    assert worst < LIMIT


MUTANTS = [
    Edit("residual not updated", "_residual(p, q), p)", "p, p)"),
    slow(Edit("recovered token from p", "left[~goes_on]", "p[~goes_on]")),
]


@pytest.fixture(scope="module")
def flat_head(models: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """H2 with a quarter of its logits: its law overlaps the target's, and is another.

    H4 is right or drafts what the target never says, so what is left of p is p.
    """
    folder = tmp_path_factory.mktemp("flat") / "head"
    shutil.copytree(models("h2"), folder)
    (file,) = folder.glob("*.safetensors")
    weights = load_file(file)
    weights["lm_head.weight"] *= 0.25
    save_file(weights, file)
    return folder


@pytest.mark.parametrize("edit", MUTANTS, ids=lambda edit: edit.name)
def test_a_wrong_verifier_in_the_engine_is_seen(
    engine: Any, flat_head: Path, monkeypatch: pytest.MonkeyPatch, edit: Edit
) -> None:
    from vllm_eagle3.integration import drawn_drafts

    handle = engine(
        "f2",
        flat_head,
        max_num_seqs=64,
        draft_sample_method="probabilistic",
        **tree_settings(4, 3, 12),
    )
    right, drafted = worst_excess(handle, 8 * SAMPLES, [Sampling(1.0)])
    assert drafted > 0 and right < LIMIT
    mutant = edit.of(rejection, "judge_children")
    monkeypatch.setattr(drawn_drafts, "judge_children", mutant)
    wrong, _ = worst_excess(handle, 8 * SAMPLES, [Sampling(1.0)])
    assert wrong > LIMIT
