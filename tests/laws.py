"""The exact law of sampled text from the bigram target, and chi-squared against it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tests.models.bigram import bigram_table

# Statistics above df + LIMIT * sqrt(2 df) fail.
LIMIT = 10.0
START = 65  # last token of the prompt
PLACES = 4  # tokens sampled per request


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters of one request; the defaults sample from plain softmax."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    bias: tuple[tuple[int, float], ...] = ()  # (id, what its logit gets)
    allowed: tuple[int, ...] = ()  # ids; empty for all
    seeded: bool = False


MIXED = (
    Sampling(0.5),
    Sampling(1.0),
    Sampling(1.5),
    Sampling(1.0, top_k=5),
    Sampling(1.0, top_p=0.6),
    Sampling(1.5, top_k=20, top_p=0.8),
    Sampling(1.2, min_p=0.1, bias=((50, 3.0), (51, 3.0), (7, -2.0))),
    Sampling(0.0),
    Sampling(1.0, seeded=True),
)


def transition(sampling: Sampling) -> torch.Tensor:
    """P(next | last) with the parameters applied, float64 [last, next]."""
    table = bigram_table().double()
    if sampling.allowed:
        barred = torch.ones(table.shape[1], dtype=torch.bool)
        barred[list(sampling.allowed)] = False
        table[:, barred] = -math.inf
    for token, gain in sampling.bias:
        table[:, token] += gain
    if sampling.temperature == 0:
        return torch.nn.functional.one_hot(table.argmax(-1), table.shape[1]).double()
    order = table.argsort(dim=-1, descending=True)
    sorted_logits = table.gather(-1, order) / sampling.temperature
    if sampling.top_k:
        sorted_logits[:, sampling.top_k :] = -math.inf
    probs = sorted_logits.softmax(-1)
    probs[probs < sampling.min_p * probs[:, :1]] = 0
    probs = probs / probs.sum(-1, keepdim=True)
    # The smallest set of likeliest tokens that holds top_p of the mass.
    probs[probs.cumsum(-1) - probs >= sampling.top_p] = 0
    law = torch.zeros_like(probs).scatter(-1, order, probs)
    return law / law.sum(-1, keepdim=True)


def excess(replies: Sequence[Sequence[int]], sampling: Sampling) -> float:
    """Worst chi-squared over each place and the pair (2, 3), in standard deviations.

    Infinite where a token occurs that the law excludes.
    """
    step = transition(sampling)
    ids = torch.tensor([list(reply) for reply in replies])  # [samples, PLACES]
    marginals = [step[START]]
    for _ in range(PLACES - 1):
        marginals.append(marginals[-1] @ step)
    pair = marginals[1][:, None] * step
    pair_ids = ids[:, 1] * step.shape[1] + ids[:, 2]
    return max(
        chi_squared_excess(pair_ids, pair.flatten()),
        *(chi_squared_excess(ids[:, i], law) for i, law in enumerate(marginals)),
    )


def chi_squared_excess(
    samples: torch.Tensor,  # [samples], indices into law
    law: torch.Tensor,  # [outcomes]
) -> float:
    """(chi-squared - df) / sqrt(2 df), bins that expect less than five merged."""
    counts = torch.bincount(samples, minlength=law.numel()).double()
    if bool(counts[law == 0].any()):
        return math.inf
    expected = law * samples.numel()
    rare = expected < 5
    observed = torch.cat([counts[~rare], counts[rare].sum()[None]])
    expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
    # The merged bin may itself be empty or too small for the approximation.
    large = expected >= 5
    observed, expected = observed[large], expected[large]
    df = observed.numel() - 1
    if df < 1:
        return 0.0
    statistic = float(((observed - expected) ** 2 / expected).sum())
    return (statistic - df) / math.sqrt(2 * df)
