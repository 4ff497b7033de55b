"""What may go wrong inside an engine, and what a request may leave behind."""

from __future__ import annotations

import ast
import gc
import shutil
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import vllm_eagle3
from tests.engine_run import EngineHandle, llm_settings
from tests.models.random_llama import known_prompts
from tests.tree_engine import counter, runner_of, tree_settings

PACKAGE = Path(vllm_eagle3.__file__).parent
NUM_BLOCKS = 24  # of 32 tokens; the requests below want 60
PROMPTS = [[token % 125 + 3 for token in prompt] for prompt in known_prompts() * 2]


# ---- clocks


def test_no_decision_reads_the_wall_clock() -> None:
    """It jumps; durations come from clocks that do not."""
    wall = {("time", "time"), ("time", "time_ns"), ("datetime", "now")}
    wall |= {("datetime", "utcnow"), ("datetime", "today"), ("date", "today")}
    readers = {
        str(file.relative_to(PACKAGE))
        for file in PACKAGE.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text("utf-8")))
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and (node.value.id, node.attr) in wall
    }
    assert readers == {"bench/environment.py"}  # the date of a report


# ---- engines


def _params() -> list[Any]:
    """One set of parameters a prompt: whatever keeps state between steps."""
    from vllm import SamplingParams

    kinds: list[dict[str, Any]] = [
        {},
        {"temperature": 0.8, "top_k": 20},
        {"frequency_penalty": 0.3, "repetition_penalty": 1.2},
        {"temperature": 1.0, "n": 2},
        {"logprobs": 2, "temperature": 0.5},
        {"min_tokens": 9, "stop_token_ids": list(range(0, 128, 3))},
    ]
    common = {"temperature": 0.0, "max_tokens": 64, "detokenize": False}
    params = []
    for number in range(len(PROMPTS)):
        settings = common | kinds[number % len(kinds)]
        if "stop_token_ids" not in settings:
            settings["ignore_eos"] = True
        params.append(SamplingParams(**settings, seed=number))
    return params


def _replies(handle: EngineHandle) -> list[list[list[int]]]:
    outputs = handle.llm.generate(
        [{"prompt_token_ids": prompt} for prompt in PROMPTS], _params(), use_tqdm=False
    )
    return [[list(c.token_ids) for c in output.outputs] for output in outputs]


@pytest.fixture(scope="module")
def plain(engine: Any) -> list[list[list[int]]]:
    return _replies(engine("f3"))


@pytest.fixture(scope="module")
def handle(engine: Any, plain: Any) -> EngineHandle:
    """Trees in an engine whose cache is too small for what is asked of it."""
    return engine(
        "f3",
        "h2",
        num_gpu_blocks_override=NUM_BLOCKS,
        enable_prefix_caching=True,
        **tree_settings(4, 6, 16),
    )


def _scheduler(handle: EngineHandle) -> Any:
    return handle.llm.llm_engine.engine_core.engine_core.scheduler


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.timeout(900)
def test_a_full_cache_preempts_and_loses_no_token(
    handle: EngineHandle, plain: list[list[list[int]]]
) -> None:
    before = counter(handle, "vllm:num_preemptions")
    accepted = counter(handle, "vllm:spec_decode_num_accepted_tokens")
    assert _replies(handle) == plain
    assert counter(handle, "vllm:num_preemptions") > before
    assert counter(handle, "vllm:spec_decode_num_accepted_tokens") > accepted
    assert _scheduler(handle).kv_cache_manager.usage == 0


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.timeout(900)
def test_text_does_not_see_a_clock_that_jumps(
    handle: EngineHandle, plain: list[list[list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    real, jumps = time.time, iter(range(1 << 30))
    monkeypatch.setattr(time, "time", lambda: real() + 7200 * (-1) ** next(jumps))
    assert _replies(handle) == plain
    assert next(jumps) > 0


# ---- per-request state

CONTAINERS = (dict, list, tuple, set, frozenset, deque)


def _held(roots: list[Any]) -> Iterator[Any]:
    """All that objects of ours hold, in containers and in each other."""
    seen, left = set(), list(roots)
    while left:
        each = left.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        yield each
        if isinstance(each, dict):
            left += [*each.keys(), *each.values()]
        elif isinstance(each, CONTAINERS):
            left += each
        elif type(each).__module__.startswith("vllm_eagle3"):
            left += vars(each).values() if hasattr(each, "__dict__") else ()


def _holders(handle: EngineHandle) -> list[Any]:
    runner = runner_of(handle)
    return [runner, runner.drafter, runner.sampler, _scheduler(handle)]


def _requests_held(handle: EngineHandle) -> set[str]:
    held = (each for each in _held(_holders(handle)) if isinstance(each, str))
    return {each for each in held if "request-" in each}


def _elements_held(handle: EngineHandle) -> int:
    return sum(
        len(each) for each in _held(_holders(handle)) if isinstance(each, CONTAINERS)
    )


def _our_objects() -> Counter[str]:
    gc.collect()
    kinds = (type(each) for each in gc.get_objects())
    return Counter(
        f"{kind.__module__}.{kind.__qualname__}"
        for kind in kinds
        if str(getattr(kind, "__module__", "")).startswith("vllm_eagle3")
    )


def _serve_round(handle: EngineHandle) -> None:
    """Every request once, a third of them aborted on the way, and a last one.

    vLLM tells its workers who has ended with the next step, so there must be one.
    """
    engine = handle.llm.llm_engine
    for number, (prompt, params) in enumerate(zip(PROMPTS, _params(), strict=True)):
        inputs = {"prompt_token_ids": prompt}
        engine.add_request(f"request-{number}", inputs, params)
    for _ in range(5):
        engine.step()
    engine.abort_request([f"request-{n}" for n in range(0, len(PROMPTS), 3)])
    while engine.has_unfinished_requests():
        engine.step()
    handle.run([[5, 6, 7]], _params()[0])


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.timeout(900)
def test_nothing_of_a_request_is_left_when_it_has_ended(handle: EngineHandle) -> None:
    _serve_round(handle)
    elements, objects = _elements_held(handle), _our_objects()
    for _ in range(3):
        _serve_round(handle)
    assert _requests_held(handle) == set()
    assert _elements_held(handle) == elements
    assert _our_objects() == objects
    assert _scheduler(handle).kv_cache_manager.usage == 0


@pytest.mark.slow
@pytest.mark.engine
def test_a_planted_leak_would_be_seen(handle: EngineHandle) -> None:
    before = _elements_held(handle)
    runner_of(handle).drafter.planted = {"request-3": [1, 2]}
    try:
        assert _requests_held(handle) == {"request-3"}
        assert _elements_held(handle) == before + 3
    finally:
        del runner_of(handle).drafter.planted


# ---- heads


@pytest.mark.engine
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("file", "keep"),
    [("model.safetensors", 0), ("model.safetensors", 100), ("config.json", 40)],
)
@pytest.mark.parametrize("cut", ["front", "end"])
def test_a_head_cut_short_stops_the_start_by_name(
    models: Callable[[str], Path], tmp_path: Path, file: str, keep: int, cut: str
) -> None:
    """And the next start, with the whole file, goes through."""
    from vllm.engine.arg_utils import EngineArgs

    head = tmp_path / "head"
    shutil.copytree(models("h2"), head)
    whole = (head / file).read_bytes()
    (head / file).write_bytes(whole[:keep] if cut == "front" else whole[keep + 1 :])
    arguments = llm_settings(str(models("f3")), str(head))
    with pytest.raises(ValueError, match=file.replace(".", r"\.")):
        EngineArgs(**arguments).create_engine_config()
    (head / file).write_bytes(whole)
    assert EngineArgs(**arguments).create_engine_config().speculative_config
