"""Temperature above 0: a chain's text follows the target's own law exactly.

The bigram target F2 has a closed-form law; H2 drafts from it, H4 from another one.
"""

from __future__ import annotations

import pytest

from tests.law_runs import worst_excess
from tests.laws import LIMIT, PLACES, START, Sampling, excess

pytestmark = pytest.mark.engine

SAMPLES = 700  # of each law
SETTINGS = {"max_num_seqs": 64, "num_speculative_tokens": 3}

CASES = [
    ("h2", "greedy"),
    ("h4", "probabilistic"),
    pytest.param(("h4", "greedy"), marks=pytest.mark.slow),
    pytest.param(("h2", "probabilistic"), marks=pytest.mark.slow),
]


@pytest.fixture(params=CASES, ids=lambda case: "-".join(case))
def chain(engine, request):
    head, drafts = request.param
    return engine("f2", head, draft_sample_method=drafts, **SETTINGS)


def test_mixed_batch_follows_every_request_s_own_law(chain):
    worst, drafted = worst_excess(chain, SAMPLES)
    assert drafted > 0
    assert worst < LIMIT


def test_padded_one_token_prompts_follow_the_law(engine):
    """One-token prompts that join a running batch are padded with draft ids of -1.

    With two allowed ids at the end of the vocabulary, what stands in front of a row
    of probabilities is large: a kernel that looks up id -1 accepts it.
    """
    from vllm import SamplingParams

    law = Sampling(1.0, allowed=(126, 127))
    handle = engine("f2", "h2", draft_sample_method="greedy", **SETTINGS)
    params = SamplingParams(
        temperature=law.temperature,
        allowed_token_ids=list(law.allowed),
        max_tokens=PLACES,
        ignore_eos=True,
        detokenize=False,
    )
    run = handle.run([[START]] * 1500, params)
    assert run.drafted > 0
    assert excess(run.token_ids, law) < LIMIT


def test_seeded_requests_repeat_whoever_shares_the_batch(engine):
    from vllm import SamplingParams

    def params(seed: int | None, temperature: float = 1.5):
        return SamplingParams(
            temperature=temperature,
            seed=seed,
            max_tokens=24,
            ignore_eos=True,
            detokenize=False,
        )

    handle = engine("f2", "h2", draft_sample_method=None, **SETTINGS)
    alone = handle.run([[9, START]], params(42))
    again = handle.run([[9, START]], params(42))
    others = [params(seed) for seed in (None, 1, 2, None)] + [params(None, 0.0)] * 3
    shared = handle.run([[9, START]] * 8, [*others, params(42)])

    assert alone.drafted > 0
    assert alone.accepted > 0
    assert again.token_ids == alone.token_ids
    assert shared.token_ids[-1] == alone.token_ids[0]


def test_an_exact_head_has_its_sampled_drafts_accepted(engine):
    """By default; a seed asks for the head's best tokens, of which fewer are right."""
    from vllm import SamplingParams

    handle = engine("f2", "h2", draft_sample_method=None, **SETTINGS)
    rates = {}
    for seeded in (False, True):
        params = [
            SamplingParams(
                temperature=1.0,
                seed=n if seeded else None,
                max_tokens=24,
                ignore_eos=True,
                detokenize=False,
            )
            for n in range(64)
        ]
        run = handle.run([[9, START]] * 64, params)
        rates[seeded] = run.accepted / run.drafted
    assert rates[False] > 0.99
    assert 0.2 < rates[True] < 0.8


def test_seed_and_chunked_prompt_give_the_text_of_the_whole_prompt(engine):
    from vllm import SamplingParams

    from tests.models.random_llama import known_prompts

    prompts = known_prompts()[-2:]  # 128 and 300 tokens
    params = SamplingParams(
        temperature=1.0, seed=5, max_tokens=12, ignore_eos=True, detokenize=False
    )
    runs = [
        engine("f1", "h1", max_num_batched_tokens=budget).run(prompts, params)
        for budget in (64, 2048)
    ]
    assert runs[0].drafted > 0
    assert runs[0].token_ids == runs[1].token_ids
