"""The workload: which prompts run together, as batches of exactly one size.

A batch holds prompts of one task while every task can fill one, so that acceptance
can be told by task; larger batches mix the tasks. The last batch is filled up with
prompts from the front: a batch of 64 is 64 requests, also where there are 12 prompts.

In one wave all requests start together, and the batch thins out as they end. In
several waves the next request takes the place of one that ends, as in a server that has
always enough to do; only the last wave thins out. Staggered, the first wave's requests
end one by one, and so do those that follow them: otherwise replies of equal length all
end in one step, but only without drafts, and the next prompts are prefilled together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle, islice, zip_longest
from pathlib import Path
from typing import TypeVar

from vllm_eagle3.prompts import Prompt

MIXED = "mixed"
_T = TypeVar("_T")


@dataclass(frozen=True)
class PromptBatch:
    """Prompts, as indices, of which `at_once` run together.

    All are of one `task`, or it is `MIXED`.
    """

    task: str
    prompts: tuple[int, ...]
    at_once: int


def staggered(max_tokens: int, at_once: int, num_requests: int) -> list[int]:
    """Most new tokens of each request, so that one ends after the other."""
    first = [-(-max_tokens * (place + 1) // at_once) for place in range(at_once)]
    return (first + [max_tokens] * num_requests)[:num_requests]


def task_names(files: Sequence[tuple[str, Sequence[Prompt]]]) -> tuple[str, ...]:
    """The task of each prompt: its file, or its category where there is one file.

    Args:
        files: path and prompts of each prompt file.
    """
    if len(files) > 1:
        return tuple(Path(path).stem for path, prompts in files for _ in prompts)
    ((path, prompts),) = files
    return tuple(prompt.category or Path(path).stem for prompt in prompts)


def make_batches(
    tasks: Sequence[str], at_once: int, waves: int = 1
) -> tuple[PromptBatch, ...]:
    """Cut prompts into batches; batches of different tasks take turns."""
    size = at_once * waves
    members: dict[str, list[int]] = {}
    for index, task in enumerate(tasks):
        members.setdefault(task, []).append(index)
    if len(members) > 1 and size > min(map(len, members.values())):
        members = {MIXED: _in_turn(list(members.values()))}
    return tuple(
        _in_turn(
            [_cut(task, indices, size, at_once) for task, indices in members.items()]
        )
    )


def _cut(task: str, indices: list[int], size: int, at_once: int) -> list[PromptBatch]:
    num_batches = -(-len(indices) // size)
    filled = list(islice(cycle(indices), num_batches * size))
    return [
        PromptBatch(task, tuple(filled[first : first + size]), at_once)
        for first in range(0, len(filled), size)
    ]


def _in_turn(groups: list[list[_T]]) -> list[_T]:
    """The first of every group, the second of every group, and so on."""
    return [item for row in zip_longest(*groups) for item in row if item is not None]
