"""Verification with vLLM's own Sampler, and the law of what it emits; no engine.

Steps of many mixed requests after the same token of the bigram table: drafts are drawn
from a head that is wrong on every second token, and walked as the runner does.
"""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("vllm")

from vllm.v1.sample.logits_processor import LogitsProcessors
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.sampler import Sampler

from tests.laws import LIMIT, START, Sampling, chi_squared_excess, transition
from tests.models.bigram import VOCAB, bigram_table, half_wrong_table
from tests.mutant import Edit
from vllm_eagle3 import rejection
from vllm_eagle3.drafter import HeadOutput, TreeShape
from vllm_eagle3.integration import drawn_drafts
from vllm_eagle3.integration.draft_sampling import random_stream
from vllm_eagle3.integration.drafts import Drafts
from vllm_eagle3.integration.drawn_drafts import DrawnDrafts, drawn_batch
from vllm_eagle3.integration.sampler import SampledWalk
from vllm_eagle3.integration.target_law import TargetLaw
from vllm_eagle3.sampled_drafter import (
    SampledTree,
    exponential_noise,
    grow_sampled,
    sampled_shape,
)

CPU = torch.device("cpu")
SAMPLES = 3000  # of each law
LAWS = (
    Sampling(0.5),
    Sampling(1.0),
    Sampling(1.5, top_k=20, top_p=0.8),
    Sampling(1.0, top_p=0.6),
    Sampling(0.0),  # matched beside its neighbours
)


def _drawn(num_reqs: int, temperature: torch.Tensor) -> SampledTree:
    """A tree for each request, from a head that says the wrong table's rows."""
    table, shape = half_wrong_table(), sampled_shape(TreeShape(6, 3, 3))

    def advance(level, token_ids, features, parent_row) -> HeadOutput:
        return HeadOutput(torch.zeros(*token_ids.shape, 1), table[token_ids])

    root = HeadOutput(
        torch.zeros(num_reqs, 1, 1), table[START].expand(num_reqs, 1, VOCAB)
    )
    noise = exponential_noise(
        (num_reqs, shape.num_parents, VOCAB), random_stream(1, "drafting", CPU), CPU
    )
    return grow_sampled(root, advance, None, shape, temperature, noise)


def _emitted(samples: int) -> torch.Tensor:
    """[samples, laws, 2]: the first two tokens; -1 where a step gave one."""
    num_reqs = samples * len(LAWS)
    temperature = torch.tensor([law.temperature for law in LAWS]).repeat(samples)
    random = temperature > 0
    drawn = _drawn(num_reqs, temperature.where(random, torch.ones(())))
    tokens, parents = drawn.tree.token_ids, drawn.tree.parents
    width = tokens.shape[1]
    rows = torch.arange(num_reqs * (width + 1)).view(num_reqs, -1)
    drafts = Drafts(tokens, parents, torch.full((num_reqs,), width), rows)
    row = torch.arange(width + 1).clamp(max=drawn.q.shape[1] - 1)
    kept = [
        DrawnDrafts(own, q, row) if sampled else None
        for own, q, sampled in zip(tokens, drawn.q, random.tolist(), strict=True)
    ]
    last = torch.cat([torch.full((num_reqs, 1), START), tokens], 1).flatten()
    top_k = torch.tensor([law.top_k or VOCAB for law in LAWS], dtype=torch.int32)
    sampling = SamplingMetadata(
        temperature=temperature,
        all_greedy=False,
        all_random=False,
        top_p=torch.tensor([law.top_p for law in LAWS]).repeat(samples),
        top_k=top_k.repeat(samples),
        generators={},
        max_num_logprobs=None,
        no_penalties=True,
        prompt_token_ids=None,
        frequency_penalties=torch.zeros(num_reqs),
        presence_penalties=torch.zeros(num_reqs),
        repetition_penalties=torch.ones(num_reqs),
        output_token_ids=[],
        allowed_token_ids_mask=None,
        bad_words_token_ids={},
        logitsprocs=LogitsProcessors(),
    )
    sampler = Sampler()
    verdict, _ = SampledWalk(
        bigram_table()[last],
        drafts,
        sampler,
        sampling,
        TargetLaw(sampler),
        drawn_batch(drafts, kept, None, random_stream(1, "verification", CPU)),
    ).verdict([[] for _ in range(num_reqs)])
    two = torch.nn.functional.pad(verdict.token_ids, (0, 1), value=-1)[:, :2]
    return two.view(samples, len(LAWS), 2)


def worst_of_a_step() -> tuple[float, float]:
    """(worst chi-squared excess over all laws, share of steps that accepted)."""
    torch.manual_seed(0)
    emitted = _emitted(SAMPLES)
    worst = 0.0
    for place, law in enumerate(LAWS):
        step, (first, second) = transition(law), emitted[:, place].T
        worst = max(worst, chi_squared_excess(first, step[START]))
        # A text that stopped at one token goes on as the target does.
        more = torch.multinomial(step[first], 1)[:, 0]
        second = torch.where(second >= 0, second, more)
        pair_law = (step[START][:, None] * step).flatten()
        worst = max(worst, chi_squared_excess(first * VOCAB + second, pair_law))
    return worst, float((emitted[:, :-1, 1] >= 0).float().mean())


def test_every_request_of_a_step_follows_its_own_law() -> None:
    worst, accepting = worst_of_a_step()
    assert worst < LIMIT
    assert 0.1 < accepting < 0.9


@pytest.mark.parametrize(
    "edit",
    [
        Edit("residual not updated", "_residual(p, q), p)", "p, p)"),
        Edit("recovered token from p", "left[~goes_on]", "p[~goes_on]"),
        Edit("a coin that always falls alike", "accept_noise[reqs, child]", "0.5"),
    ],
    ids=lambda edit: edit.name,
)
def test_a_wrong_verifier_is_seen(edit: Edit, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant = edit.of(rejection, "judge_children")
    monkeypatch.setattr(drawn_drafts, "judge_children", mutant)
    assert worst_of_a_step()[0] > LIMIT


def test_a_neighbour_s_temperature_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    judge = drawn_drafts.judge_children

    def shifted(token_ids, siblings, p, q, noise):
        return judge(token_ids, siblings, p.roll(1, 0), q, noise)

    monkeypatch.setattr(drawn_drafts, "judge_children", shifted)
    assert worst_of_a_step()[0] > LIMIT
