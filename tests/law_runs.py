"""Sampled text of the bigram target through a real engine, with mixed parameters."""

from __future__ import annotations

from typing import Any

from tests.engine_run import run
from tests.laws import MIXED, PLACES, START, excess


def worst_excess(llm: Any, samples: int) -> tuple[float, int]:
    """Worst chi-squared excess over all laws, and the number of draft tokens.

    All laws are sampled in one batch, neighbours with different parameters.
    """
    from vllm import SamplingParams

    params = [
        SamplingParams(
            temperature=law.temperature,
            top_k=law.top_k,
            top_p=law.top_p,
            max_tokens=PLACES,
            ignore_eos=True,
            detokenize=False,
        )
        for _ in range(samples)
        for law in MIXED
    ]
    result = run(llm, [[9, START]] * len(params), params)
    replies = [result.token_ids[i :: len(MIXED)] for i in range(len(MIXED))]
    worst = max(excess(r, law) for r, law in zip(replies, MIXED, strict=True))
    return worst, result.drafted
