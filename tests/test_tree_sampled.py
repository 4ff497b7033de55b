"""Trees at any temperature: a seeded request has the text that it has without them.

Every emitted token is one plain draw of the target, so parameters that look at the
history must see the accepted path, and a generator must move on once a token.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest

from tests.engine_run import EngineHandle
from tests.laws import START
from tests.models.random_llama import known_prompts
from tests.tree_engine import Commits, counted_commits, tree_settings

pytestmark = pytest.mark.engine

REPLY = 48
# Tokens that end a reply; a third of the vocabulary, so that minimum lengths matter.
STOPS = list(range(0, 128, 3))

# name -> parameters of the requests of that kind; each gets its own seed.
KINDS: dict[str, list[dict[str, Any]]] = {
    "plain": [{"temperature": t} for t in (0.5, 1.0, 1.5)],
    "top_k": [{"top_k": k} for k in (2, 5)],
    "top_p": [{"top_p": p, "top_k": k} for p, k in ((0.5, 0), (0.8, 10))],
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
        for n in range(2, 12)
        for t in (0.0, 1.0)
    ],
    "stop ids": [{"stop_token_ids": [7, 40, 99]}] * 2,
    "several": [{"n": 3}],
    "greedy penalties": [{"temperature": 0.0, "frequency_penalty": 0.5}],
    "logprobs": [
        {"logprobs": 3, "prompt_logprobs": 2},
        {"logprobs": 0, "temperature": 0.0},
    ],
}


class Reply(NamedTuple):
    """Token ids of every choice, and log-probabilities where asked for."""

    token_ids: list[list[int]]
    logprobs: list[dict[int, float]]
    prompt_logprobs: list[dict[int, float]]


class Runs(NamedTuple):
    """Replies by kind, and those that asked for log-probabilities of given tokens."""

    plain: dict[str, list[Reply]]
    tree: dict[str, list[Reply]]
    plain_given: list[Reply]
    tree_given: list[Reply]
    commits: Commits


def _params(seed: int | None, settings: dict[str, Any]) -> Any:
    from vllm import SamplingParams

    settings = dict(settings)
    barred = settings.pop("bad", False)
    common = {"max_tokens": REPLY, "detokenize": False, "temperature": 1.0}
    if "stop_token_ids" not in settings:
        common["ignore_eos"] = True
    params = SamplingParams(**common | settings, seed=seed)
    if barred:  # every pair of an even and the next id, and one whole word
        pairs = [[n, n + m] for n in range(4, 120, 2) for m in (1, 2, 3, 4)]
        params._bad_words_token_ids = [*pairs, [50]]
    return params


def _values(steps: Any) -> list[dict[int, float]]:
    return [
        {token: entry.logprob for token, entry in step.items()}
        for step in steps or []
        if step is not None
    ]


def _replies(handle: EngineHandle, prompts: Any, params: list[Any]) -> list[Reply]:
    outputs = handle.llm.generate(
        [{"prompt_token_ids": list(prompt)} for prompt in prompts],
        params,
        use_tqdm=False,
    )
    return [
        Reply(
            [list(choice.token_ids) for choice in output.outputs],
            _values(output.outputs[0].logprobs),
            _values(output.prompt_logprobs),
        )
        for output in outputs
    ]


def _all_kinds(handle: EngineHandle) -> dict[str, list[Reply]]:
    """Every kind in one batch, unseeded neighbours between them."""
    names = [name for name, kinds in KINDS.items() for _ in kinds]
    seeded = [each for kinds in KINDS.values() for each in kinds]
    params, prompts = [], []
    for seed, settings in enumerate(seeded):
        params += [_params(seed, settings), _params(None, {"temperature": seed % 3})]
        prompts += [[9, 11 + seed, START]] * 2
    replies = _replies(handle, prompts, params)[::2]
    return {
        name: [r for r, of in zip(replies, names, strict=True) if of == name]
        for name in KINDS
    }


def _given_tokens(handle: EngineHandle) -> list[Reply]:
    """In a batch of its own, for vLLM gives all of a batch what one asks for."""
    params = _params(None, {"logprob_token_ids": [5, 70], "temperature": 0.0})
    return _replies(handle, [[9, START], [9, 70]], [params] * 2)


@pytest.fixture(scope="module")
def runs(engine: Any) -> Runs:
    handle = engine("f2")
    plain, plain_given = _all_kinds(handle), _given_tokens(handle)
    handle = engine("f2", "h2", **tree_settings(4, 6, 16))
    with counted_commits(handle) as commits:
        tree = _all_kinds(handle)
    return Runs(plain, tree, plain_given, _given_tokens(handle), commits)


def test_branches_were_accepted(runs: Runs) -> None:
    assert runs.commits.branches > 50


@pytest.mark.parametrize("kind", KINDS)
def test_seeded_text_is_that_without_speculation(runs: Runs, kind: str) -> None:
    for plain, tree in zip(runs.plain[kind], runs.tree[kind], strict=True):
        assert tree.token_ids == plain.token_ids


def test_parameters_change_the_text(runs: Runs) -> None:
    """Otherwise the comparison would say nothing about them."""
    minimum = [r.token_ids[0] for r in runs.plain["minimum"]]
    assert len({len(reply) for reply in minimum}) > 4
    assert all(t < 23 for t in runs.plain["allowed ids"][0].token_ids[0])
    assert all(50 not in r.token_ids[0] for r in runs.plain["bad words"])
    assert len({tuple(choice) for choice in runs.plain["several"][0].token_ids}) == 3


def test_log_probabilities_are_those_without_speculation(runs: Runs) -> None:
    plains = runs.plain["logprobs"] + runs.plain_given
    trees = runs.tree["logprobs"] + runs.tree_given
    for plain, tree in zip(plains, trees, strict=True):
        assert len(tree.logprobs) == len(tree.token_ids[0])
        for name in ("logprobs", "prompt_logprobs"):
            wants, gots = getattr(plain, name), getattr(tree, name)
            for want, got in zip(wants, gots, strict=True):
                assert got == pytest.approx(want, abs=1e-4)
    assert runs.tree["logprobs"][0].prompt_logprobs


@pytest.mark.slow
def test_seeds_with_a_target_that_looks_back(engine: Any) -> None:
    """The random target's text depends on every key and value before it."""
    prompts = known_prompts() * 2
    params = [
        _params(seed, {"temperature": 0.4, "top_p": 0.9})
        for seed in range(len(prompts))
    ]
    plain = _replies(engine("f1"), prompts, params)
    handle = engine("f1", "h1", **tree_settings(4, 6, 16))
    with counted_commits(handle) as commits:
        tree = _replies(handle, prompts, params)
    assert [r.token_ids for r in tree] == [r.token_ids for r in plain]
    assert commits.branches > 0
