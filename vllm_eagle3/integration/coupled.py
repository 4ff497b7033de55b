"""Engines of a data-parallel group whose experts they share.

Such engines meet in every pass of the target and of the head, idle ones with a dummy
row. So all must run the same number of passes, while each has its own requests, grows
its own trees and stops when they are settled. How many levels the head runs is agreed
on once a step, and who has fewer makes them up with idle ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from vllm.distributed.parallel_state import get_dp_group


class Levels:
    """Levels of the head in one step.

    Args:
        largest: the largest of what the coupled engines give; every one must call.
        run_idle: one level without requests.
    """

    def __init__(
        self, largest: Callable[[int], int], run_idle: Callable[[], None]
    ) -> None:
        self._largest = largest
        self._run_idle = run_idle
        self._left = 0

    def begin(self, planned: int) -> None:
        """Agree on the levels of this step, at least the `planned` ones."""
        self._left = self._largest(planned)

    def count(self) -> None:
        """A level runs."""
        self._left -= 1

    def finish(self) -> None:
        """Run the levels that others ran, or may have run, beyond ours."""
        for _ in range(self._left):
            self._run_idle()
        self._left = 0


def levels_of(parallel_config: Any, run_idle: Callable[[], None]) -> Levels:
    """Of this engine; one that is coupled to nobody agrees with itself."""
    if parallel_config.data_parallel_size == 1:
        return Levels(lambda planned: 0, run_idle)
    return Levels(_largest_of_group, run_idle)


def _largest_of_group(planned: int) -> int:
    levels = torch.tensor(planned)
    torch.distributed.all_reduce(
        levels, torch.distributed.ReduceOp.MAX, group=get_dp_group().cpu_group
    )
    return int(levels)
