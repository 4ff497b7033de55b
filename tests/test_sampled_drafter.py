"""Drawing a tree of a fixed shape: the law and order of draws, shapes, and wiring."""

from __future__ import annotations

import itertools
import sys

import pytest
import torch

from tests.laws import LIMIT, chi_squared_excess
from tests.mutant import Edit
from vllm_eagle3 import sampled_drafter
from vllm_eagle3.drafter import HeadOutput
from vllm_eagle3.sampled_drafter import SampledShape, draw_children, grow_sampled

DRAWN = SampledShape(((2,), (2, 1)))  # the tree drawn in sampled_drafter.py
VOCAB = 7


def test_drawn_shape() -> None:
    assert DRAWN.parents == [-1, -1, 0, 0, 1]
    assert DRAWN.num_nodes == 5
    assert DRAWN.num_parents == 3


@pytest.mark.parametrize(
    "children", [(), ((0,),), ((2,), (1,)), ((1,), (-1,)), ((1, 1),), ((2,), (0, 0))]
)
def test_shapes_that_are_no_tree_are_refused(
    children: tuple[tuple[int, ...], ...],
) -> None:
    with pytest.raises(ValueError, match="sampled shape: got"):
        SampledShape(children)


def test_ordered_draws_follow_the_law_without_replacement() -> None:
    samples = 200_000
    generator = torch.Generator().manual_seed(2)
    q = torch.tensor([0.5, 0.2, 0.15, 0.1, 0.05, 0.0])
    noise = torch.empty(samples, 6).exponential_(generator=generator)
    drawn = draw_children(q.expand(samples, 6), 3, noise)
    law = torch.zeros(6, 6, 6, dtype=torch.float64)
    for a, b, c in itertools.permutations(range(6), 3):
        weights = q.double()
        after = 1 - weights[a], 1 - weights[a] - weights[b]
        law[a, b, c] = weights[a] * weights[b] / after[0] * weights[c] / after[1]
    index = (drawn * torch.tensor([36, 6, 1])).sum(-1)
    assert chi_squared_excess(index, law.flatten()) < LIMIT


@pytest.mark.parametrize("value", [0.0, 100.0])
def test_extreme_noise_draws_no_excluded_token(value: float) -> None:
    q = torch.tensor([[0.0, 0.75, 0.25]])
    drawn = draw_children(q, 2, torch.tensor([[0.0, value, 1.0]]))
    assert sorted(drawn[0].tolist()) == [1, 2]


class PathHead:
    """A head whose logits are a hash of the path, and which checks the parents."""

    def __init__(self, num_reqs: int) -> None:
        self.levels: list[list[list[tuple[int, ...]]]] = []
        self.roots = [[(req,)] for req in range(num_reqs)]

    def root(self) -> HeadOutput:
        return self.say(self.roots)

    def advance(
        self,
        level: int,
        token_ids: torch.Tensor,
        features: torch.Tensor,
        parent_row: torch.Tensor,
    ) -> HeadOutput:
        assert parent_row.shape == token_ids.shape
        above = self.levels[-1] if level > 1 else self.roots
        paths = []
        for req, tokens in enumerate(token_ids.tolist()):
            own = []
            for row, token in enumerate(tokens):
                parent = above[req][int(parent_row[req, row])]
                assert float(features[req, row, 0]) == hash_of(parent)
                own.append((*parent, token))
            paths.append(own)
        self.levels.append(paths)
        return self.say(paths)

    def say(self, paths: list[list[tuple[int, ...]]]) -> HeadOutput:
        features = [[[float(hash_of(path))] for path in own] for own in paths]
        logits = torch.stack(
            [torch.stack([logits_of(x) for x in own]) for own in paths]
        )
        return HeadOutput(torch.tensor(features), logits)


def hash_of(path: tuple[int, ...]) -> int:
    return sum((i + 2) ** 2 * (token + 1) for i, token in enumerate(path)) % 9973


def logits_of(path: tuple[int, ...]) -> torch.Tensor:
    return 2 * torch.randn(
        VOCAB, generator=torch.Generator().manual_seed(hash_of(path))
    )


TEMPERATURE = torch.tensor([0.5, 1.0, 1.5])


@pytest.mark.parametrize(
    "shape",
    [
        DRAWN,
        SampledShape(((1,), (1,), (1,))),
        SampledShape(((3,), (0, 2, 0), (1, 2))),
        SampledShape(((3,), (1, 0, 2), (0, 2, 1), (1, 1, 0))),
    ],
)
@pytest.mark.parametrize("to_target_ids", [None, torch.arange(VOCAB) * 3 + 1])
def test_every_child_is_drawn_from_q_at_its_path_and_temperature(
    shape: SampledShape, to_target_ids: torch.Tensor | None
) -> None:
    noise = torch.empty(3, shape.num_parents, VOCAB)
    noise.exponential_(generator=torch.Generator().manual_seed(9))
    head = PathHead(3)
    sampled = grow_sampled(
        head.root(), head.advance, to_target_ids, shape, TEMPERATURE, noise
    )
    assert sampled.tree.parents.tolist() == [shape.parents] * 3
    drawing = sorted(set(shape.parents))
    for req in range(3):
        tokens = sampled.tree.token_ids[req].tolist()
        paths = [(req,)]
        for token, parent in zip(tokens, shape.parents, strict=True):
            paths.append((*paths[parent + 1], token))
        for row, parent in enumerate(drawing):
            q = (logits_of(paths[parent + 1]) / TEMPERATURE[req]).softmax(-1)
            torch.testing.assert_close(sampled.q[req, parent + 1], q)
            children = [i for i, own in enumerate(shape.parents) if own == parent]
            drawn = draw_children(q, len(children), noise[req, row])
            if to_target_ids is not None:
                drawn = to_target_ids[drawn]
            assert [tokens[i] for i in children] == drawn.tolist()
        leaves = set(range(sampled.q.shape[1])) - {parent + 1 for parent in drawing}
        assert not bool(sampled.q[req, sorted(leaves)].any())


def test_a_shape_wider_than_the_draft_vocabulary_is_refused() -> None:
    head, shape = PathHead(1), SampledShape(((VOCAB + 1,),))
    with pytest.raises(ValueError, match="want at most 7, the draft vocabulary"):
        grow_sampled(
            head.root(), head.advance, None, shape, torch.ones(1), torch.ones(1, 1, 7)
        )


def test_temperature_zero_is_refused() -> None:
    head, shape = PathHead(2), SampledShape(((1,),))
    with pytest.raises(ValueError, match="requests at 0 take greedy drafts"):
        grow_sampled(
            head.root(),
            head.advance,
            None,
            shape,
            torch.tensor([1.0, 0.0]),
            torch.ones(2, 1, VOCAB),
        )


@pytest.mark.parametrize(
    "edit",
    [
        Edit(
            "temperature of a neighbour",
            "/ temperature[:, None, None]",
            "/ temperature.roll(1)[:, None, None]",
        ),
        Edit(
            "features of the wrong row",
            "features[:, parent_row]",
            "features[:, 0 * parent_row]",
        ),
        Edit(
            "wrong ancestor",
            "parent_row.expand(",
            "(0 * parent_row).expand(",
        ),
        Edit(
            "all siblings get the first draw",
            "[:, row, turn]",
            "[:, row, [0] * len(turn)]",
        ),
    ],
    ids=lambda edit: edit.name,
)
def test_a_mutant_of_growing_fails(edit: Edit, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant = edit.of(sampled_drafter, "grow_sampled")
    monkeypatch.setattr(sys.modules[__name__], "grow_sampled", mutant)
    shape = SampledShape(((2,), (1, 1), (2, 1), (1, 1, 1)))
    with pytest.raises(AssertionError):
        test_every_child_is_drawn_from_q_at_its_path_and_temperature(shape, None)
