"""Temperature 0: a chain's token ids equal those of the run without speculation."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engine_run import Run
from tests.models.random_llama import known_prompts, other_prompts

pytestmark = pytest.mark.engine

NEW_TOKENS = 36
NEAR_TIE = 1e-4  # log-probability gap below which fp32 may go either way

DEFAULT: dict[str, Any] = {}
# 16 prompts of up to 300 tokens share steps of 64 tokens.
CHUNKED: dict[str, Any] = {"max_num_batched_tokens": 64}
CACHED: dict[str, Any] = {"enable_prefix_caching": True}
SETTINGS = {
    "default": DEFAULT,
    "chunked+cached": CHUNKED | CACHED,
    "chunked": CHUNKED,
    "cached": CACHED,
}


def _greedy(logprobs: int | None = None, new_tokens: int = NEW_TOKENS):
    from vllm import SamplingParams

    return SamplingParams(
        temperature=0,
        max_tokens=new_tokens,
        ignore_eos=True,
        detokenize=False,
        logprobs=logprobs,
    )


def _mixed() -> list[list[int]]:
    return known_prompts() + other_prompts()


@pytest.fixture(scope="module")
def plain(engine):
    """plain(target, setting) -> the run without speculation, made once."""
    runs: dict[tuple[str, str], Any] = {}

    def reference(target: str, setting: str):
        key = (target, setting)
        if key not in runs:
            handle = engine(target, **SETTINGS[setting])
            runs[key] = handle.run(_prompts(target), _greedy(logprobs=2))
            assert runs[key].drafted == 0
        return runs[key]

    return reference


def _prompts(target: str) -> list[list[int]]:
    if target == "f1":
        return _mixed()
    return [[token % 128 for token in prompt] for prompt in _mixed()]


def assert_same(reference: Run, replies: list[list[int]], every: int = 1) -> None:
    """Equal ids; a first difference is excused only at a near-tie of the plain run.

    Args:
        every: replies belong to each `every`-th request of the reference.
    """
    wants, gaps_of = reference.token_ids[::every], reference.gaps[::every]
    for row, (want, gaps, got) in enumerate(zip(wants, gaps_of, replies, strict=True)):
        assert len(got) == len(want), f"request {row}"
        for place, (a, b) in enumerate(zip(want, got, strict=True)):
            if a != b:
                assert gaps[place] < NEAR_TIE, f"request {row}, token {place}: {a}!={b}"
                break


def _slow(*values: Any):
    return pytest.param(*values, marks=pytest.mark.slow)


CASES = [
    ("f1", "h1", 3, "default"),
    ("f1", "h3", 3, "default"),
    ("f1", "h1", 3, "chunked+cached"),
    ("f2", "h2", 3, "default"),
    ("f2", "h4", 3, "default"),
    *(_slow("f1", "h1", 3, setting) for setting in ("chunked", "cached")),
    *(_slow("f1", "h3", 3, setting) for setting in list(SETTINGS)[1:]),
    *(_slow("f2", head, 3, "chunked+cached") for head in ("h2", "h4")),
    *(_slow("f1", "h1", k, "default") for k in (1, 2, 4, 5, 6, 7, 8)),
]


@pytest.mark.parametrize(("target", "head", "k", "setting"), CASES)
def test_batch_and_single_requests_equal_plain(engine, plain, target, head, k, setting):
    reference = plain(target, setting)
    handle = engine(target, head, num_speculative_tokens=k, **SETTINGS[setting])
    prompts = _prompts(target)

    together = handle.run(prompts, _greedy())
    assert_same(reference, together.token_ids)
    assert together.drafted > 0
    if head != "h3":
        assert together.accepted > 0

    alone = [handle.run([prompt], _greedy()) for prompt in prompts[::3]]
    assert_same(reference, [run.token_ids[0] for run in alone], every=3)
    assert all(run.drafted > 0 for run in alone)

    # Again, with prefix caching from the cache.
    assert_same(reference, handle.run(prompts, _greedy()).token_ids)


def test_exact_head_is_always_accepted(engine):
    # One token by the prefill, then steps of 1 + 3: nothing is left over or refused.
    assert NEW_TOKENS % 4 == 0
    run = engine("f2", "h2").run(_prompts("f2"), _greedy(new_tokens=NEW_TOKENS + 1))
    assert run.drafted == run.accepted == len(_mixed()) * NEW_TOKENS // 4 * 3


def test_head_that_knows_the_replies_is_accepted_and_the_random_one_is_not(engine):
    known = known_prompts()
    good = engine("f1", "h1").run(known, _greedy())
    bad = engine("f1", "h3").run(known, _greedy())
    assert good.accepted / good.drafted > 0.9
    assert bad.drafted > good.drafted
    assert bad.accepted / bad.drafted < 0.05
