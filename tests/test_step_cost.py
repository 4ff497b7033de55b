"""The cost model learns what steps take, and is not led astray."""

from __future__ import annotations

import numpy as np
import pytest

from vllm_eagle3.step_cost import StepCost, StepWork


def seconds_of(work: StepWork, speed: float = 1.0) -> float:
    """A machine of the test: nearly flat up to 16 rows, then a ms for two rows."""
    target = 20 + 0.1 * work.rows + 0.5 * max(work.rows - 16, 0)
    head = 1.5 * work.head_passes + 1.2 * work.levels + 0.1 * work.head_rows
    return speed * (target + head + work.context / 1000) / 1000


def mixed_steps(count: int, seed: int = 0) -> list[StepWork]:
    rng = np.random.default_rng(seed)
    steps = []
    for _ in range(count):
        reqs, nodes = int(rng.choice([1, 2, 4, 8, 16])), int(rng.integers(0, 5))
        levels = max(nodes - 1, 0)
        head_rows = reqs * (nodes + levels) if nodes else 0
        rows, context = reqs * (1 + nodes), reqs * int(rng.integers(100, 500))
        steps.append(StepWork(rows, context, int(nodes > 0), levels, head_rows))
    return steps


def learnt(count: int = 400, noise: float = 0.05) -> StepCost:
    rng, cost = np.random.default_rng(1), StepCost()
    for work in mixed_steps(count):
        cost.observe(work, seconds_of(work) * (1 + noise * rng.normal()))
    return cost


def predicted(cost: StepCost, work: StepWork) -> float:
    return float(
        cost.seconds(
            work.rows,
            context=work.context,
            head_passes=work.head_passes,
            levels=work.levels,
            head_rows=work.head_rows,
        )
    )


def test_other_steps_of_the_same_machine_are_predicted() -> None:
    cost = learnt()
    errors = [
        predicted(cost, work) / seconds_of(work) - 1
        for work in mixed_steps(100, seed=9)
    ]
    assert np.abs(errors).max() < 0.1


def test_three_steps_are_enough_to_say_something() -> None:
    cost, work = StepCost(), StepWork(4, 200)
    assert not cost.is_known
    for _ in range(3):
        cost.observe(work, seconds_of(work))
    assert cost.is_known
    assert predicted(cost, work) == pytest.approx(seconds_of(work), rel=0.1)


def test_a_batch_never_seen_borrows_from_its_neighbours() -> None:
    cost = StepCost()
    for _ in range(50):
        for rows in (1, 2, 4, 16, 64, 128):
            cost.observe(StepWork(rows), seconds_of(StepWork(rows)))
    for rows in (8, 32):
        assert predicted(cost, StepWork(rows)) == pytest.approx(
            seconds_of(StepWork(rows)), rel=0.3
        )


def test_many_rows_never_cost_less_than_fewer() -> None:
    cost = learnt(noise=0.3)
    assert (np.diff(cost.seconds(np.arange(8, 4096))) >= 0).all()


def test_two_rows_that_cost_more_than_four_are_seen_to() -> None:
    seconds = {1: 13.7e-3, 2: 15.5e-3, 3: 12.9e-3, 4: 12.6e-3, 6: 15.4e-3}
    rng, cost = np.random.default_rng(2), StepCost()
    for rows in rng.choice(list(seconds), 300):
        cost.observe(StepWork(rows), seconds[rows] * (1 + 0.05 * rng.normal()))
    learnt_seconds = cost.seconds(np.array(list(seconds)))
    assert learnt_seconds == pytest.approx(list(seconds.values()), rel=0.07)


def test_compilation_at_the_start_and_pauses_count_for_little() -> None:
    calm, cost = StepCost(), StepCost()
    for number, work in enumerate(mixed_steps(200)):
        pause = 40.0 if number in (0, 50, 51, 120) else 1.0
        cost.observe(work, seconds_of(work) * pause)
        calm.observe(work, seconds_of(work))
    plain = StepWork(1, 200)
    assert predicted(cost, plain) == pytest.approx(predicted(calm, plain), rel=0.05)


def test_a_machine_that_gets_slower_is_slower_for_steps_not_seen_since() -> None:
    cost = learnt()
    plain, drafting = StepWork(4, 800), StepWork(16, 800, 1, 2, 24)
    before = predicted(cost, plain)
    for _ in range(100):
        cost.observe(drafting, seconds_of(drafting, speed=1.5))
    assert predicted(cost, drafting) == pytest.approx(
        1.5 * seconds_of(drafting), rel=0.05
    )
    assert predicted(cost, plain) > 1.3 * before


def test_another_world_is_learnt_anew() -> None:
    cost = learnt()
    for work in mixed_steps(60, seed=5):
        cost.observe(work, seconds_of(work, speed=20))
    plain = StepWork(4, 800)
    assert predicted(cost, plain) == pytest.approx(seconds_of(plain, speed=20), rel=0.3)


def test_branches_of_trees_are_not_taken_for_dear_rows() -> None:
    """Else chains look dear after trees, and are never tried."""
    cost, rng = StepCost(), np.random.default_rng(0)
    for step in range(200):
        work = StepWork(4, 300, 1, 2, 6)
        if step % 20:
            rows = int(rng.integers(3, 9))
            branches = int(rng.integers(1, rows - 1))
            work = StepWork(rows, 300, 1, 0, rows, branches)
        seconds = 0.018 + 0.0002 * work.rows + 0.001 * (work.levels + work.branches)
        cost.observe(work, seconds * (1 + 0.02 * rng.normal()))
    chain = cost.seconds(5, context=300, head_passes=1, levels=0, head_rows=5)
    tree = cost.seconds(5, context=300, head_passes=1, head_rows=5, branches=3)
    assert float(tree) == pytest.approx(0.022, rel=0.03)
    assert 0.001 < float(tree - chain) < 0.004


def test_prompts_beside_requests_say_what_requests_cost() -> None:
    """A busy engine prefills something in every step."""
    cost, rng = StepCost(), np.random.default_rng(0)
    for _ in range(150):
        rows, prompt = int(rng.choice([32, 64, 96])), int(rng.integers(20, 300))
        # A prompt's rows have no output layer: a fifth less.
        seconds = (30 + 2 * rows + 1.6 * prompt) / 1000 * (1 + 0.05 * rng.normal())
        cost.observe(StepWork(rows + prompt, prompt_rows=prompt), seconds)
    for rows in (32, 64, 96):
        expected = pytest.approx((30 + 2 * rows) / 1000, rel=0.15)
        assert predicted(cost, StepWork(rows)) == expected


def test_long_prompts_do_not_make_it_forget() -> None:
    cost, plain = StepCost(), StepWork(2)
    for _ in range(30):
        cost.observe(plain, 0.02)
    for _ in range(40):
        cost.observe(StepWork(400, prompt_rows=398), 2.0)
    assert predicted(cost, plain) == pytest.approx(0.02, rel=0.1)
