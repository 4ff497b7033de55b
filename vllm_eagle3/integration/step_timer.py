"""Seconds of the parts of a step, on the device that works."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class StepTimer:
    """Sums up how long each part took since `take` was last called.

    On a GPU the parts are marked in its queue and read when the step's results are
    here, so that nobody waits for a clock.
    """

    def __init__(self, device: torch.device) -> None:
        self.is_on = True
        self._marks_events = device.type == "cuda"
        self._seconds: dict[str, float] = defaultdict(float)
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Time what happens inside."""
        if not self.is_on:
            yield
        elif self._marks_events:
            began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            began.record()
            yield
            ended.record()
            self._events.append((name, began, ended))
        else:
            start = time.perf_counter()
            yield
            self._seconds[name] += time.perf_counter() - start

    def take(self) -> dict[str, float]:
        """Seconds of each part; they count from zero again."""
        for name, began, ended in self._events:
            ended.synchronize()
            self._seconds[name] += began.elapsed_time(ended) / 1000
        taken, self._seconds, self._events = dict(self._seconds), defaultdict(float), []
        return taken
