"""The joint law of emitted text equals the target's, in fractions, for both verifiers.

Why this binds the shipped code, although it computes in floats. `match_tree` has no
floats: every combination of target tokens is run through it and weighed exactly.
`reject_tree` is a step function of its uniforms. `sampled_cases` divides every draw of
the drafts and every uniform into boxes, bounded by thresholds computed in fractions;
`reject_tree` itself is run just inside both ends of each box, and the law is added up
from what IT emitted, each box at its exact volume. Each decision is monotone in its
own uniform, so a threshold that lay elsewhere, by as little as a billionth of a box,
would make the two ends disagree. Equal texts at both ends and an equal law therefore
mean that the function's law is the target's, up to the rounding of float64.

p and q depend on the whole path and p has zeros, so that a row or an ancestor taken
from the wrong node shows.
"""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch

from tests.exact_law import (
    CORNERS,
    SHAPES,
    Case,
    Model,
    biased_models,
    emitted,
    emitted_law,
    matched_cases,
    run_rejection,
    sampled_cases,
    target_law,
)
from vllm_eagle3.rejection import reject_tree
from vllm_eagle3.verify import match_tree

NUM_MODELS = 12


def prove(cases: list[Case]) -> list[tuple[int, ...]]:
    """Assert exactness over all cases; return the emitted texts."""
    low, high = (run_rejection(reject_tree, cases, corner) for corner in CORNERS)
    assert low == high
    assert biased_models(cases, low) == set()
    return low


@pytest.mark.parametrize("shape", SHAPES)
def test_sampled_drafts_leave_the_joint_law_exactly(shape: str) -> None:
    wide = (3, 4, 5) if len(SHAPES[shape].children) == 1 else (3, 4)
    cases = [
        case
        for seed in range(NUM_MODELS)
        for vocab in wide
        for case in sampled_cases(Model(seed, vocab), SHAPES[shape])
    ]
    texts = prove(cases)
    deepest = len(SHAPES[shape].children)
    assert max(map(len, texts)) == deepest + 1  # a whole path was accepted
    assert min(map(len, texts)) == 1  # and all children refused


def test_a_tree_cut_anywhere_leaves_the_law() -> None:
    shape = SHAPES["2x2"]
    cases = [
        case
        for kept in range(shape.num_nodes + 1)
        for case in sampled_cases(Model(kept, 3), shape, kept=kept)
    ]
    texts = prove(cases)
    assert {len(t) for t, c in zip(texts, cases, strict=True) if c.kept == 0} == {1}


def test_requests_of_every_shape_in_one_batch_keep_their_own_law() -> None:
    by_shape = [
        sampled_cases(Model(seed, 3 + seed % 2), shape)
        for seed, shape in enumerate(SHAPES.values())
    ]
    longest = max(map(len, by_shape))
    # Interleaved, so that every neighbour is another model's.
    cases = [c[i] for i in range(longest) for c in by_shape if i < len(c)]
    prove(cases)


def test_a_head_that_is_the_target_is_always_accepted() -> None:
    class Agreeing(Model):
        def q(self, path: tuple[int, ...]) -> tuple[Fraction, ...]:
            return self.p(path)

    texts = prove(sampled_cases(Agreeing(3, 4), SHAPES["chain of 2"]))
    assert {len(text) for text in texts} == {3}


@pytest.mark.parametrize("shape", SHAPES)
def test_fixed_drafts_leave_the_joint_law_exactly(shape: str) -> None:
    parents = SHAPES[shape].parents
    num_accepted = 0
    for seed in range(NUM_MODELS):
        model = Model(seed, 3)
        # Siblings are the head's best; which ones does not matter to the law.
        paths: list[tuple[int, ...]] = [()]
        for node, parent in enumerate(parents):
            q = model.q(paths[parent + 1])
            place = parents[:node].count(parent)
            best = sorted(range(3), key=lambda x, q=q: -q[x])[place]
            paths.append((*paths[parent + 1], best))
        cases = list(matched_cases([model.p(path) for path in paths]))
        verdict = match_tree(
            torch.tensor([[path[-1] for path in paths[1:]]] * len(cases)),
            torch.tensor([parents] * len(cases)),
            torch.tensor([len(parents)] * len(cases)),
            torch.tensor([case.says for case in cases]),
        )
        num_accepted += int(verdict.num_accepted.sum())
        law = emitted_law(
            [case.probability for case in cases], emitted(verdict), model, 3
        )
        assert law == target_law(model, 3)
    assert num_accepted > 0
