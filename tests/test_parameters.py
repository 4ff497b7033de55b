"""Any parameters, chain and tree: a seeded request has the text of a plain engine.

Every emitted token is one plain draw of the target, so parameters that look at the
history must see the accepted path, and a generator must move on once a token.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import pytest
from vllm.config.reasoning import ReasoningConfig

from tests.bigram_heads import greedy_chain
from tests.engine_run import EngineHandle
from tests.laws import START
from tests.models.bigram import bigram_table
from tests.models.random_llama import known_prompts
from tests.processors import NoRecent, Phases
from tests.replies import Reply, replies, text_of
from tests.tree_engine import counted_commits, tree_settings

pytestmark = pytest.mark.engine

REPLY = 48
# Tokens that end a reply; a third of the vocabulary, so that minimum lengths matter.
STOPS = list(range(0, 128, 3))
GREEDY = greedy_chain(bigram_table(), START, 12)


# In the greedy reply, where drafts of H2 are all accepted: inside a run.
INSIDE = [text_of(GREEDY[a:b]) for a, b in ((1, 2), (3, 5), (4, 5))]
LETTERS = [chr(c) for c in range(ord("a"), ord("f"))]
# What processors.Marks calls a thought; the budget ends one with '"#'. The greedy reply
# has a '"' at place 3, inside a run.
THINK, THOUGHT, END_OF_THOUGHT = 3, 4, [4, 5]
WORD = "[a-f]{8}"
# The target never says </s> by itself.
LIKELY_END = {"logit_bias": {1: 8.0}, "ignore_eos": False}

# name -> parameters of the requests of that kind; each gets its own seed.
KINDS: dict[str, list[dict[str, Any]]] = {
    "plain": [{"temperature": t} for t in (0.5, 1.0, 1.5)],
    "top_k": [{"top_k": k} for k in (2, 5)],
    "top_p": [{"top_p": p, "top_k": k} for p, k in ((0.5, 0), (0.8, 10))],
    "min_p": [{"min_p": p, "temperature": t} for p, t in ((0.3, 1.0), (0.1, 1.5))],
    "logit bias": [
        {"logit_bias": {50: 100.0}, "temperature": 0.0},
        {"logit_bias": {GREEDY[2]: -100.0}, "temperature": 0.0},
        {"logit_bias": {50: 3.0, 51: 3.0, 70: -100.0}},
    ],
    "presence": [{"presence_penalty": 1.5}, {"presence_penalty": -1.0}],
    "frequency": [
        {"frequency_penalty": 1.0},
        {"frequency_penalty": -0.5, "temperature": 0.5},
    ],
    "repetition": [{"repetition_penalty": 1.4}, {"repetition_penalty": 0.7}],
    "bad words": [{"bad": True}, {"bad": True, "temperature": 0.0}],
    "allowed ids": [{"allowed_token_ids": list(range(3, 23))}],
    "minimum": [
        {"min_tokens": n, "stop_token_ids": STOPS, "temperature": t}
        for n in (2, 5, 6, 11)
        for t in (0.0, 1.0)
    ],
    "stop ids": [
        {"stop_token_ids": [7, 40, 99]},
        *({"stop_token_ids": [token], "temperature": 0.0} for token in GREEDY[1:7]),
    ],
    "stop strings": [
        *({"stop": [stop], "temperature": 0.0, "logprobs": 1} for stop in INSIDE),
        {"stop": [INSIDE[1]], "temperature": 0.0, "include_stop_str_in_output": True},
        *({"stop": LETTERS, "temperature": t} for t in (0.5, 0.7, 1.0, 1.0)),
        {"stop": LETTERS, "min_tokens": 20},
    ],
    "end of text": [LIKELY_END, LIKELY_END | {"min_tokens": 9}],
    "end of text ignored": [LIKELY_END | {"ignore_eos": True}],
    "lengths": [{"max_tokens": n, "temperature": 0.0} for n in range(1, 9)],
    # vLLM refuses several greedy choices; these are as good as greedy.
    "several": [{"n": 3}, {"n": 2, "temperature": 0.01}],
    "greedy penalties": [{"temperature": 0.0, "frequency_penalty": 0.5}],
    "processors": [
        {"extra_args": {"recent": 4}},
        {"extra_args": {"recent": 4}, "temperature": 0.0},
        {"extra_args": {"phases": 3}},
        {"extra_args": {"phases": 2}, "temperature": 0.0},
    ],
    "thinking budget": [
        {"thinking_token_budget": n, "temperature": t}
        for n in (0, 2, 3, 7)
        for t in (0.0, 1.0)
    ],
    "grammar": [{"regex": WORD, "temperature": t} for t in (0.0, 1.0)],
    "grammar after a thought": [
        {"regex": WORD, "temperature": t} for t in (0.0, 0.5, 1.0)
    ],
    "logprobs": [
        {"logprobs": 3, "prompt_logprobs": 2},
        {"logprobs": 0, "temperature": 0.0},
    ],
}
# What an engine needs for them.
SETTINGS: dict[str, Any] = {
    "skip_tokenizer_init": False,
    "logits_processors": [NoRecent, Phases],
    "reasoning_parser": "marks",
    "reasoning_config": ReasoningConfig(
        reasoning_start_str=text_of([THINK]),
        reasoning_end_str=text_of(END_OF_THOUGHT),
    ),
}
# As users have it by default: the neighbours without a seed take sampled drafts.
DRAFTS = {"draft_sample_method": None}
SHAPES = ("chain", "tree")


class Runs(NamedTuple):
    """Replies by kind, and those that asked for log-probabilities of given tokens."""

    kinds: dict[str, list[Reply]]
    given: list[Reply]


def _params(seed: int | None, settings: dict[str, Any]) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    settings = dict(settings)
    barred = settings.pop("bad", False)
    if regex := settings.pop("regex", None):
        grammar = StructuredOutputsParams(regex=regex)
        settings |= {"structured_outputs": grammar, "ignore_eos": False}
    common = {"max_tokens": REPLY, "temperature": 1.0, "ignore_eos": True}
    if "stop_token_ids" in settings:
        common["ignore_eos"] = False
    params = SamplingParams(**common | settings, seed=seed)
    if barred:  # every pair of an even and the next id, and one whole word
        pairs = [[n, n + m] for n in range(4, 120, 2) for m in (1, 2, 3, 4)]
        params._bad_words_token_ids = [*pairs, [50]]
    return params


def _all_kinds(handle: EngineHandle) -> dict[str, list[Reply]]:
    """Every kind in one batch, unseeded neighbours behind them."""
    names = [name for name, kinds in KINDS.items() for _ in kinds]
    seeded = [each for kinds in KINDS.values() for each in kinds]
    params = [_params(seed, settings) for seed, settings in enumerate(seeded)]
    second = {"thinking budget": THINK, "grammar": THOUGHT}
    prompts = [
        [9, second.get(name, 7 + seed), START] for seed, name in enumerate(names)
    ]
    # They end early and late, so that others move to their rows.
    for place in range(len(seeded), 0, -5):
        settings = {"temperature": place % 3, "max_tokens": 3 + place % 30}
        params.insert(place, _params(None, settings))
        prompts.insert(place, [9, 70, START])
    batch = zip(replies(handle.llm, prompts, params), params, strict=True)
    wanted = [reply for reply, each in batch if each.seed is not None]
    return {
        name: [r for r, of in zip(wanted, names, strict=True) if of == name]
        for name in KINDS
    }


def _given_tokens(handle: EngineHandle) -> list[Reply]:
    """In a batch of its own, for vLLM gives all of a batch what one asks for."""
    params = _params(None, {"logprob_token_ids": [5, 70], "temperature": 0.0})
    return replies(handle.llm, [[9, START], [9, 70]], [params] * 2)


@pytest.fixture(scope="module")
def plain(engine: Any) -> Runs:
    handle = engine("f2", **SETTINGS)
    return Runs(_all_kinds(handle), _given_tokens(handle))


@pytest.fixture(scope="module")
def chain(engine: Any, plain: Runs) -> Runs:
    handle = engine("f2", "h2", num_speculative_tokens=5, **DRAFTS, **SETTINGS)
    run = handle.run([[9, START]], _params(None, {"temperature": 0.0}))
    assert run.accepted > 30
    return Runs(_all_kinds(handle), _given_tokens(handle))


@pytest.fixture(scope="module")
def tree(engine: Any, plain: Runs) -> Runs:
    handle = engine("f2", "h2", **tree_settings(4, 6, 16), **DRAFTS, **SETTINGS)
    with counted_commits(handle) as commits:
        kinds = _all_kinds(handle)
    assert commits.branches > 50
    return Runs(kinds, _given_tokens(handle))


@pytest.fixture(params=SHAPES)
def speculative(request: pytest.FixtureRequest) -> Runs:
    return request.getfixturevalue(request.param)


@pytest.mark.parametrize("kind", KINDS)
def test_reply_is_that_without_speculation(
    plain: Runs, speculative: Runs, kind: str
) -> None:
    pairs = zip(plain.kinds[kind], speculative.kinds[kind], strict=True)
    for request, (want, got) in enumerate(pairs):
        assert got.choices == want.choices, KINDS[kind][request]


def test_parameters_change_the_text(plain: Runs) -> None:
    """Otherwise the comparison would say nothing about them."""
    ids = {kind: [r.token_ids[0] for r in runs] for kind, runs in plain.kinds.items()}
    assert len({len(reply) for reply in ids["minimum"]}) > 3
    assert all(t < 23 for t in ids["allowed ids"][0])
    assert all(50 not in reply for reply in ids["bad words"])
    assert ids["logit bias"][0] == [50] * REPLY
    assert GREEDY[2] not in ids["logit bias"][1]
    assert len({tuple(choice) for choice in plain.kinds["several"][0].token_ids}) == 3
    ends = [r.choices[0][2:4] for r in plain.kinds["stop strings"]]
    assert ends[: len(INSIDE)] == [("stop", stop) for stop in INSIDE]
    assert [len(r) for r in ids["lengths"]] == list(range(1, 9))
    assert all(len(r) < REPLY for r in ids["end of text"])
    assert len(ids["end of text ignored"][0]) == REPLY
    assert all(token % 2 for token in ids["processors"][0])
    assert [t >= 64 for t in ids["processors"][2][:6]] == [False] * 3 + [True] * 3
    texts = {
        kind: [r.choices[0][1] for r in runs] for kind, runs in plain.kinds.items()
    }
    assert all(re.fullmatch(WORD, text) for text in texts["grammar"])
    after = [text.partition('"') for text in texts["grammar after a thought"]]
    assert after[0][1] and len(after[0][0]) < 5
    assert all(re.fullmatch(WORD, word) for _, mark, word in after if mark)
    thoughts = zip(KINDS["thinking budget"], ids["thinking budget"], strict=True)
    for settings, reply in thoughts:
        places = range(settings["thinking_token_budget"] + 1)
        assert any(reply[i : i + 2] == END_OF_THOUGHT for i in places)


def test_log_probabilities_are_those_without_speculation(
    plain: Runs, speculative: Runs
) -> None:
    wanted = plain.kinds["logprobs"] + plain.given
    found = speculative.kinds["logprobs"] + speculative.given
    for want, got in zip(wanted, found, strict=True):
        assert len(got.logprobs) == len(got.token_ids[0])
        for name in ("logprobs", "prompt_logprobs"):
            pairs = zip(getattr(want, name), getattr(got, name), strict=True)
            for one, other in pairs:
                assert other == pytest.approx(one, abs=1e-4)
    assert speculative.kinds["logprobs"][0].prompt_logprobs


def test_seeds_with_a_target_that_looks_back(engine: Any) -> None:
    """The random target's text depends on every key and value before it."""
    prompts = known_prompts() * 2
    params = [
        _params(seed, {"temperature": 0.4, "top_p": 0.9})
        for seed in range(len(prompts))
    ]
    plain = replies(engine("f1").llm, prompts, params)
    handle = engine("f1", "h1", **tree_settings(4, 6, 16))
    with counted_commits(handle) as commits:
        tree = replies(handle.llm, prompts, params)
    assert [r.token_ids for r in tree] == [r.token_ids for r in plain]
    assert commits.branches > 0
