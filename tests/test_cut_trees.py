"""Trees that a step has no room for lose their least likely nodes."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")

from vllm_eagle3.integration.scheduler import _Drafted

#   root ─┬─ 0 (0.5) ─── 1 (0.1)
#         └─ 2 (0.4) ─── 3 (0.3)
TREE = _Drafted([10, 11, 12, 13], [-1, 0, -1, 2], [-0.7, -2.3, -0.9, -1.2])


def test_the_likeliest_nodes_stay_and_are_numbered_anew() -> None:
    assert TREE.best(3) == _Drafted([10, 12, 13], [-1, -1, 1], [-0.7, -0.9, -1.2])
    assert TREE.best(1).token_ids == [10]
    assert TREE.best(0).token_ids == []
    assert TREE.best(4) == TREE.best(9) == TREE


def test_nodes_as_likely_as_their_parents_stay_behind_them() -> None:
    sure = _Drafted([10, 11, 12], [-1, 0, 1], [0.0, 0.0, 0.0])
    assert sure.best(2) == sure.first(2)


def test_drafts_without_scores_keep_the_first() -> None:
    assert _Drafted([1, 2, 3], [-1, 0, 1], []).best(2).token_ids == [1, 2]
