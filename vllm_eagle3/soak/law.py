"""The target's exact law of a few sampled tokens, and chi-squared against it.

With top-k sampling the continuations of a prompt are a small tree. One plain request a
prefix gives its k log-probabilities, so the law of the joint outcome is a formula, for
any target.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Sequence

import torch
from openai import AsyncOpenAI

from vllm_eagle3.soak.client import ask
from vllm_eagle3.soak.workload import LAW_PLACES, LAW_TOP_K, Request

Law = dict[tuple[int, ...], float]  # outcome -> probability
LEAST_P = 1e-6  # below it the law is wrong
_LEAST_EXPECTED = 5.0


async def exact_law(client: AsyncOpenAI, model: str, prompt: list[int]) -> Law:
    """Probabilities of every LAW_PLACES tokens at temperature 1, top_k LAW_TOP_K.

    Raises:
        ValueError: the server did not answer.
    """
    law: Law = {(): 1.0}
    for _ in range(LAW_PLACES):
        prefixes = list(law)
        steps = await asyncio.gather(
            *(_next_tokens(client, model, prompt + list(p)) for p in prefixes)
        )
        law = {
            (*prefix, token): law[prefix] * probability
            for prefix, step in zip(prefixes, steps, strict=True)
            for token, probability in step.items()
        }
    return law


async def _next_tokens(
    client: AsyncOpenAI, model: str, prompt: list[int]
) -> dict[int, float]:
    fields = {"model": model, "prompt": prompt, "max_tokens": 1, "logprobs": LAW_TOP_K}
    answer = await ask(client, Request(0, "law", fields | {"temperature": 0.0}))
    if answer.status is not None:
        raise ValueError(f"law: the server did not answer; {answer.error}")
    top = answer.choices[0].top_logprobs[0]
    weights = {token: math.exp(value) for token, value in top.items()}
    likeliest = sorted(weights, key=weights.__getitem__, reverse=True)[:LAW_TOP_K]
    total = sum(weights[token] for token in likeliest)
    return {token: weights[token] / total for token in likeliest}


def p_value(samples: Sequence[tuple[int, ...]], law: Law) -> float:
    """Of chi-squared: how often the law itself gives samples as far from it.

    0 for an outcome that cannot be. Outcomes that expect less than five samples share
    a bin.
    """
    counts = Counter(samples)
    if not law.keys() >= counts.keys():
        return 0.0
    expected = {outcome: p * len(samples) for outcome, p in law.items()}
    common = [o for o, number in expected.items() if number >= _LEAST_EXPECTED]
    bins = [(counts[o], expected[o]) for o in common]
    rare = len(samples) - sum(number for _, number in bins)
    if rare >= _LEAST_EXPECTED:
        bins.append((len(samples) - sum(counts[o] for o in common), rare))
    if len(bins) < 2:
        return 1.0
    statistic = sum((seen - number) ** 2 / number for seen, number in bins)
    freedom, value = torch.tensor([len(bins) - 1, statistic]).double() / 2
    return float(torch.special.gammaincc(freedom, value))
