"""The reliability of confidences: by hand, and on heads that are known to be right."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.models import random_llama
from vllm_eagle3.decode import Step, decode
from vllm_eagle3.drafter import TreeShape
from vllm_eagle3.head_io import read_head
from vllm_eagle3.plain import PlainHead, PlainTarget
from vllm_eagle3.reliability import (
    Bin,
    Judged,
    bins,
    expected_calibration_error,
    judged_nodes,
)
from vllm_eagle3.tree import DraftTree
from vllm_eagle3.verify import Verdict

SHAPE = TreeShape(num_nodes=8, top_k=2, depth=3)


def step(accepted: list[int]) -> Step:
    """root - 0 (0.8) - 2 (0.5), and root - 1 (0.1) - 3 (0.9)."""
    scores = torch.tensor([[0.8, 0.1, 0.8 * 0.5, 0.1 * 0.9]]).log()
    tree = DraftTree(
        torch.tensor([[5, 6, 7, 8]]), torch.tensor([[-1, -1, 0, 1]]), scores
    )
    tokens = torch.tensor([[*(5 + node for node in accepted), 9]])
    nodes = torch.tensor([accepted], dtype=torch.int64).reshape(1, -1)
    return Step(tree, Verdict(tokens, nodes))


@pytest.mark.parametrize(
    ("accepted", "predicted", "hit"),
    [
        ([], [0.8, 0.1], [False, False]),
        ([0], [0.8, 0.1, 0.5], [True, False, False]),
        ([1, 3], [0.8, 0.1, 0.9], [False, True, True]),
    ],
)
def test_nodes_are_judged_where_their_parent_was_accepted(
    accepted: list[int], predicted: list[float], hit: list[bool]
) -> None:
    judged = judged_nodes([step(accepted)])
    assert judged.predicted.tolist() == pytest.approx(predicted)
    assert judged.accepted.tolist() == hit


def test_bins_and_their_error() -> None:
    judged = Judged(
        torch.tensor([0.92, 0.98, 0.11, 1.0]), torch.tensor([True, False, False, True])
    )
    low, high = bins(judged)
    assert low == Bin(1, pytest.approx(0.11), 0.0)
    assert high == Bin(3, pytest.approx(2.9 / 3), pytest.approx(2 / 3))
    # (1 * 0.11 + 3 * |2/3 - 2.9/3|) / 4
    assert expected_calibration_error([low, high]) == pytest.approx(0.2525)


def test_right_confidences_have_no_error() -> None:
    generator = torch.Generator().manual_seed(0)
    predicted = torch.rand(100_000, generator=generator)
    accepted = torch.rand(100_000, generator=generator) < predicted
    assert expected_calibration_error(bins(Judged(predicted, accepted))) < 0.01


def test_no_nodes_have_no_error_to_tell() -> None:
    with pytest.raises(ValueError, match="bins: got none"):
        expected_calibration_error(bins(judged_nodes([])))


def test_a_head_that_knows_the_text_is_confident_and_right(
    models: Callable[[str], Path],
) -> None:
    loaded = read_head(models("h1"), models("f1"))
    target = PlainTarget.load(models("f1"), loaded.config.tap_ids, torch.float32)
    head = PlainHead(loaded.head.float(), loaded.vocab, target)
    _, steps = decode(target, head, random_llama.known_prompts()[1], 30, SHAPE)
    judged = judged_nodes(steps)
    likely, unlikely = judged.predicted > 0.5, judged.predicted < 0.1
    assert int(likely.sum()) > 5 and int(unlikely.sum()) > 5
    assert judged.accepted[likely].float().mean() > 0.9
    assert judged.accepted[unlikely].float().mean() < 0.1
