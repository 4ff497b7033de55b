"""Sampled text of the bigram target through a real engine, with mixed parameters."""

from __future__ import annotations

from collections.abc import Sequence

from tests.engine_run import EngineHandle
from tests.laws import MIXED, PLACES, START, Sampling, excess


def worst_excess(
    engine: EngineHandle, samples: int, laws: Sequence[Sampling] = MIXED
) -> tuple[float, int]:
    """Worst chi-squared excess over all laws, and the number of draft tokens.

    All laws are sampled in one batch, neighbours with different parameters.
    """
    from vllm import SamplingParams

    params = [
        SamplingParams(
            temperature=law.temperature,
            top_k=law.top_k,
            top_p=law.top_p,
            min_p=law.min_p,
            logit_bias=dict(law.bias) or None,
            seed=sample if law.seeded else None,
            max_tokens=PLACES,
            ignore_eos=True,
            detokenize=False,
        )
        for sample in range(samples)
        for law in laws
    ]
    result = engine.run([[9, START]] * len(params), params)
    replies = [result.token_ids[i :: len(laws)] for i in range(len(laws))]
    worst = max(excess(r, law) for r, law in zip(replies, laws, strict=True))
    return worst, result.drafted
