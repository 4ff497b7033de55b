"""Coupled engines run the same number of head levels, whatever each has to do."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("vllm")

from tests.test_tp import Threads
from vllm_eagle3.integration.coupled import Levels

# (planned, really run) of each engine: full, settled early, idle, no drafts.
STEPS = [
    [(5, 5), (5, 2), (0, 0)],
    [(0, 0), (0, 0), (0, 0)],
    [(5, 4), (10, 10), (5, 5)],
    [(0, 0), (3, 1), (0, 0)],
]


def test_everybody_runs_as_many_levels_as_the_busiest_plans() -> None:
    threads = Threads(3)

    def engine(rank: int) -> list[int]:
        idle: list[None] = []
        levels = Levels(
            lambda planned: max(threads.exchange(rank, planned)),
            lambda: idle.append(None),
        )
        passes = []
        for step in STEPS:
            planned, run = step[rank]
            idle.clear()
            levels.begin(planned)
            for _ in range(run):
                levels.count()
            levels.finish()
            passes.append(run + len(idle))
        return passes

    with ThreadPoolExecutor(3) as pool:
        passes = list(pool.map(engine, range(3)))
    assert passes == [[5, 0, 10, 3]] * 3


def test_an_engine_alone_runs_no_idle_level() -> None:
    from types import SimpleNamespace

    from vllm_eagle3.integration.coupled import levels_of

    def refuse() -> None:
        raise AssertionError("an idle level")

    levels = levels_of(SimpleNamespace(data_parallel_size=1), refuse)
    for planned, run in [(5, 2), (0, 0), (5, 5)]:
        levels.begin(planned)
        for _ in range(run):
            levels.count()
        levels.finish()
