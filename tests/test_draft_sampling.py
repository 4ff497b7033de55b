"""Who takes sampled drafts, and what is caught and kept to judge them; no engine."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from vllm_eagle3.drafter import TreeShape
from vllm_eagle3.sampled_drafter import sampled_shape
from vllm_eagle3.tree import ROOT
from vllm_eagle3.tree_runs import depth_first

pytest.importorskip("vllm")

from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.sample.logits_processor import LogitsProcessors
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.sampler import Sampler

from tests.engine_run import llm_settings
from tests.laws import LIMIT, chi_squared_excess
from vllm_eagle3.integration.draft_sampling import (
    DraftSampling,
    method_given,
    random_stream,
)
from vllm_eagle3.integration.drafts import Drafts
from vllm_eagle3.integration.drawn_drafts import DrawnDrafts, drawn_batch
from vllm_eagle3.integration.target_law import TargetLaw

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("method", "temperature", "suits"),
    [
        (None, 0.0, False),
        (None, 0.5, False),
        (None, 0.6, True),
        (None, 1.5, True),
        ("greedy", 1.5, False),
        ("probabilistic", 0.0, False),
        ("probabilistic", 0.1, True),
    ],
)
def test_method_and_temperature_choose(
    method: str | None, temperature: float, suits: bool
) -> None:
    params = SamplingParams(temperature=temperature)
    assert DraftSampling(method).suits(params) == suits


@pytest.mark.parametrize(
    "settings", [{"seed": 3}, {"logprobs": 1}, {"logprob_token_ids": [1]}]
)
@pytest.mark.parametrize("method", [None, "probabilistic"])
def test_some_requests_take_ranked_drafts(
    settings: dict[str, Any], method: str | None
) -> None:
    assert not DraftSampling(method).suits(SamplingParams(temperature=1.0, **settings))


def test_a_grammar_takes_ranked_drafts() -> None:
    from vllm.sampling_params import StructuredOutputsParams

    grammar = StructuredOutputsParams(regex="[a-z]*")
    params = SamplingParams(temperature=1.0, structured_outputs=grammar)
    assert not DraftSampling("probabilistic").suits(params)


def test_nothing_said_is_no_method() -> None:
    assert method_given(SimpleNamespace(draft_sample_method="greedy")) is None


def test_streams_of_drafting_and_verification_differ() -> None:
    drafting, verification = (
        torch.rand(8, generator=random_stream(0, name, CPU))
        for name in ("drafting", "verification")
    )
    again = torch.rand(8, generator=random_stream(0, "drafting", CPU))
    replica = torch.rand(8, generator=random_stream(0, "drafting", CPU, replica=1))
    assert torch.equal(drafting, again)
    assert not torch.equal(drafting, verification)
    assert not torch.equal(drafting, replica)


@pytest.mark.parametrize("num_nodes", [1, 3, 8, 16, 64])
@pytest.mark.parametrize(("top_k", "depth"), [(1, 3), (2, 2), (4, 6), (8, 1), (8, 8)])
def test_the_shape_keeps_its_limits(num_nodes: int, top_k: int, depth: int) -> None:
    shape = sampled_shape(TreeShape(num_nodes, top_k, depth))
    room = top_k + (depth - 1) * top_k**2
    assert shape.num_nodes == min(num_nodes, room)
    assert len(shape.children) <= depth
    assert max(map(max, shape.children)) <= top_k
    assert max(shape.parents_by_level) <= top_k


def test_the_shape_is_the_one_with_most_accepted_drafts() -> None:
    # Worth of the children of a node: 0.45, 0.124, 0.064. So 0 comes first, then its
    # first child at 0.2025, the second root draft at 0.124, ...
    assert sampled_shape(TreeShape(2, 3, 3)).children == ((1,), (1,))
    assert sampled_shape(TreeShape(4, 3, 3)).children == ((2,), (1, 0), (1,))
    assert sampled_shape(TreeShape(3, 1, 3)).children == ((1,), (1,), (1,))


VOCAB = 12


def _sampling(num_reqs: int, **settings: Any) -> SamplingMetadata:
    return SamplingMetadata(
        **{
            "temperature": torch.tensor([0.0, 1.0, 2.0, 0.7][:num_reqs]),
            "all_greedy": False,
            "all_random": False,
            "top_p": torch.tensor([1.0, 0.6, 1.0, 0.9][:num_reqs]),
            "top_k": torch.tensor([VOCAB, VOCAB, 4, 6][:num_reqs], dtype=torch.int32),
            "generators": {3: torch.Generator().manual_seed(5)},
            "max_num_logprobs": None,
            "no_penalties": True,
            "prompt_token_ids": None,
            "frequency_penalties": torch.zeros(num_reqs),
            "presence_penalties": torch.zeros(num_reqs),
            "repetition_penalties": torch.ones(num_reqs),
            "output_token_ids": [[] for _ in range(num_reqs)],
            "allowed_token_ids_mask": None,
            "bad_words_token_ids": {},
            "logitsprocs": LogitsProcessors(),
        }
        | settings
    )


def test_the_law_that_is_caught_is_the_one_that_is_sampled() -> None:
    generator = torch.Generator().manual_seed(3)
    logits = 2 * torch.randn(4, VOCAB, generator=generator)
    barred = torch.zeros(4, VOCAB, dtype=torch.bool)
    barred[:, 2] = True
    sampling = _sampling(4, allowed_token_ids_mask=barred)
    sampler = Sampler()
    law, rows = TargetLaw(sampler), torch.tensor([2, 1])
    with law.of(rows):
        sampler(logits=logits.clone(), sampling_metadata=sampling)
    assert (law.p[0] > 0).sum() == 4  # top-k of its own row
    assert law.p[:, 2].tolist() == [0, 0]
    samples = 4000
    many = _sampling(
        1,
        temperature=torch.full((samples,), 1.0),
        top_p=torch.full((samples,), 0.6),
        top_k=None,
        generators={},
        allowed_token_ids_mask=barred[:1].expand(samples, VOCAB),
    )
    drawn = sampler(logits=logits[1].repeat(samples, 1), sampling_metadata=many)
    found = chi_squared_excess(
        drawn.sampled_token_ids[:, 0].long(),
        law.p[1].double() / law.p[1].double().sum(),
    )
    assert found < LIMIT


def test_neighbours_of_a_caught_request_draw_what_they_draw_alone() -> None:
    logits = 2 * torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(4))
    drawn = []
    for rows in (None, torch.tensor([1])):
        sampler = Sampler()
        with TargetLaw(sampler).of(rows):
            output = sampler(logits=logits.clone(), sampling_metadata=_sampling(4))
        drawn.append(output.sampled_token_ids[[0, 3], 0].tolist())
    assert drawn[0] == drawn[1]


def _drafts(token_ids: list[list[int]], num_nodes: list[int]) -> Drafts:
    tokens = torch.tensor(token_ids)
    parents = torch.arange(-1, tokens.shape[1] - 1).expand_as(tokens)
    return Drafts(tokens, parents, torch.tensor(num_nodes), torch.zeros(1))


def _drawn(token_ids: list[int]) -> DrawnDrafts:
    row = torch.arange(len(token_ids) + 1).clamp(max=len(token_ids) - 1)
    q = torch.eye(VOCAB)[: len(token_ids)]
    return DrawnDrafts(torch.tensor(token_ids), q, row)


def test_only_drafts_that_came_back_as_they_were_drawn_are_judged_by_their_law() -> (
    None
):
    drafts = _drafts([[5, 6, 7], [5, 6, -1], [5, 9, -1], [4, 4, 4]], [3, 2, 2, 3])
    drawn = [_drawn([5, 6, 7]), _drawn([5, 6, 7]), _drawn([5, 6, 7]), None]
    batch = drawn_batch(drafts, drawn, None, random_stream(0, "verification", CPU))
    assert batch is not None
    assert batch.requests.tolist() == [0, 1, 2]
    assert batch.came_back.tolist() == [True, True, False]
    assert drawn_batch(drafts, [None] * 4, None, torch.Generator()) is None


def test_children_are_judged_by_the_law_of_their_own_parent() -> None:
    # q is one-hot: token 0 after the root, 1 after node 0.
    drafts = _drafts([[0, 1], [0, 1]], [2, 2])
    batch = drawn_batch(
        drafts, [_drawn([0, 1])] * 2, None, random_stream(0, "verification", CPU)
    )
    assert batch is not None
    p = torch.zeros(2, VOCAB)
    p[0, 0] = p[1, 1] = 1.0
    token, child = batch.judge(torch.tensor([ROOT, 0]), p)
    assert token.tolist() == [0, 1]
    assert child.tolist() == [0, 1]


@pytest.mark.parametrize("limits", [(16, 4, 6), (32, 8, 4), (64, 4, 8)])
def test_any_cut_of_a_drawn_tree_drops_the_last_draws(
    limits: tuple[int, int, int],
) -> None:
    """Trees are sent depth first and cut at any length, blind to their tokens."""
    parents = np.array([sampled_shape(TreeShape(*limits)).parents])
    order = depth_first(parents)[0]
    for length in range(1, len(order)):
        kept = set(order[:length].tolist())
        for node in kept:
            assert parents[0, node] in kept | {ROOT}
            # Siblings are numbered in draw order.
            earlier = np.flatnonzero(parents[0, :node] == parents[0, node])
            assert kept.issuperset(earlier.tolist())


@pytest.mark.parametrize("method", [None, "greedy", "probabilistic"])
def test_what_the_user_said_reaches_the_workers(
    models: Callable[[str], Path], method: str | None
) -> None:
    settings = llm_settings(
        str(models("f2")), str(models("h2")), draft_sample_method=method
    )
    config = EngineArgs(**settings).create_engine_config()
    sent = pickle.loads(pickle.dumps(config.speculative_config))
    assert method_given(sent) == method
