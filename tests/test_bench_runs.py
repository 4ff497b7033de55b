from pathlib import Path

import pytest

from tests.bench_helpers import Recorder, fake_options
from tests.fake_engine import NAME, ODD_PLACE
from vllm_eagle3.bench.identity import NEAR_TIE_NATS
from vllm_eagle3.bench.plan import make_plan
from vllm_eagle3.bench.process import WorkerError
from vllm_eagle3.bench.results import make_results
from vllm_eagle3.bench.runs import run_bench

ROOT = Path(__file__).parents[1]
ODD_PROMPT = 1  # the one of odd length, which the fake engine changes


@pytest.fixture(autouse=True)
def _workers_find_the_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


def bench(folder: Path, behaviour: str = "right", **changes):
    """Run the fake engine; results by method, and what the watcher saw."""
    plan = make_plan(fake_options(folder, behaviour, **changes))
    recorder = Recorder()
    results = make_results(plan, run_bench(plan, NAME, recorder))
    return {run["method"]: run for run in results["runs"]}, recorder, results


@pytest.fixture(scope="module")
def two_repeats(tmp_path_factory: pytest.TempPathFactory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))
        folder = tmp_path_factory.mktemp("bench")
        yield bench(folder, methods="off,chain:2,ours:auto", repeats=2)


def test_methods_take_turns_and_rotate(two_repeats) -> None:
    _, recorder, _ = two_repeats
    once = ["off", "chain:2", "ours:auto"]
    second, third = once[1:] + once[:1], once[2:] + once[:2]
    assert recorder.order == 2 * (once + second + third)


def test_every_method_starts_once(two_repeats) -> None:
    _, recorder, _ = two_repeats
    assert recorder.started_methods == ["off", "chain:2", "ours:auto"]


def test_totals(two_repeats) -> None:
    runs, _, _ = two_repeats
    run = runs["chain:2"]
    assert run["prompts"] == 3
    assert run["new_tokens"] == 2 * 3 * 6
    assert len(run["repeats"]) == 2
    assert run["seconds"] == pytest.approx(sum(r["seconds"] for r in run["repeats"]))


def test_warm_up_is_not_counted(two_repeats) -> None:
    runs, _, _ = two_repeats
    # Two drafts per reply of the fake engine, three prompts, two repeats.
    assert runs["chain:2"]["counts"]["drafts"] == 12


def test_acceptance(two_repeats) -> None:
    runs, _, _ = two_repeats
    assert runs["chain:2"]["acceptance_length"] == pytest.approx(2.0)
    assert runs["off"]["acceptance_length"] is None
    rates = [entry["rate"] for entry in runs["chain:2"]["conditional_acceptance"]]
    assert rates == [0.5, 1.0]


def test_speed_up_is_against_off(two_repeats) -> None:
    runs, _, _ = two_repeats
    ratios = [
        a["tokens_per_s"] / b["tokens_per_s"]
        for a, b in zip(runs["chain:2"]["repeats"], runs["off"]["repeats"], strict=True)
    ]
    assert runs["off"]["speed_up"] == 1.0
    assert runs["chain:2"]["speed_up"] == pytest.approx(sum(ratios) / 2)


def test_equal_texts_are_identical(two_repeats) -> None:
    runs, recorder, _ = two_repeats
    run = runs["chain:2"]
    assert (run["identical"], run["near_ties"], run["different"]) == (3, 0, 0)
    assert "identical" not in runs["off"]
    assert recorder.checked == 0


def test_environment_marks_what_stock_methods_carry(two_repeats) -> None:
    _, _, results = two_repeats
    methods = results["environment"]["methods"]
    assert methods["chain:2"]["stock_vllm"]
    assert methods["chain:2"]["settings"]["VLLM_EAGLE3"] == "0"
    assert methods["chain:2"]["settings"]["VLLM_EAGLE3_CPU_FIXES"] == "1"
    assert not methods["ours:auto"]["stock_vllm"]
    assert methods["ours:auto"]["settings"]["VLLM_EAGLE3"] == "1"


def test_near_ties_are_counted_apart(tmp_path: Path) -> None:
    runs, recorder, _ = bench(tmp_path, "near")
    run = runs["chain:2"]
    assert (run["identical"], run["near_ties"], run["different"]) == (2, 1, 0)
    assert recorder.checked == 1
    (difference,) = run["differences"]
    assert (difference["prompt"], difference["position"]) == (ODD_PROMPT, ODD_PLACE)
    assert 0 < difference["gap"] <= NEAR_TIE_NATS


def test_near_ties_are_no_excuse_in_float32(tmp_path: Path) -> None:
    runs, _, _ = bench(tmp_path, "near", dtype="float32")
    run = runs["chain:2"]
    assert (run["identical"], run["near_ties"], run["different"]) == (2, 0, 1)


def test_wrong_texts_are_different(tmp_path: Path) -> None:
    runs, _, _ = bench(tmp_path, "wrong")
    run = runs["chain:2"]
    assert (run["identical"], run["near_ties"], run["different"]) == (2, 0, 1)


def test_near_ties_are_found_inside_larger_batches(tmp_path: Path) -> None:
    runs, _, _ = bench(tmp_path, "near", batch="2")
    run = runs["chain:2"]
    assert (run["identical"], run["near_ties"], run["different"]) == (2, 1, 0)
    assert run["differences"][0]["prompt"] == ODD_PROMPT


def test_several_batch_sizes_are_runs_of_their_own(tmp_path: Path) -> None:
    _, _, results = bench(tmp_path, batch="1,3")
    pairs = [(run["method"], run["batch"]) for run in results["runs"]]
    assert pairs == [("off", 1), ("chain:2", 1), ("off", 3), ("chain:2", 3)]


def test_sampled_texts_are_not_compared(tmp_path: Path) -> None:
    runs, _, _ = bench(tmp_path, "wrong", temperature=0.8)
    assert runs["chain:2"]["identical"] is None


def test_without_off_there_is_nothing_to_compare_with(tmp_path: Path) -> None:
    runs, _, _ = bench(tmp_path, methods="chain:2")
    assert runs["chain:2"]["identical"] is None
    assert "speed_up" not in runs["chain:2"]


def test_failing_engine_names_its_method(tmp_path: Path) -> None:
    with pytest.raises(WorkerError, match="chain:2: ValueError: head: made for"):
        bench(tmp_path, "refuse")
