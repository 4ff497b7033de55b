"""Temperature above 0: a tree's text follows the target's own law exactly."""

from __future__ import annotations

from typing import Any

import pytest

from tests.law_runs import worst_excess
from tests.laws import LIMIT
from tests.tree_engine import counted_commits, tree_settings

pytestmark = pytest.mark.engine

SAMPLES = 700  # of each law


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


CASES = [
    ("h2", (4, 3, 12)),
    slow("h4", (4, 3, 12)),
    slow("h4", (8, 1, 8)),
    slow("h2", (2, 3, 4)),
    slow("h2", (8, 4, 64)),
]


@pytest.mark.parametrize(("head", "shape"), CASES)
def test_mixed_batch_follows_every_request_s_own_law(
    engine: Any, head: str, shape: tuple[int, int, int]
) -> None:
    handle = engine("f2", head, max_num_seqs=64, **tree_settings(*shape))
    with counted_commits(handle) as commits:
        worst, drafted = worst_excess(handle, SAMPLES)
    assert drafted > 0
    assert commits.branches > SAMPLES
    assert worst < LIMIT
