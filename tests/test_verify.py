"""match_tree: the drawn example, padding, and a plain walk over random trees."""

from __future__ import annotations

import random

import pytest
import torch

from vllm_eagle3.verify import match_tree

THE, A, CAT, DOG, BANG = 20, 21, 22, 23, 24


def test_drawn_example() -> None:
    verdict = match_tree(
        token_ids=torch.tensor([[THE, A, CAT, DOG]]),
        parents=torch.tensor([[-1, -1, 0, 0]]),
        num_nodes=torch.tensor([4]),
        target_tokens=torch.tensor([[THE, DOG, 0, 0, BANG]]),
    )
    assert verdict.nodes.tolist() == [[0, 3]]
    assert verdict.token_ids.tolist() == [[THE, DOG, BANG]]
    assert verdict.num_accepted.tolist() == [2]


def test_nothing_accepted_still_emits_the_target_token() -> None:
    verdict = match_tree(
        torch.tensor([[1, 2]]),
        torch.tensor([[-1, 0]]),
        torch.tensor([2]),
        torch.tensor([[9, 2, 2]]),
    )
    assert verdict.token_ids.tolist() == [[9]]
    assert verdict.num_accepted.tolist() == [0]


def test_padding_nodes_are_never_accepted() -> None:
    verdict = match_tree(
        torch.tensor([[7, 7]]),
        torch.tensor([[-1, 0]]),
        torch.tensor([1]),
        torch.tensor([[7, 7, 7]]),
    )
    assert verdict.token_ids.tolist() == [[7, 7]]
    assert verdict.nodes.tolist() == [[0]]


def walk(tokens: list[int], parents: list[int], says: list[int]) -> list[int]:
    """The same by hand, one request."""
    emitted, here = [], -1
    while True:
        emitted.append(says[here + 1])
        children = [
            i
            for i, (token, parent) in enumerate(zip(tokens, parents, strict=True))
            if parent == here and token == emitted[-1]
        ]
        if not children:
            return emitted
        (here,) = children


@pytest.mark.parametrize("seed", range(20))
def test_equals_a_plain_walk_for_every_request_of_a_batch(seed: int) -> None:
    rng = random.Random(seed)
    width, batch = 9, 5
    rows = [random_tree(rng, rng.randint(1, width)) for _ in range(batch)]
    pad = [[*t, *[0] * (width - len(t))] for t, _ in rows]
    pad_parents = [[*p, *[-1] * (width - len(p))] for _, p in rows]
    says = [[rng.randint(0, 3) for _ in range(width + 1)] for _ in range(batch)]
    verdict = match_tree(
        torch.tensor(pad),
        torch.tensor(pad_parents),
        torch.tensor([len(t) for t, _ in rows]),
        torch.tensor(says),
    )
    for req, (tokens, parents) in enumerate(rows):
        found = [t for t in verdict.token_ids[req].tolist() if t >= 0]
        assert found == walk(tokens, parents, says[req])


def random_tree(rng: random.Random, size: int) -> tuple[list[int], list[int]]:
    """Random parents; siblings get distinct tokens out of four where they can."""
    tokens: list[int] = []
    parents: list[int] = []
    while len(tokens) < size:
        parent = rng.randint(-1, len(tokens) - 1)
        used = {t for t, p in zip(tokens, parents, strict=True) if p == parent}
        free = [t for t in range(size + 4) if t not in used]
        tokens.append(free[0] if rng.random() < 0.7 else rng.choice(free))
        parents.append(parent)
    return tokens, parents
