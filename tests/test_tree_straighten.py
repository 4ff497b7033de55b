"""After a tree's step, accepted rows lie behind their root as if from a chain."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from vllm_eagle3.tree_runs import batch_trees
from vllm_eagle3.verify import Verdict

pytest.importorskip("vllm")

from vllm_eagle3.integration.model_runner import Eagle3Runner

# Two rows of a prompt, then two trees whose first node is a leaf: the accepted paths
# are longer than the first run, so no row happens to lie where it belongs.
#   root ─┬─ 0
#         └─ 1 ─── 2 ─── 3
STARTS, CONTEXTS = np.array([0, 2, 7, 12]), np.array([3, 40, 63])
TREE = np.array([-1, -1, 1, 2])
NODES = torch.tensor([[-1, -1, -1], [1, 2, 3], [1, 2, -1]])


@pytest.fixture
def runner() -> Any:
    batch = batch_trees(STARTS, CONTEXTS, {1: TREE, 2: TREE})
    positions = np.repeat(CONTEXTS, np.diff(STARTS)) + batch.depths
    return SimpleNamespace(
        tree_attention=SimpleNamespace(batch=batch),
        _verdict=Verdict(torch.empty(0), NODES),
        positions=torch.from_numpy(positions),
        input_ids=SimpleNamespace(gpu=torch.arange(100, 112)),
    )


def test_accepted_rows_move_with_their_features_ids_and_positions(runner: Any) -> None:
    assert runner.positions.tolist() == [3, 4, 40, 41, 41, 42, 43, 63, 64, 64, 65, 66]
    hidden = torch.arange(12.0)[:, None]
    (straight,) = Eagle3Runner._straighten(runner, [hidden])
    # Rows of the root, the accepted path; what comes behind is refused anyway.
    assert straight[:2, 0].tolist() == [0, 1]
    assert straight[2:6, 0].tolist() == [2, 4, 5, 6]
    assert straight[7:10, 0].tolist() == [7, 9, 10]
    assert runner.input_ids.gpu[2:6].tolist() == [102, 104, 105, 106]
    assert runner.input_ids.gpu[7:10].tolist() == [107, 109, 110]
    assert runner.positions.tolist() == [3, 4, 40, 41, 42, 43, 44, *range(63, 68)]
    assert hidden[3, 0] == 3  # the target's own tensor is left alone
