"""Every wrong verifier that we could think of fails the exact law test.

Two kinds. Text mutants replace one expression of the shipped source and are judged as
the shipped function is: the law added up from what they emit is not the target's, at
either end of the boxes. Draw mutants leave the verifier as it is and draw the drafts in
another way than it is told; the boxes are then exact, and so is the wrong law.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from functools import cache
from typing import Any

import pytest
import torch

from tests.exact_law import (
    CORNERS,
    SHAPES,
    Case,
    Law,
    Model,
    Path,
    biased_models,
    emitted,
    emitted_law,
    matched_cases,
    normalised,
    run_rejection,
    sampled_cases,
    target_law,
    without_replacement,
)
from tests.mutant import Edit
from vllm_eagle3 import rejection, verify
from vllm_eagle3.rejection import reject_tree
from vllm_eagle3.verify import match_tree

REJECTION_EDITS = (
    Edit(
        "q not renormalised after a refusal",
        "return rest / rest.sum(-1, keepdim=True).clamp(min=torch.finfo(q.dtype).tiny)",
        "return rest",
    ),
    Edit("siblings as if drawn with replacement", "_without(q, token), q)", "q, q)"),
    Edit("residual not updated", "_residual(p, q), p)", "p, p)"),
    Edit("residual not renormalised", "above / mass", "above"),
    Edit("recovered token from p", "left[~goes_on]", "p[~goes_on]"),
    Edit(
        "wrong row: the node before",
        "(node + 1).clamp(max=law.shape[1] - 1)",
        "node.clamp(min=0)",
    ),
    Edit("wrong row: q of the root", "_row_after(q, here)", "q[:, 0]"),
    Edit("wrong row: p of the root", "_row_after(p, here)", "p[:, 0]"),
    Edit(
        "wrong ancestor: children of the first node",
        "parents == here[:, None]",
        "parents == here[:, None].clamp(max=0)",
    ),
    Edit(
        "wrong ancestor: any node of that depth",
        "parents == here[:, None]",
        "tree.depths == 1 + torch.where(here < 0, 0, tree.depths[0, here])[:, None]",
    ),
    Edit(
        "bonus from the wrong node: the root",
        "_row_after(p, here)",
        "_row_after(p, torch.where((parents == here[:, None]).any(1), here, -1))",
    ),
    Edit(
        "bonus from the wrong node: the last",
        "_row_after(p, here)",
        "_row_after(p, here + (width - 1 - here) * (parents != here[:, None]).all(1))",
    ),
    Edit("p of the neighbour", "return law[reqs, (", "return law[reqs - 1, ("),
    Edit(
        "nodes that were cut are judged",
        "without_padding(tree.parents, num_nodes)",
        "tree.parents",
    ),
    Edit(
        "one coin for all siblings",
        "accept_noise[reqs, child]",
        "accept_noise[reqs, siblings.int().argmax(1)]",
    ),
    Edit(
        "last sibling first",
        "place == turn",
        "siblings.flip(1).cumsum(1).flip(1) == turn",
    ),
)


@cache
def cases_of_all_shapes() -> list[Case]:
    """Two models a shape, whole and cut by one node, as one padded batch."""
    trees = [
        (shape, kept)
        for shape in [*SHAPES.values()] * 2
        for kept in (shape.num_nodes, shape.num_nodes - 1)
    ]
    return [
        case
        for seed, (shape, kept) in enumerate(trees)
        for case in sampled_cases(Model(seed, 3), shape, kept=kept)
    ]


def test_the_shipped_rejection_passes_where_mutants_fail() -> None:
    cases = cases_of_all_shapes()
    for corner in CORNERS:
        assert not biased_models(cases, run_rejection(reject_tree, cases, corner))


@pytest.mark.parametrize("edit", REJECTION_EDITS, ids=lambda edit: edit.name)
def test_a_mutant_of_rejection_fails(edit: Edit) -> None:
    cases, mutant = cases_of_all_shapes(), edit.of(rejection, "reject_tree")
    for corner in CORNERS:
        assert biased_models(cases, run_rejection(mutant, cases, corner))


def best_of_all(q: Law, k: int) -> list[tuple[Path, Fraction]]:
    """The k likeliest: q is one-hot for each, whatever its softmax says."""
    return [(tuple(sorted(range(len(q)), key=lambda x: -q[x])[:k]), Fraction(1))]


def in_score_order(q: Law, k: int) -> list[tuple[Path, Fraction]]:
    return [
        (tuple(sorted(drawn, key=lambda x: -q[x])), chance)
        for drawn, chance in without_replacement(q, k)
    ]


def better_of_two(q: Law, k: int) -> list[tuple[Path, Fraction]]:
    """One more is drawn than needed, and the unlikeliest dropped."""
    return [
        (tuple(x for x in drawn if x != min(drawn, key=lambda x: (q[x], x))), chance)
        for drawn, chance in without_replacement(q, k + 1)
    ]


def at_half_the_temperature(q: Law, k: int) -> list[tuple[Path, Fraction]]:
    """Drawn at a temperature of 1/2 and judged by q at 1: a neighbour's row."""
    return without_replacement(normalised(chance**2 for chance in q), k)


@pytest.mark.parametrize(
    ("draw", "shape"),
    [
        (best_of_all, "chain of 2"),
        (best_of_all, "two siblings"),
        (best_of_all, "2x2"),
        (in_score_order, "two siblings"),
        (in_score_order, "2x2"),
        (better_of_two, "chain of 2"),
        (better_of_two, "two siblings"),
        (at_half_the_temperature, "chain of 2"),
        (at_half_the_temperature, "two siblings"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_drafts_drawn_otherwise_than_judged_fail(draw: Any, shape: str) -> None:
    cases = [
        case
        for seed in range(8)
        for case in sampled_cases(Model(seed, 4), SHAPES[shape], draw)
    ]
    low, high = (run_rejection(reject_tree, cases, corner) for corner in CORNERS)
    assert low == high  # the boxes are exact, so the law is the mutant's own
    assert len(biased_models(cases, low)) >= 4


def test_a_sibling_dropped_for_its_own_token_fails() -> None:
    """The second of two is judged only where it is likely: not blind."""
    cases = []
    for seed in range(8):
        model = Model(seed, 4)
        for kept in (1, 2):
            cases += [
                case
                for case in sampled_cases(model, SHAPES["two siblings"], kept=kept)
                if (model.q(())[case.tokens[1]] >= Fraction(1, 4)) == (kept == 2)
            ]
    low, high = (run_rejection(reject_tree, cases, corner) for corner in CORNERS)
    assert low == high
    assert len(biased_models(cases, low)) >= 4


MATCH_EDITS = (
    Edit(
        "wrong row: the node before",
        "target_tokens[reqs, here + 1]",
        "target_tokens[reqs, here.clamp(min=0)]",
    ),
    Edit(
        "wrong ancestor: siblings for children",
        "parents == here[:, None]",
        "parents == parents[reqs, here.clamp(min=0)][:, None]",
    ),
    Edit(
        "bonus from the wrong node: not the last",
        "target_tokens[reqs, here + 1]",
        "target_tokens[reqs, (here + 1).clamp(max=width - 1)]",
    ),
    Edit(
        "a draft is emitted where none matched",
        "return token, matching_child(",
        "return token_ids[:, 0], matching_child(",
    ),
)


def biased_by_matching(matcher: Callable[..., Any], temperature: int = 1) -> int:
    """Of how many models a fixed 2x2 tree gives the wrong law.

    `temperature` 2 samples the target as a neighbour at 1/2 would.
    """
    parents, drafts, biased = SHAPES["2x2"].parents, (0, 2, 1, 2, 0, 1), 0
    for seed in range(6):
        model = Model(seed, 3)
        paths: list[Path] = [()]
        for parent, token in zip(parents, drafts, strict=True):
            paths.append((*paths[parent + 1], token))
        laws = [normalised(c**temperature for c in model.p(path)) for path in paths]
        cases = list(matched_cases(laws))
        verdict = matcher(
            torch.tensor([drafts] * len(cases)),
            torch.tensor([parents] * len(cases)),
            torch.tensor([len(parents)] * len(cases)),
            torch.tensor([case.says for case in cases]),
        )
        weights = [case.probability for case in cases]
        law = emitted_law(weights, emitted(verdict), model, 3)
        biased += law != target_law(model, 3)
    return biased


def test_the_shipped_matching_passes_where_mutants_fail() -> None:
    assert biased_by_matching(match_tree) == 0


@pytest.mark.parametrize("edit", MATCH_EDITS, ids=lambda edit: edit.name)
def test_a_mutant_of_matching_fails(edit: Edit) -> None:
    assert biased_by_matching(edit.of(verify, "match_tree")) >= 3


def test_matching_at_the_temperature_of_a_neighbour_fails() -> None:
    assert biased_by_matching(match_tree, temperature=2) >= 3
