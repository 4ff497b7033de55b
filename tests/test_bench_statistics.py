import numpy as np
import pytest

from vllm_eagle3.bench.statistics import (
    MAX_RELATIVE_WIDTH,
    MIN_BATCHES,
    MIN_REPEATS,
    Cells,
    crossover,
    speed_up,
)


def cells(repeats: int, batches: int, ratio: float, noise: float, seed: int):
    """(faster, plain): drift that both share, and noise that each has alone."""
    generator = np.random.default_rng(seed)
    drift = generator.uniform(0.5, 2.0, (repeats, batches))
    tokens = np.full((repeats, batches), 96.0)

    def timed(speed: float) -> Cells:
        alone = generator.lognormal(0, noise, (repeats, batches))
        return Cells(drift * alone / speed, tokens)

    return timed(ratio), timed(1.0)


def test_drift_that_both_share_falls_out() -> None:
    found = speed_up(*cells(MIN_REPEATS, 3, ratio=1.5, noise=0.0, seed=0))
    assert (found.value, found.low, found.high) == pytest.approx((1.5, 1.5, 1.5))
    assert found.repeats_needed is None


@pytest.mark.parametrize(("repeats", "batches"), [(5, 1), (8, 4), (1, 12)])
def test_interval_holds_the_truth_nearly_always(repeats: int, batches: int) -> None:
    runs = [speed_up(*cells(repeats, batches, 1.5, 0.05, seed)) for seed in range(60)]
    held = sum(run.low <= 1.5 <= run.high for run in runs)
    assert held >= 54


def test_one_repeat_of_many_alike_prompts_will_do() -> None:
    found = speed_up(*cells(1, 16, ratio=1.5, noise=0.02, seed=1))
    assert found.low < found.value < found.high
    assert found.high - found.low < 0.1


def test_one_noisy_repeat_is_refused() -> None:
    found = speed_up(*cells(1, 16, ratio=1.5, noise=0.5, seed=1))
    assert found.value is None and found.low is None and found.high is None
    assert found.repeats_needed > MIN_REPEATS


def test_one_repeat_of_few_batches_is_refused() -> None:
    found = speed_up(*cells(1, MIN_BATCHES - 1, ratio=1.5, noise=0.0, seed=1))
    assert (found.value, found.repeats_needed) == (None, MIN_REPEATS)


def test_enough_repeats_are_never_refused() -> None:
    found = speed_up(*cells(MIN_REPEATS, 1, ratio=1.5, noise=0.8, seed=3))
    assert found.value is not None
    assert found.high - found.low > MAX_RELATIVE_WIDTH


def test_slow_batches_weigh_by_their_time() -> None:
    tokens = np.full((MIN_REPEATS, 2), 10.0)
    plain = Cells(np.tile([9.0, 1.0], (MIN_REPEATS, 1)), tokens)
    mine = Cells(np.tile([4.0, 1.0], (MIN_REPEATS, 1)), tokens)
    assert speed_up(mine, plain).value == pytest.approx(2.0)


def test_tokens_count_where_replies_differ_in_length() -> None:
    seconds = np.ones((MIN_REPEATS, 1))
    twice = Cells(seconds, 20 * seconds)
    assert speed_up(twice, Cells(seconds, 10 * seconds)).value == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("batches", "speed_ups", "expected"),
    [
        ([1, 4], [1.5, 0.5], 2.0),  # half way, on a log scale
        ([4, 1], [0.5, 1.5], 2.0),
        ([1, 2, 4], [1.2, 1.0, 0.9], 2.0),
        ([1, 2, 4, 8], [1.2, 0.9, 1.1, 0.9], 32**0.5),  # the last fall counts
        ([1, 4], [1.5, 1.1], None),
        ([1, 4], [0.9, 0.8], None),
    ],
)
def test_crossover(batches, speed_ups, expected) -> None:
    assert crossover(batches, speed_ups) == pytest.approx(expected)
