import hashlib
import statistics
from pathlib import Path

import pytest

from tests.bench_helpers import Recorder, fake_options
from tests.fake_engine import NAME, ODD_PLACE
from vllm_eagle3.bench.identity import NEAR_TIE_NATS
from vllm_eagle3.bench.page import conditions
from vllm_eagle3.bench.plan import make_plan
from vllm_eagle3.bench.process import WorkerError
from vllm_eagle3.bench.results import make_results
from vllm_eagle3.bench.runs import run_bench
from vllm_eagle3.bench.statistics import MIN_REPEATS

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
    assert recorder.order == once + second + third + second + third + once


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


def test_whole_warm_ups_are_not_counted_either(tmp_path: Path) -> None:
    runs, recorder, results = bench(tmp_path, warm_up=2)
    assert runs["chain:2"]["counts"]["drafts"] == 6
    assert len(recorder.order) == 3 * 2
    assert "1 interleaved repeats after 2 that were not counted" in conditions(results)


def test_acceptance(two_repeats) -> None:
    runs, _, _ = two_repeats
    assert runs["chain:2"]["acceptance_length"] == pytest.approx(2.0)
    assert runs["off"]["acceptance_length"] is None
    rates = [entry["rate"] for entry in runs["chain:2"]["conditional_acceptance"]]
    assert rates == [0.5, 1.0]


def test_two_repeats_of_three_batches_give_no_speed_up(two_repeats) -> None:
    runs, _, _ = two_repeats
    assert runs["off"]["speed_up"] == 1.0
    assert runs["chain:2"]["speed_up"] is None
    assert runs["chain:2"]["repeats_needed"] == MIN_REPEATS


def test_speed_up_is_the_median_of_ratios_to_off(tmp_path: Path) -> None:
    runs, _, _ = bench(tmp_path, repeats=MIN_REPEATS)
    ratios = [
        a["tokens_per_s"] / b["tokens_per_s"]
        for a, b in zip(runs["chain:2"]["repeats"], runs["off"]["repeats"], strict=True)
    ]
    speed_up = runs["chain:2"]["speed_up"]
    assert speed_up == pytest.approx(statistics.median(ratios))
    low, high = runs["chain:2"]["speed_up_interval"]
    assert min(ratios) <= low <= speed_up <= high <= max(ratios)


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
    # The second batch is filled up with the first prompt.
    assert (run["prompts"], run["requests"]) == (3, 4)
    assert (run["identical"], run["near_ties"], run["different"]) == (3, 1, 0)
    assert run["differences"][0]["prompt"] == ODD_PROMPT


def test_every_setting_is_measured_with_the_same_engines(tmp_path: Path) -> None:
    _, recorder, results = bench(tmp_path, batch="1,3", temperature="0,1")
    found = [(r["method"], r["temperature"], r["batch"]) for r in results["runs"]]
    assert found == [
        (method, temperature, batch)
        for temperature in (0, 1)
        for batch in (1, 3)
        for method in ("off", "chain:2")
    ]
    assert len(recorder.started_methods) == 2
    assert len(recorder.settings) == 4


def test_a_large_batch_is_filled_up(tmp_path: Path) -> None:
    runs, _, _ = bench(tmp_path, batch="8")
    assert runs["off"]["requests"] == 8
    assert runs["off"]["new_tokens"] == 8 * 6
    assert runs["off"]["mean_running"] == 8


def test_waves_keep_a_batch_full(tmp_path: Path) -> None:
    runs, _, results = bench(tmp_path, batch="2", waves=3)
    assert runs["off"]["requests"] == 6
    assert runs["off"]["mean_running"] == 2
    assert "batches kept full for 3 times their size" in conditions(results)


def test_staggered_waves_start_with_shorter_replies(tmp_path: Path) -> None:
    runs, _, results = bench(tmp_path, batch="2", waves=3, stagger=True)
    assert runs["off"]["requests"] == 6
    assert runs["off"]["new_tokens"] == 3 + 5 * 6
    assert "requests ending one by one" in conditions(results)


def test_acceptance_by_task(tmp_path: Path) -> None:
    prompts = tmp_path / "tasks.jsonl"
    prompts.write_text(
        '{"category": "chat", "turns": ["a"]}\n{"category": "code", "turns": ["b"]}\n'
    )
    runs, _, _ = bench(tmp_path, prompts=(str(prompts),))
    tasks = runs["chain:2"]["tasks"]
    assert {name: task["drafts"] for name, task in tasks.items()} == {
        "chat": 2,
        "code": 2,
    }
    assert tasks["chat"]["acceptance_length"] == pytest.approx(2.0)


def test_token_counts_are_checked_at_temperature_0(two_repeats, tmp_path: Path) -> None:
    runs, _, _ = two_repeats
    assert runs["chain:2"]["token_counts_equal"]
    short, _, _ = bench(tmp_path, "short")
    assert not short["chain:2"]["token_counts_equal"]


def test_results_say_what_was_read(two_repeats) -> None:
    environment = two_repeats[2]["environment"]
    (prompts,) = environment["prompts"]
    content = Path(prompts["path"]).read_bytes()
    assert prompts["sha256"] == hashlib.sha256(content).hexdigest()
    assert set(environment["head"]["sha256"]) == {"config.json"}
    assert environment["options"]["repeats"] == 2
    assert environment["versions"]["torch"]


def test_sampled_texts_are_not_compared(tmp_path: Path) -> None:
    runs, _, _ = bench(tmp_path, "wrong", temperature="0.8")
    assert runs["chain:2"]["identical"] is None


def test_without_off_there_is_nothing_to_compare_with(tmp_path: Path) -> None:
    runs, _, _ = bench(tmp_path, methods="chain:2")
    assert runs["chain:2"]["identical"] is None
    assert "speed_up" not in runs["chain:2"]


def test_failing_engine_names_its_method(tmp_path: Path) -> None:
    with pytest.raises(WorkerError, match="chain:2: ValueError: head: made for"):
        bench(tmp_path, "refuse")
