"""reject_tree in float32: the drawn example, edges of probability, and chi-squared."""

from __future__ import annotations

import pytest
import torch

from tests.laws import LIMIT, chi_squared_excess
from vllm_eagle3.rejection import VerifyNoise, reject_tree
from vllm_eagle3.sampled_drafter import SampledShape, draw_children
from vllm_eagle3.tree import ROOT, DraftTree, chain
from vllm_eagle3.verify import Verdict

VOCAB = 16


def one(
    token_ids: list[int],
    parents: list[int],
    p: list[list[float]],
    q: list[list[float]],
    accept: list[float],
    final: float,
) -> Verdict:
    """Judge one request's tree."""
    return reject_tree(
        DraftTree(
            torch.tensor([token_ids]),
            torch.tensor([parents]),
            torch.zeros(1, len(parents)),
        ),
        torch.tensor([len(token_ids)]),
        torch.tensor([p]),
        torch.tensor([q]),
        VerifyNoise(torch.tensor([accept]), torch.tensor([final])),
    )


P = [[0.5, 0.25, 0.25], [0.0, 0.0, 1.0], [0.2, 0.3, 0.5]]
Q = [[0.25, 0.5, 0.25]]


def test_second_sibling_is_judged_by_the_residual() -> None:
    # Token 1 is refused above p/q = 1/2. Then p is (1, 0, 0), q is (1/2, 0, 1/2).
    verdict = one([1, 0], [-1, -1], P, Q, [0.6, 0.999], 0.1)
    assert verdict.nodes.tolist() == [[1]]
    assert verdict.token_ids.tolist() == [[0, 0]]  # the bonus of row 2, at 0.1


def test_recovered_token_comes_from_the_residual() -> None:
    verdict = one([1, 2], [-1, -1], P, Q, [0.6, 0.0], 0.999)
    assert verdict.token_ids.tolist() == [[0]]
    assert verdict.num_accepted.tolist() == [0]


def test_bonus_comes_from_the_accepted_leaf() -> None:
    verdict = one([1, 2], [-1, -1], P, Q, [0.4, 0.0], 0.3)
    assert verdict.nodes.tolist() == [[0]]
    assert verdict.token_ids.tolist() == [[1, 2]]


def test_without_drafts_the_target_is_sampled() -> None:
    empty = chain(torch.zeros(1, 0, dtype=torch.int64), torch.zeros(1, 0))
    verdict = reject_tree(
        empty,
        torch.tensor([0]),
        torch.tensor([[[0.25, 0.5, 0.25]]]),
        torch.zeros(1, 1, 3),
        VerifyNoise(torch.zeros(1, 0), torch.tensor([0.7])),
    )
    assert verdict.token_ids.tolist() == [[1]]
    assert verdict.nodes.shape == (1, 0)


def test_a_request_without_drafts_beside_one_that_has_some() -> None:
    """Its padding is -1, which no index may ever be (on a GPU it kills the engine)."""
    verdict = reject_tree(
        DraftTree(
            torch.tensor([[1, 2], [-1, -1]]),
            torch.tensor([[ROOT, 0], [ROOT, ROOT]]),
            torch.zeros(2, 2),
        ),
        torch.tensor([2, 0]),
        torch.tensor([P, P]),
        torch.tensor([[*Q, *Q], [*Q, *Q]]),
        VerifyNoise(torch.full((2, 2), 0.999), torch.tensor([0.1, 0.7])),
    )
    assert verdict.token_ids.tolist() == [[0], [1]]
    assert verdict.num_accepted.tolist() == [0, 0]


@pytest.mark.parametrize("uniform", [0.0, 0.5, 1.0 - 2**-24, 1.0])
def test_a_token_without_probability_is_never_emitted(uniform: float) -> None:
    p = [[0.0, 0.5, 0.0, 0.5, 0.0]] * 3
    q = [[0.5, 0.125, 0.25, 0.125, 0.0]]
    verdict = one([0, 2], [-1, -1], p, q, [uniform, uniform], uniform)
    assert verdict.num_accepted.tolist() == [0]
    assert int(verdict.token_ids) in (1, 3)


@pytest.mark.parametrize("uniform", [0.0, 0.5, 1.0])
def test_a_child_that_q_excludes_is_never_accepted(uniform: float) -> None:
    # Nothing was left to draw after token 0, so node 1 says nothing.
    p, q = [[0.5, 0.25, 0.25]] * 3, [[1.0, 0.0, 0.0]]
    verdict = one([0, 1], [-1, -1], p, q, [0.75, uniform], 0.25)
    assert verdict.token_ids.tolist() == [[1]]
    assert verdict.num_accepted.tolist() == [0]


@pytest.mark.parametrize("uniform", [0.0, 1.0 - 2**-24])
def test_equal_laws_accept_everything(uniform: float) -> None:
    p = [[0.1, 0.2, 0.3, 0.4]] * 3
    verdict = one([0, 3], [-1, 0], p, p[:2], [uniform] * 2, 0.5)
    assert verdict.num_accepted.tolist() == [2]


def test_a_residual_lost_to_rounding_leaves_the_target() -> None:
    # p = q refuses only at a uniform of 1, which no generator should give.
    p = [[0.5, 0.5, 0.0]] * 2
    verdict = one([0], [-1], p, p[:1], [1.0], 1.0)
    assert bool(torch.isin(verdict.token_ids, torch.tensor([0, 1])).all())


def test_q_of_a_reduced_vocabulary_is_read_in_target_ids() -> None:
    to_target_ids = torch.tensor([1, 4, 5])
    q = torch.tensor([[[0.5, 0.25, 0.25]]])
    q_wide = torch.zeros(1, 1, 6).index_copy_(2, to_target_ids, q)
    generator = torch.Generator().manual_seed(0)
    p = torch.rand(1, 3, 6, generator=generator).softmax(-1)
    tree = DraftTree(
        torch.tensor([[4, 1]]), torch.tensor([[-1, -1]]), torch.zeros(1, 2)
    )
    for _ in range(50):
        uniforms = torch.rand(3, generator=generator)
        noise = VerifyNoise(uniforms[None, :2], uniforms[2:])
        narrow = reject_tree(tree, torch.tensor([2]), p, q, noise, to_target_ids)
        wide = reject_tree(tree, torch.tensor([2]), p, q_wide, noise)
        assert torch.equal(narrow.token_ids, wide.token_ids)


def laws_that_disagree(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(p, q), each [VOCAB + 1, VOCAB]: the law after every token, and at the root.

    q prefers what p avoids; two tokens have no probability under p.
    """
    generator = torch.Generator().manual_seed(seed)
    logits = 1.5 * torch.randn(VOCAB + 1, VOCAB, generator=generator)
    p = logits.index_fill(1, torch.tensor([3, 11]), -torch.inf).softmax(-1)
    noise = torch.randn(VOCAB + 1, VOCAB, generator=generator)
    return p, (0.5 * noise - 0.7 * logits).softmax(-1)


@pytest.mark.parametrize(
    "children", [((1,), (1,)), ((3,),), ((2,), (2, 2)), ((3,), (0, 2, 1))]
)
def test_chi_squared_over_drawn_trees(children: tuple[tuple[int, ...], ...]) -> None:
    shape, samples = SampledShape(children), 200_000
    generator = torch.Generator().manual_seed(11)
    p, q = laws_that_disagree(5)
    first = torch.full((samples,), VOCAB)  # the root's row
    tokens: list[torch.Tensor] = []
    for counts in children:
        above = tokens[-len(counts) :] if tokens else [first]
        for parent, count in zip(above, counts, strict=True):
            noise = torch.empty(samples, VOCAB).exponential_(generator=generator)
            drawn = draw_children(q[parent], count, noise)
            tokens += [drawn[:, turn] for turn in range(count)]
    token_ids = torch.stack(tokens, 1)
    rows = torch.stack([first, *tokens], 1)
    verdict = reject_tree(
        DraftTree(
            token_ids,
            torch.tensor(shape.parents).expand_as(token_ids),
            torch.zeros(token_ids.shape),
        ),
        torch.full((samples,), shape.num_nodes),
        p[rows],
        q[rows],
        VerifyNoise(
            torch.rand(token_ids.shape, generator=generator),
            torch.rand(samples, generator=generator),
        ),
    )
    text = verdict.token_ids
    assert 0.05 < float((text[:, 1] >= 0).float().mean()) < 0.95
    # A text that stopped at one token goes on as the target does.
    more = torch.multinomial(p[text[:, 0]], 1, generator=generator)[:, 0]
    second = torch.where(text[:, 1] >= 0, text[:, 1], more)
    pair_law = (p[VOCAB][:, None] * p[:VOCAB]).double()
    pair_law = (pair_law / pair_law.sum()).flatten()
    assert chi_squared_excess(text[:, 0] * VOCAB + second, pair_law) < LIMIT
    # And the same samples reject a law that is slightly off.
    warmer = p[VOCAB].double() ** 0.9
    assert chi_squared_excess(text[:, 0], warmer / warmer.sum()) > LIMIT


def test_root_is_named_as_trees_name_it() -> None:
    assert SampledShape(((2,), (1, 0))).parents == [ROOT, ROOT, 0]
