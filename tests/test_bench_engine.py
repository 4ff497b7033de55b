"""The benchmark over real engines: stock vLLM without and with a chain, and ours."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest

from tests.bench_helpers import Recorder
from vllm_eagle3.bench import methods
from vllm_eagle3.bench.plan import BenchOptions, make_plan
from vllm_eagle3.bench.results import make_results
from vllm_eagle3.bench.runs import run_bench
from vllm_eagle3.engine import EngineMode

pytestmark = pytest.mark.engine
ENGINE = "vllm_eagle3.integration.engine:VllmEngine"
MAX_TOKENS = 24


@pytest.fixture(scope="module")
def runs(
    tmp_path_factory: pytest.TempPathFactory, models: Callable[[str], Path]
) -> dict[tuple[str, int], Any]:
    pytest.importorskip("vllm")
    folder = tmp_path_factory.mktemp("bench_engine")
    prompts = folder / "prompts.txt"
    prompts.write_text("one\nfour five\nthree\n")
    options = BenchOptions(
        target=str(models("f2")),
        head=str(models("h2")),
        prompts=(str(prompts),),
        out=folder / "out",
        methods="off,chain:3,ours:auto,ours:tree:6:2:3,ngram:2",
        controls=False,
        batch="1,2",
        max_tokens=MAX_TOKENS,
        dtype="float32",
        max_model_len=256,
        mode=EngineMode(enforce_eager=True, threads=1, step_times=True),
    )
    plan = make_plan(options)
    results = make_results(plan, run_bench(plan, ENGINE, Recorder()))
    return {(run["method"], run["batch"]): run for run in results["runs"]}


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("method", ["chain:3", "ours:auto"])
def test_drafts_are_accepted(runs, method: str, batch: int) -> None:
    run = runs[method, batch]
    assert run["counts"]["drafts"] > 0
    # H2 drafts what F2 will say: of 4 tokens a step only a reply's end is lost. Auto
    # verifies no more than pays, which is little where a model is as small.
    assert run["acceptance_length"] > (3 if method == "chain:3" else 1.5)


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize(
    "method", ["chain:3", "ours:auto", "ours:tree:6:2:3", "ngram:2"]
)
def test_speculation_does_not_change_the_text(runs, method: str, batch: int) -> None:
    run = runs[method, batch]
    assert (run["identical"], run["different"]) == (run["requests"], 0)


def test_off_does_not_draft(runs) -> None:
    assert runs["off", 1]["acceptance_length"] is None
    assert runs["off", 1]["new_tokens"] > 0


def test_steps_are_timed_by_part(runs) -> None:
    off, tree = runs["off", 2]["step"], runs["ours:tree:6:2:3", 2]["step"]
    assert off["steps"] > tree["steps"] > 0
    assert off["draft"] == off["commit"] == 0
    assert min(off["verify"], off["rest"]) > 0
    assert min(tree[part] for part in ("draft", "verify", "commit", "rest")) > 0
    # Prefills are left out: a step makes a token of each reply, one before the first.
    assert off["steps"] < runs["off", 2]["new_tokens"]


def test_names_of_other_methods_are_those_of_vllm() -> None:
    from vllm.config.speculative import SpeculativeMethod

    listed = {*methods.NEED_NO_MODEL, *methods.NEED_A_MODEL}
    assert listed <= set(get_args(SpeculativeMethod))
