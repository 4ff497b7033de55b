"""Any requests in any company: the replies of a roomy engine without speculation.

The engine under test has little room: prompts go in pieces, requests are preempted,
prefixes are cached. Target F3 looks back, and its head knows most of what it says.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.engine_run import EngineHandle, EnginePool, llm_settings
from tests.processors import NoRecent, Phases
from tests.replies import Reply, replies
from tests.tree_engine import counter, tree_settings

pytest.importorskip("vllm")
pytestmark = pytest.mark.engine

SHAPES: dict[str, dict[str, Any]] = {
    "chain": {"num_speculative_tokens": 5},
    "tree": tree_settings(4, 5, 12),
    "auto": {"num_speculative_tokens": 12, "additional_config": {}},
}
COMMON: dict[str, Any] = {
    "skip_tokenizer_init": False,
    "logits_processors": [NoRecent, Phases],
    "max_model_len": 128,
    "block_size": 32,
}
LITTLE_ROOM = {
    "max_num_seqs": 5,
    "max_num_batched_tokens": 40,
    "num_gpu_blocks_override": 9,
    "enable_prefix_caching": True,
    "draft_sample_method": None,
}

IDS = st.integers(3, 96)
LETTERS = st.text("abcdefgh", min_size=1, max_size=2)
# Beginnings of two blocks and more are shared: a head's last block is never a hit.
PROMPTS = st.tuples(st.sampled_from([0, 3, 40, 70]), st.lists(IDS, min_size=1)).map(
    lambda parts: [9 + 7 * n % 80 for n in range(parts[0])] + parts[1][:20]
)


LAW = st.fixed_dictionaries(
    {"temperature": st.sampled_from([0.0, 0.0, 0.3, 0.7, 1.0, 1.5])},
    optional={
        "top_k": st.integers(1, 20),
        "top_p": st.floats(0.2, 1.0),
        "min_p": st.floats(0.0, 0.4),
        "presence_penalty": st.floats(-2, 2),
        "frequency_penalty": st.floats(-2, 2),
        "repetition_penalty": st.floats(0.5, 2.0),
        "logit_bias": st.dictionaries(IDS, st.floats(-6, 6), max_size=4),
        "bad_words": st.lists(LETTERS, min_size=1, max_size=3),
    },
)
# One of these at most: together they can leave no token at all.
LIMITS = st.one_of(
    st.just({}),
    st.fixed_dictionaries(
        {"allowed_token_ids": st.lists(IDS, min_size=12, max_size=30, unique=True)}
    ),
    st.fixed_dictionaries(
        {"extra_args": st.sampled_from([{"recent": 3}, {"phases": 2}, {"phases": 5}])}
    ),
    st.just({"regex": "[a-f]{3,12}"}),
)
ENDS = st.fixed_dictionaries(
    {"max_tokens": st.integers(1, 24), "ignore_eos": st.booleans()},
    optional={
        "min_tokens": st.integers(0, 8),
        "stop": st.lists(LETTERS, min_size=1, max_size=3),
        "stop_token_ids": st.lists(IDS, min_size=1, max_size=6),
        "include_stop_str_in_output": st.booleans(),
    },
)
ASKED = st.fixed_dictionaries(
    {},
    optional={
        "n": st.integers(1, 3),
        "logprobs": st.integers(0, 3),
        "prompt_logprobs": st.integers(0, 2),
    },
)
# Less drafting, which must not change the text either.
OPTIONS = st.sampled_from([None, None, None, {"off": True}, {"max_nodes": 2}])


class Asked(NamedTuple):
    """One request; without a seed it is company, for nobody knows what it will say."""

    prompt: list[int]
    settings: dict[str, Any]
    options: dict[str, Any] | None
    seeded: bool


REQUESTS = st.builds(
    lambda prompt, parts, options, seeded: Asked(
        prompt, {k: v for part in parts for k, v in part.items()}, options, seeded
    ),
    PROMPTS,
    st.tuples(LAW, LIMITS, ENDS, ASKED),
    OPTIONS,
    st.booleans(),
)


def _params(seed: int | None, asked: dict[str, Any]) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    asked = dict(asked)
    if regex := asked.pop("regex", None):
        asked["structured_outputs"] = StructuredOutputsParams(regex=regex)
        asked |= {"ignore_eos": False, "min_tokens": 0}
        asked.pop("bad_words", None)  # may forbid what the grammar demands
    if asked["temperature"] == 0:
        asked.pop("n", None)  # vLLM refuses several greedy choices
    asked["min_tokens"] = min(asked.get("min_tokens", 0), asked["max_tokens"])
    return SamplingParams(**asked, seed=seed)


@pytest.fixture(scope="module")
def roomy(models: Any) -> Iterator[EngineHandle]:
    """An engine without speculation that stays beside those under test."""
    from vllm import LLM

    handle = EngineHandle(LLM(**llm_settings(str(models("f3")), **COMMON)))
    yield handle
    handle.llm.llm_engine.engine_core.shutdown()


def _add_options(params: Any, options: dict[str, Any] | None) -> None:
    if options is not None:
        params.extra_args = {**(params.extra_args or {}), "vllm_eagle3": options}


def _assert_equal(want: Reply, got: Reply) -> None:
    assert got.choices == want.choices
    for name in ("logprobs", "prompt_logprobs"):
        pairs = zip(getattr(want, name), getattr(got, name), strict=True)
        for one, other in pairs:
            assert _possible(other) == pytest.approx(_possible(one), abs=1e-4)


def _possible(logprobs: Any) -> Any:
    """Without the tokens that a grammar excludes: all of them rank the same."""
    if not isinstance(logprobs, dict):
        return logprobs
    return {token: value for token, value in logprobs.items() if value > -math.inf}


@pytest.mark.parametrize("shape", SHAPES)
def test_replies_are_those_of_a_roomy_engine_without_speculation(
    roomy: EngineHandle, engine: EnginePool, shape: str
) -> None:
    handle = engine("f3", "h2", **COMMON, **LITTLE_ROOM, **SHAPES[shape])
    drafting = handle.run(
        [[9, 70]], _params(None, {"temperature": 0, "max_tokens": 60})
    )
    assert drafting.accepted > 10

    @given(batch=st.lists(REQUESTS, min_size=1, max_size=8))
    @settings(
        max_examples=50,
        deadline=None,
        derandomize=True,
        # A smaller example would take an engine some hundred runs.
        phases=[Phase.generate],
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    def any_batch(batch: list[Asked]) -> None:
        params = [
            _params(n if each.seeded else None, each.settings)
            for n, each in enumerate(batch)
        ]
        prompts = [each.prompt for each in batch]
        wanted = replies(roomy.llm, prompts, params)
        if shape != "chain":
            for each, their in zip(batch, params, strict=True):
                _add_options(their, each.options)
        found = replies(handle.llm, prompts, params)
        for their, want, got in zip(params, wanted, found, strict=True):
            if their.seed is not None or their.temperature == 0:
                _assert_equal(want, got)

    any_batch()
    assert counter(handle, "vllm:num_preemptions") > 0
    assert counter(handle, "vllm:prefix_cache_hits") > 0
    # The budget looks at plain steps at every batch size first.
    fewest = 50 if shape == "auto" else 200
    assert counter(handle, "vllm:spec_decode_num_accepted_tokens") > fewest
