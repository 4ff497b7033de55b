import pytest

from vllm_eagle3.bench.identity import (
    NEAR_TIE_NATS,
    Difference,
    first_differences,
    is_near_tie,
    plain_gap,
)
from vllm_eagle3.engine import Generation


def test_equal_runs_have_no_differences() -> None:
    assert first_differences([(1, 2), (3,)], [(1, 2), (3,)]) == []


def test_first_difference_is_found() -> None:
    (difference,) = first_differences([(5,), (1, 2, 3)], [(5,), (1, 9, 9)])
    assert difference == Difference(request=1, position=1, plain=2, other=9)


@pytest.mark.parametrize(
    ("plain", "other", "expected"),
    [
        ((1, 2), (1,), Difference(0, 1, 2, None)),
        ((1,), (1, 2), Difference(0, 1, None, 2)),
    ],
)
def test_a_reply_that_ends_early_differs(
    plain: tuple[int, ...], other: tuple[int, ...], expected: Difference
) -> None:
    assert first_differences([plain], [other]) == [expected]


def test_runs_of_different_length_are_not_compared() -> None:
    with pytest.raises(ValueError):
        first_differences([(1,)], [(1,), (2,)])


def test_gap_is_how_much_likelier_the_plain_token_was() -> None:
    plain = Generation((1, 2), ({1: -0.1, 4: -3.0}, {2: -0.6, 9: -0.7}))
    assert plain_gap(Difference(0, 1, 2, 9), plain) == pytest.approx(0.1)


def test_gap_to_a_token_outside_the_two_best_is_unknown() -> None:
    plain = Generation((1, 2), ({1: -0.1, 4: -3.0}, {2: -0.6, 9: -0.7}))
    assert plain_gap(Difference(0, 1, 2, 8), plain) is None


@pytest.mark.parametrize(
    ("dtype", "gap", "expected"),
    [
        ("bfloat16", NEAR_TIE_NATS, True),
        ("float16", 0.0, True),
        ("bfloat16", NEAR_TIE_NATS + 0.01, False),
        ("bfloat16", None, False),
        ("float32", 0.0, False),
    ],
)
def test_near_ties_are_excused_in_sixteen_bits_only(
    dtype: str, gap: float | None, expected: bool
) -> None:
    assert is_near_tie(Difference(0, 0, 1, 2, gap), dtype) is expected
