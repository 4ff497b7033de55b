"""The statistic of the law tests: passes on the law, fails on near misses."""

from __future__ import annotations

import pytest
import torch

from tests.laws import LIMIT, MIXED, PLACES, START, Sampling, excess, transition


def _sample(sampling: Sampling, count: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    step = transition(sampling)
    last, columns = torch.full((count,), START), []
    for _ in range(PLACES):
        last = torch.multinomial(step[last], 1, generator=generator).squeeze(-1)
        columns.append(last)
    return torch.stack(columns, dim=1).tolist()


@pytest.mark.parametrize("sampling", MIXED)
def test_samples_of_the_law_pass(sampling):
    assert excess(_sample(sampling, 1000), sampling) < LIMIT


@pytest.mark.parametrize(
    "actual",
    [
        Sampling(0.8),
        Sampling(1.25),
        Sampling(1.0, top_p=0.8),
        Sampling(1.0, top_k=15),
        Sampling(0.0),
    ],
)
def test_samples_of_another_law_fail(actual):
    assert excess(_sample(actual, 1000), Sampling(1.0)) > LIMIT


@pytest.mark.parametrize(
    "asked",
    [
        Sampling(1.0, top_k=5),
        Sampling(1.0, top_p=0.6),
        Sampling(0.5),
        Sampling(1.0, min_p=0.2),
        Sampling(1.0, bias=tuple((token, 1.0) for token in range(60))),
    ],
)
def test_ignored_parameters_fail(asked):
    assert excess(_sample(Sampling(1.0), 1000), asked) > LIMIT


def test_tokens_that_do_not_depend_on_the_last_one_fail():
    replies = torch.tensor(_sample(Sampling(0.5), 1000))
    generator = torch.Generator().manual_seed(4)
    # Shuffling a column keeps every place's law and breaks the pair's.
    replies[:, 2] = replies[torch.randperm(1000, generator=generator), 2]
    assert excess(replies.tolist(), Sampling(0.5)) > LIMIT
