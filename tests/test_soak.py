"""The soak's own judgement: it lets right answers pass, and nothing else."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import product
from pathlib import Path
from random import Random
from typing import Any

import pytest

from vllm_eagle3.acceptance import DraftCounts
from vllm_eagle3.bench.methods import parse_method
from vllm_eagle3.soak import checks, law
from vllm_eagle3.soak.adapters import write_adapter
from vllm_eagle3.soak.checks import Round
from vllm_eagle3.soak.client import Answer, Choice
from vllm_eagle3.soak.judge import Verdict, judge
from vllm_eagle3.soak.meter import Counters, read_metrics
from vllm_eagle3.soak.run import SoakOptions
from vllm_eagle3.soak.server import ServerSpec
from vllm_eagle3.soak.workload import MIN_DISTINCT, Request, Source, catalogue

SOURCE = Source("model", list(range(3, 120)), 512, ("adapter-0", "adapter-1"))
ONE = Round(
    seconds=2.0,
    verdicts=[(0, "greedy", Verdict())],
    counters=Counters(DraftCounts(1000, 8000, 1500, (900, 600)), 2500, 1000, 400),
    memory=[1000, 1010, 1005],
)


# ---- the requests


def test_catalogue_has_every_kind_and_is_the_same_again() -> None:
    requests = catalogue(SOURCE, 40)
    assert requests == catalogue(SOURCE, 40) != catalogue(SOURCE, 40, seed=1)
    kinds = Counter(request.kind for request in requests)
    assert len(kinds) == 18 and kinds["greedy"] == 4
    smallest = catalogue(SOURCE, MIN_DISTINCT)
    assert {request.kind for request in smallest} == set(kinds)


def test_requests_stay_inside_the_context_but_for_those_that_must_not() -> None:
    for request in catalogue(SOURCE, 200):
        if not request.chat:
            length = len(request.fields["prompt"]) + request.fields["max_tokens"]
            assert (length > SOURCE.context) == (request.kind == "too long")


def test_without_adapters_there_is_no_request_for_one() -> None:
    requests = catalogue(replace(SOURCE, adapters=()), 100)
    assert {request.fields["model"] for request in requests} == {"model"}
    with pytest.raises(ValueError, match="size: got 3, want at least"):
        catalogue(SOURCE, 3)


def test_adapter_fits_its_target(tmp_path: Path, small_target: Path) -> None:
    from safetensors.torch import load_file

    write_adapter(tmp_path, small_target, seed=1)
    weights = load_file(tmp_path / "adapter_model.safetensors")
    assert len(weights) == 8 * 2 * 2
    name = "base_model.model.model.layers.7.self_attn.v_proj.lora_B.weight"
    assert weights[name].shape == (64, 4)


# ---- one answer


def answer(*ids: int, text: str = "", **fields: Any) -> Answer:
    """An answer of one choice; its text names its ids unless another is given."""
    choice = Choice(text or "".join(f"<{i}>" for i in ids), list(ids), "length")
    for name, value in fields.items():
        setattr(choice, name, value)
    return Answer({0: choice}, len(ids))


PLAIN = Request(0, "greedy", {"model": "m", "prompt": [1]})
STOPS = Request(0, "stop strings", {"model": "m", "prompt": [1], "stop": ["x"]})
DROPPED = replace(PLAIN, drop_after=2)
LOGPROBS = Request(0, "log-probabilities", {"model": "m", "logprobs": 3})
TIE = [{1: -0.1}, {2: -0.7, 9: -0.70001}, {3: -0.1, 4: -3.0}]
NO_TIE = [{1: -0.1}, {2: -0.7, 9: -0.9}, {3: -0.1, 4: -3.0}]


@pytest.mark.parametrize(
    ("request_", "expected", "given"),
    [
        (PLAIN, answer(1, 2, 3), answer(1, 2, 3)),
        (DROPPED, answer(1, 2, 3), answer(1, 2)),
        (PLAIN, Answer(status=400), Answer(status=400)),
        # The run that was accepted ends behind the stop string.
        (
            STOPS,
            answer(1, 2, text="a", stop_reason="x", finish_reason="stop"),
            answer(1, 2, 3, text="a", stop_reason="x", finish_reason="stop"),
        ),
        (
            LOGPROBS,
            answer(1, top_logprobs=[{1: -0.1}]),
            answer(1, top_logprobs=[{1: -0.1004}]),
        ),
    ],
)
def test_right_answers(request_: Request, expected: Answer, given: Answer) -> None:
    assert judge(request_, expected, given) == Verdict()


@pytest.mark.parametrize(
    ("request_", "expected", "given", "reason"),
    [
        (PLAIN, answer(1, 2, 3), answer(1, 9, 3), r"token 1: \.\.\.\[1, 9, 3\], want"),
        (PLAIN, answer(1, 2, 3), answer(1, 2), "token 2"),
        (PLAIN, answer(1, 2, 3), answer(1, 2, 3, 4), "token 3"),
        (PLAIN, answer(1, 2, 3, top_logprobs=NO_TIE), answer(1, 9, 3), "token 1"),
        # A reply that is cut short is no near tie.
        (PLAIN, answer(1, 2, 3, top_logprobs=TIE), answer(1), "token 1"),
        (DROPPED, answer(1, 2, 3), answer(1, 9), "token 1"),
        (DROPPED, answer(1, 2, 3), Answer(), "no token"),
        # Only what lies behind the stop string may differ.
        (
            STOPS,
            answer(1, 2, stop_reason="x"),
            answer(1, 3, 4, stop_reason="x"),
            "token 1",
        ),
        (STOPS, answer(1, 2), answer(1, 2, 3), "token 2"),
        (DROPPED, answer(1, 2, text="ab"), answer(1, text="b"), "text 'b'"),
        (PLAIN, answer(1), Answer(status=0, error="gone"), "status 0, want None; gone"),
        (PLAIN, Answer(status=400), answer(1), "status None, want 400"),
        (PLAIN, answer(1), answer(1, text="other"), "text 'other'"),
        (PLAIN, answer(1), answer(1, finish_reason="stop"), "finish_reason stop"),
        (STOPS, answer(1, stop_reason="x"), answer(1, stop_reason="y"), "stop_reason"),
        (PLAIN, answer(1), replace(answer(1), completion_tokens=2), "2 completion"),
        (PLAIN, answer(1), replace(answer(1), choices={}), "choices"),
        (
            LOGPROBS,
            answer(1, top_logprobs=[{1: -0.1}]),
            answer(1, top_logprobs=[{1: -0.2}]),
            "log-probability -0.2 at token 0",
        ),
        (
            LOGPROBS,
            answer(1, top_logprobs=[{1: -0.1}]),
            answer(1),
            r"log-probabilities of set\(\) at token 0",
        ),
        (replace(PLAIN, law=0), answer(1, 2), answer(1), r"samples of \[1\] tokens"),
    ],
)
def test_wrong_answers(
    request_: Request, expected: Answer, given: Answer, reason: str
) -> None:
    import re

    assert re.search(reason, judge(request_, expected, given).wrong)


def test_near_tie_is_said_and_excused() -> None:
    expected = answer(1, 2, 3, top_logprobs=TIE)
    assert judge(PLAIN, expected, answer(1, 9, 7)) == Verdict(near_tie=True)


# ---- the law

TOSSES = {
    outcome: 0.6 ** sum(outcome) * 0.4 ** (4 - sum(outcome))
    for outcome in product((0, 1), repeat=4)
}


def tosses(chance: float, sticky: float = 0.0) -> list[tuple[int, ...]]:
    """Samples of four tosses; `sticky` is how often one repeats that before it."""
    random, samples = Random(7), []
    for _ in range(2000):
        toss: list[int] = []
        for _ in range(4):
            again = toss and random.random() < sticky
            toss.append(toss[-1] if again else int(random.random() < chance))
        samples.append(tuple(toss))
    return samples


def drawn(number: int, seed: int) -> list[tuple[int, ...]]:
    """Samples of the law itself."""
    return Random(seed).choices(list(TOSSES), list(TOSSES.values()), k=number)


def test_chi_squared_knows_the_law_from_others() -> None:
    assert law.p_value(tosses(0.6), TOSSES) > 0.01
    assert law.p_value(tosses(0.55), TOSSES) < law.LEAST_P
    # Right at every place, wrong together.
    assert law.p_value(tosses(0.6, sticky=0.2), TOSSES) < law.LEAST_P
    assert law.p_value([(0, 0, 0, 2)], TOSSES) == 0


def test_p_values_of_the_law_itself_are_uniform() -> None:
    """The least of two hundred is near 1/200, not beyond the limit."""
    assert law.p_value([], TOSSES) == 1
    found = sorted(law.p_value(drawn(400, seed), TOSSES) for seed in range(200))
    assert 1e-4 < found[0] < 0.05 and 0.4 < found[100] < 0.6


def test_law_check_needs_samples() -> None:
    assert not checks.law_holds([ONE] * 3, 0, TOSSES).ok
    sampled = replace(ONE, samples={0: tosses(0.6)})
    assert checks.law_holds([sampled] * 3, 0, TOSSES).ok


# ---- the whole soak


def counters(**changes: Any) -> Counters:
    return replace(ONE.counters, **changes)


def test_a_quiet_soak_holds() -> None:
    found = checks.check_all([ONE] * 6, {}, is_alive=True)
    assert all(check.ok for check in found) and len(found) == 7


LESS_ACCEPTED = DraftCounts(1000, 8000, 1300, (800, 500))
FAULTS: dict[str, tuple[str, list[Round]]] = {
    "a wrong answer": (
        "answers",
        [ONE, replace(ONE, verdicts=[(3, "json", Verdict("token 1"))]), ONE],
    ),
    "no answer at all": ("answers", [replace(ONE, verdicts=[])] * 3),
    "a block not given back": ("KV blocks", [ONE, replace(ONE, kv_left=0.004), ONE]),
    "memory": ("memory", [ONE, ONE, replace(ONE, memory=[1030])]),
    "memory not read": ("memory", [ONE, ONE, replace(ONE, memory=[])]),
    "nothing accepted": (
        "speculation",
        [replace(ONE, counters=counters(drafts=DraftCounts(9, 9, 0)))] * 3,
    ),
    "acceptance": (
        "acceptance",
        [ONE, ONE, replace(ONE, counters=counters(drafts=LESS_ACCEPTED))],
    ),
    "no drafts at last": (
        "acceptance",
        [ONE, ONE, replace(ONE, counters=counters(drafts=DraftCounts()))],
    ),
    "cache hits": (
        "prefix cache",
        [ONE, ONE, replace(ONE, counters=counters(cache_hits=370))],
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_fails_its_check_alone(fault: str) -> None:
    name, rounds = FAULTS[fault]
    failed = [c.name for c in checks.check_all(rounds, {}, True) if not c.ok]
    assert failed == [name]


def with_hits(*rates: int) -> list[Round]:
    return [replace(ONE, counters=counters(cache_hits=rate)) for rate in rates]


def test_cache_hits_may_differ_by_what_rounds_differ_by() -> None:
    """A measured soak of rounds of 50, and one that decays."""
    steady = with_hits(319, 350, 345, 355, 319, 335)
    assert checks.cache_hits_are_steady(steady).ok
    assert not checks.cache_hits_are_steady(with_hits(*[350] * 4, 310, 312)).ok


def test_every_prompt_of_known_law_has_its_turn() -> None:
    laws = [request.law for request in catalogue(SOURCE, 50) if request.kind == "law"]
    assert set(laws) == {0, 1}


def test_a_dead_server_fails() -> None:
    failed = [c.name for c in checks.check_all([ONE] * 3, {}, False) if not c.ok]
    assert failed == ["server"]


def test_thirds_are_whole_rounds() -> None:
    assert [len(third) for third in checks.thirds([ONE] * 8)] == [2, 2, 4]


@pytest.mark.parametrize("number", [0, 1, 2])
def test_too_few_rounds_are_said(number: int) -> None:
    found = checks.check_all([ONE] * number, {}, is_alive=True)
    failed = {check.name: check.found for check in found if not check.ok}
    assert f"{number}, want at least 3" in failed["rounds"]


def test_metrics_page_is_read() -> None:
    page = """
# TYPE vllm:spec_decode_num_drafts counter
vllm:spec_decode_num_drafts_total{engine="0"} 10
vllm:spec_decode_num_draft_tokens_total{engine="0"} 80
vllm:spec_decode_num_accepted_tokens_total{engine="0"} 13
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="1"} 4
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="0"} 9
vllm:prefix_cache_queries_total{engine="0"} 100
vllm:prefix_cache_hits_total{engine="0"} 64
vllm:num_requests_running{engine="0"} 2
vllm:num_requests_waiting{engine="0"} 3
vllm:kv_cache_usage_perc{engine="0"} 0.25
"""
    reading = read_metrics(page)
    assert reading.counters.drafts == DraftCounts(10, 80, 13, (9, 4))
    assert reading.counters.hit_rate == 0.64
    assert (reading.kv_use, reading.unfinished) == (0.25, 5)


def options(**changes: Any) -> SoakOptions:
    return SoakOptions(Path("t"), Path("h"), Path("o"), **changes)


def test_rounds_of_the_usual_sizes() -> None:
    sizes = [
        (options(requests=n).rounds, options(requests=n).distinct)
        for n in (60, 300, 3000, 100_000)
    ]
    assert sizes == [(3, 20), (6, 50), (6, 500), (200, 500)]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"requests": 59}, "requests: got 59, want at least 60"),
        ({"concurrency": 0}, "concurrency: got 0"),
        ({"minutes": 0}, "minutes: got 0"),
        ({"method": parse_method("off")}, "method: got off"),
        ({"method": parse_method("chain:3")}, "method: got chain:3"),
    ],
)
def test_bad_options(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        options(**changes)


def test_server_command_is_what_users_type() -> None:
    method = parse_method("ours:tree:8")
    spec = ServerSpec(Path("T"), Path("H"), method, 512, 16, 64, {"a": Path("A")})
    command = " ".join(spec.command(8000)[1:])
    assert command.startswith("serve T --host 127.0.0.1 --port 8000 --dtype float32")
    assert '"num_speculative_tokens": 8' in command and '"shape": "tree"' in command
    assert "--num-gpu-blocks-override 64" in command and "--lora-modules a=A" in command
    plain = " ".join(replace(spec, method=parse_method("off")).command(8000))
    assert "speculative" not in plain and "additional" not in plain


# ---- what is said


def test_report_is_json_and_names_what_is_wrong() -> None:
    import json

    from vllm_eagle3.soak.command import describe, make_report
    from vllm_eagle3.soak.run import Expected, Progress, Soaked

    bad = replace(ONE, verdicts=[(3, "json", Verdict("token 1"))])
    rounds = [ONE, bad, ONE]
    found = checks.check_all(rounds, {}, is_alive=True)
    soaked = Soaked(Expected([], [], {}), rounds, is_alive=True)
    report = json.loads(json.dumps(make_report(options(), soaked, found)))
    assert not report["ok"] and report["requests"] == 3
    wrong = {"round": 1, "request": 3, "kind": "json", "why": "token 1"}
    assert report["wrong"] == [wrong] and report["kinds"] == {"greedy": 2, "json": 1}
    assert report["rounds"][0]["acceptance_length"] == 2.5

    moment = Progress("round 2", 30, 60, 1, 812.4, 2.5, 0.25, 3 << 30)
    assert describe(moment) == (
        "round 2: 30/60, 1 wrong, 812 tokens/s, acceptance length 2.50, KV 25%, "
        "memory 3072 MiB"
    )


# ---- a small one


@pytest.mark.slow
@pytest.mark.engine
def test_small_soak_of_the_tiny_pair(models: Any, tmp_path: Path) -> None:
    import json

    from rich.console import Console

    from vllm_eagle3.soak.command import run_soak_command

    small = SoakOptions(models("f3"), models("h2"), tmp_path, requests=60)
    holds = run_soak_command(small, Console())
    report = json.loads((tmp_path / "soak.json").read_text())
    assert holds and report["ok"], report["checks"]
    assert report["requests"] == 60 and len(report["kinds"]) == 18
    assert all(each["acceptance_length"] > 1.5 for each in report["rounds"])
