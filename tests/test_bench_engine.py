"""The benchmark over real engines: stock vLLM with and without a chain."""

from pathlib import Path

import pytest

from tests.bench_helpers import Recorder
from tests.models import bigram
from vllm_eagle3.bench.plan import BenchOptions, make_plan
from vllm_eagle3.bench.results import make_results
from vllm_eagle3.bench.runs import run_bench
from vllm_eagle3.engine import EngineMode

pytestmark = pytest.mark.engine
ENGINE = "vllm_eagle3.integration.engine:VllmEngine"
MAX_TOKENS = 24


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory):
    pytest.importorskip("vllm")
    folder = tmp_path_factory.mktemp("bench_engine")
    bigram.build_f2(folder / "target")
    bigram.build_h2(folder / "head")
    prompts = folder / "prompts.txt"
    prompts.write_text("one\nfour five\nthree\n")
    options = BenchOptions(
        target=str(folder / "target"),
        head=str(folder / "head"),
        prompts=(str(prompts),),
        out=Path(folder / "out"),
        methods="off,chain:3",
        batch="1,2",
        max_tokens=MAX_TOKENS,
        dtype="float32",
        max_model_len=256,
        mode=EngineMode(enforce_eager=True),
    )
    plan = make_plan(options)
    results = make_results(plan, run_bench(plan, ENGINE, Recorder()))
    return {(run["method"], run["batch"]): run for run in results["runs"]}


@pytest.mark.parametrize("batch", [1, 2])
def test_chain_drafts_are_accepted(runs, batch: int) -> None:
    run = runs["chain:3", batch]
    assert run["counts"]["drafts"] > 0
    # H2 drafts what F2 will say: of 4 tokens a step only a reply's end is lost.
    assert run["acceptance_length"] > 3


@pytest.mark.parametrize("batch", [1, 2])
def test_chain_does_not_change_the_text(runs, batch: int) -> None:
    run = runs["chain:3", batch]
    assert (run["identical"], run["different"]) == (3, 0)


def test_off_does_not_draft(runs) -> None:
    assert runs["off", 1]["acceptance_length"] is None
    assert runs["off", 1]["new_tokens"] > 0
