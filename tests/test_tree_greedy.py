"""Temperature 0: a tree's token ids equal those of the run without speculation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.engine_run import EngineHandle, Run
from tests.greedy_workloads import (
    MAX_MODEL_LEN,
    SHORT_MODEL_LEN,
    PlainRuns,
    Workload,
    workload,
)
from tests.near_ties import differing
from tests.tree_engine import Commits, counter, run_counted, tree_settings

pytestmark = pytest.mark.engine

# A first difference is excused at a near-tie, which must stay rare.
MOST_EXCUSED = 2


@pytest.fixture(scope="module")
def plain(engine: Any) -> PlainRuns:
    return PlainRuns(engine)


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


def assert_equal(reference: Run, work: Workload, run: Run) -> None:
    assert [len(reply) for reply in run.token_ids] == work.lengths
    assert len(differing(reference, run.token_ids)) <= MOST_EXCUSED


def run_equal(
    plain: PlainRuns, handle: EngineHandle, target: str, name: str
) -> tuple[Run, Commits]:
    """Run a workload, compare it with the plain run, and return what was seen."""
    reference, work = plain(target, name), workload(target, name)
    run, commits = run_counted(handle, work.prompts, work.params())
    assert_equal(reference, work, run)
    assert run.drafted > 0
    assert commits.trees > 0
    return run, commits


# top_k, depth, nodes: narrow, wide, deep, large.
SHAPES = [(2, 2, 4), (8, 1, 8), (4, 6, 32), (2, 10, 20), (8, 8, 64), (2, 1, 8)]
CASES = [
    ("f1", "h1", (4, 6, 16)),
    *(slow("f1", "h1", shape) for shape in SHAPES),
    *(slow("f1", "h3", shape) for shape in ((4, 6, 16), (8, 8, 64))),
    *(slow("f2", head, (4, 6, 16)) for head in ("h2", "h4")),
    slow("f2", "h4", (8, 8, 64)),
]


@pytest.mark.parametrize(("target", "head", "shape"), CASES)
def test_every_shape_and_head_gives_the_plain_text(
    engine: Any, plain: PlainRuns, target: str, head: str, shape: tuple[int, int, int]
) -> None:
    plain(target, "long")  # before the other engine
    handle = engine(target, head, max_model_len=MAX_MODEL_LEN, **tree_settings(*shape))
    run, commits = run_equal(plain, handle, target, "long")
    run_equal(plain, handle, target, "edges")
    if head != "h3":
        assert run.accepted > 0
    if head == "h1" and shape[2] > 2:
        assert commits.branches > 0

    # Requests by themselves: batches of one.
    reference, work = plain(target, "long"), workload(target, "long")
    alone = [
        handle.run([prompt], params)
        for prompt, params in zip(work.prompts[:5], work.params()[:5], strict=True)
    ]
    first = replace(
        reference, token_ids=reference.token_ids[:5], gaps=reference.gaps[:5]
    )
    assert len(differing(first, [r.token_ids[0] for r in alone])) <= MOST_EXCUSED
    assert all(single.drafted > 0 for single in alone)


def test_shared_steps_cached_prefixes_and_preemption(
    engine: Any, plain: PlainRuns
) -> None:
    """Small steps and few blocks: trees are cut, requests preempted and resumed."""
    plain("f1", "long")
    handle = engine(
        "f1",
        "h1",
        max_model_len=MAX_MODEL_LEN,
        max_num_batched_tokens=64,
        enable_prefix_caching=True,
        num_gpu_blocks_override=60,
        **tree_settings(4, 6, 16),
    )
    before = counter(handle, "vllm:num_preemptions")
    run, commits = run_equal(plain, handle, "f1", "long")
    assert counter(handle, "vllm:num_preemptions") > before
    assert run.accepted > 0
    assert commits.branches > 0
    assert 17 < commits.most_rows <= 64

    hits = counter(handle, "vllm:prefix_cache_hits")
    run_equal(plain, handle, "f1", "edges")
    run_equal(plain, handle, "f1", "edges")
    assert counter(handle, "vllm:prefix_cache_hits") > hits


# Room for one of the largest trees beside others, too little for the prompts at once.
SETTINGS: dict[str, dict[str, Any]] = {
    "chunked": {"max_num_batched_tokens": 160},
    "cached": {"enable_prefix_caching": True},
    "preempted": {"num_gpu_blocks_override": 60},
    "chunked+cached": {"max_num_batched_tokens": 160, "enable_prefix_caching": True},
}


@pytest.mark.slow
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("shape", [(4, 6, 32), (8, 8, 64)], ids=str)
def test_each_setting_by_itself(
    engine: Any, plain: PlainRuns, setting: str, shape: tuple[int, int, int]
) -> None:
    plain("f1", "long")
    handle = engine(
        "f1",
        "h1",
        max_model_len=MAX_MODEL_LEN,
        **SETTINGS[setting],
        **tree_settings(*shape),
    )
    for _ in range(2):
        run, commits = run_equal(plain, handle, "f1", "long")
        assert run.accepted > 0
        assert commits.branches > 0


@pytest.mark.parametrize("shape", [(4, 6, 16), slow((8, 8, 64))], ids=str)
def test_prompts_near_the_end_of_the_model_s_length(
    engine: Any, plain: PlainRuns, shape: tuple[int, int, int]
) -> None:
    plain("f1", "ends")
    handle = engine("f1", "h1", max_model_len=SHORT_MODEL_LEN, **tree_settings(*shape))
    run_equal(plain, handle, "f1", "ends")


@pytest.mark.slow
def test_more_requests_than_scratch_blocks_have_room_for(
    engine: Any, plain: PlainRuns
) -> None:
    """64 trees of 16 nodes: most are cut to chains, and growth goes in parts."""
    plain("f1", "edges")
    handle = engine(
        "f1",
        "h1",
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=64,
        **tree_settings(8, 4, 16),
    )
    reference, work = plain("f1", "edges"), workload("f1", "edges")
    run, commits = run_counted(handle, work.prompts * 7, work.params() * 7)
    for i in range(7):
        part = run.token_ids[i * 10 : i * 10 + 10]
        assert len(differing(reference, part)) <= MOST_EXCUSED
    assert run.drafted > 0
    assert commits.branches > 0
