from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vllm_eagle3.vocab import DraftVocab


@st.composite
def chosen_ids(draw: st.DrawFn) -> tuple[list[int], int]:
    """Distinct sorted target ids and the size of the target's vocabulary."""
    size = draw(st.integers(1, 60))
    ids = draw(st.sets(st.integers(0, size - 1), min_size=1))
    return sorted(ids), size


@given(chosen_ids())
def test_disk_round_trip(case: tuple[list[int], int]) -> None:
    ids, size = case
    vocab = DraftVocab(torch.tensor(ids), size)
    again = DraftVocab.from_d2t(vocab.d2t, size)
    assert again.to_target_ids.tolist() == ids
    assert torch.equal(again.t2d, vocab.t2d)
    assert vocab.t2d.nonzero().flatten().tolist() == ids


@given(chosen_ids())
def test_maps_are_inverse_and_minus_one_elsewhere(case: tuple[list[int], int]) -> None:
    ids, size = case
    vocab = DraftVocab(torch.tensor(ids), size)
    for target_id in range(size):
        draft_id = int(vocab.to_draft_ids[target_id])
        if target_id in ids:
            assert int(vocab.to_target_ids[draft_id]) == target_id
        else:
            assert draft_id == -1


@given(chosen_ids())
def test_offsets_never_fall(case: tuple[list[int], int]) -> None:
    ids, size = case
    d2t = DraftVocab(torch.tensor(ids), size).d2t
    assert bool((d2t >= 0).all()) and bool((d2t[1:] >= d2t[:-1]).all())


@given(st.lists(st.integers(0, 5), min_size=1, max_size=30), st.data())
def test_most_frequent_leaves_out_none_that_is_commoner(
    counts: list[int], data: st.DataObject
) -> None:
    size = data.draw(st.integers(1, len(counts)))
    vocab = DraftVocab.most_frequent(counts, size)
    chosen = set(vocab.to_target_ids.tolist())
    assert len(chosen) == size
    left_out = set(range(len(counts))) - chosen
    assert all((counts[a], -a) > (counts[b], -b) for a in chosen for b in left_out), (
        "commoner first, the lower id at a tie"
    )


def test_drawn_example() -> None:
    vocab = DraftVocab(torch.tensor([1, 3, 4]), 6)
    assert vocab.d2t.tolist() == [1, 2, 2]
    assert vocab.t2d.tolist() == [False, True, False, True, True, False]
    assert not vocab.is_full


def test_full_is_the_identity() -> None:
    vocab = DraftVocab.full(5)
    assert vocab.is_full and not vocab.d2t.any() and bool(vocab.t2d.all())


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([], "non-empty"),
        ([[0, 1]], "one-dimensional"),
        ([0, 9], "leave the target's range 0..5"),
        ([-1, 2], "leave the target's range"),
        ([2, 1], "rise strictly"),
        ([1, 1], "rise strictly"),
    ],
)
def test_refuses(ids: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DraftVocab(torch.tensor(ids), 6)


def test_refuses_ids_in_place_of_offsets() -> None:
    with pytest.raises(ValueError, match="does not hold offsets"):
        DraftVocab.from_d2t(torch.tensor([1, 3, 4]), 6)


@pytest.mark.parametrize("size", [0, 4])
def test_most_frequent_refuses_size(size: int) -> None:
    with pytest.raises(ValueError, match="draft_vocab_size"):
        DraftVocab.most_frequent([1, 2, 3], size)
