"""Engines with draft trees: their settings, and what was seen of their steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.engine_run import EngineHandle, Run


def tree_settings(top_k: int, depth: int, num_nodes: int) -> dict[str, Any]:
    """Settings of an engine of the pool that drafts trees of this shape."""
    options = {"shape": "tree", "top_k": top_k, "depth": depth}
    return {
        "num_speculative_tokens": num_nodes,
        "additional_config": {"vllm_eagle3": options},
    }


def runner_of(handle: EngineHandle) -> Any:
    """The model runner inside an engine of this process."""
    core = handle.llm.llm_engine.engine_core.engine_core
    return core.model_executor.driver_worker.worker.model_runner


@dataclass
class Commits:
    """What the target's attention was told to keep.

    Attributes:
        trees: trees with branches that were judged.
        branches: those whose accepted path left the first path, so KV was moved.
        most_rows: rows of the largest step with a tree.
    """

    trees: int = 0
    branches: int = 0
    most_rows: int = 0


@contextmanager
def counted_commits(handle: EngineHandle) -> Iterator[Commits]:
    """Count what `RunAttention.commit` does meanwhile."""
    attention = runner_of(handle).tree_attention
    commits, commit = Commits(), attention.commit

    def counting(last_rows: dict[int, int]) -> None:
        batch = attention.batch
        rows = np.array(list(last_rows.values()))
        runs = np.searchsorted(batch.run_starts, rows, side="right") - 1
        first = batch.starts[list(last_rows)]
        commits.trees += len(rows)
        commits.branches += int((batch.run_starts[runs] != first).sum())
        commits.most_rows = max(commits.most_rows, int(batch.starts[-1]))
        commit(last_rows)

    attention.commit = counting
    try:
        yield commits
    finally:
        attention.commit = commit


@contextmanager
def counted_draws(handle: EngineHandle) -> Iterator[list[str]]:
    """The requests, step by step, that are judged by the law of sampled drafts."""
    runner, judged = runner_of(handle), []
    take = runner._take_drawn

    def recording(drafts: Any) -> Any:
        drawn = take(drafts)
        if drawn is not None:
            assert bool(drawn.came_back.all())
            judged.extend(runner.input_batch.req_ids[r] for r in drawn.requests)
        return drawn

    runner._take_drawn = recording
    try:
        yield judged
    finally:
        runner._take_drawn = take


@dataclass
class JudgedStep:
    """One request in one step: its drafts, their parents, and what was emitted.

    `num_before` is the number of tokens that it had emitted before.
    """

    req_id: str
    num_before: int
    token_ids: list[int]
    parents: list[int]
    emitted: list[int]

    def paths(self) -> set[tuple[int, ...]]:
        """Tokens from the root to each node, whatever the order of the nodes."""
        paths: list[tuple[int, ...]] = []
        for token, parent in zip(self.token_ids, self.parents, strict=True):
            above = paths[parent] if parent >= 0 else ()
            paths.append((*above, token))
        return set(paths)


@contextmanager
def judged_steps(handle: EngineHandle) -> Iterator[list[JudgedStep]]:
    """Record every request with drafts of every step meanwhile, in order."""
    runner, steps = runner_of(handle), []
    sample = runner._sample

    def recording(logits: Any, metadata: Any) -> Any:
        output = sample(logits, metadata)
        if metadata is not None:
            steps.extend(_judged(runner, metadata, output.sampled_token_ids.tolist()))
        return output

    runner._sample = recording
    try:
        yield steps
    finally:
        runner._sample = sample


def _judged(
    runner: Any, metadata: Any, emitted: Sequence[Sequence[int]]
) -> Iterator[JudgedStep]:
    drafts, first = metadata.draft_token_ids.tolist(), 0
    for row, length in enumerate(metadata.num_draft_tokens):
        if length:
            parents = runner.trees.get(row, np.arange(-1, length - 1))
            req_id = runner.input_batch.req_ids[row]
            yield JudgedStep(
                req_id,
                len(runner.requests[req_id].output_token_ids),
                drafts[first : first + length],
                parents.tolist(),
                [token for token in emitted[row] if token >= 0],
            )
        first += length


def counter(handle: EngineHandle, name: str) -> int:
    """Value of one of the engine's own counters, such as `vllm:num_preemptions`."""
    return sum(
        int(getattr(metric, "value", 0))
        for metric in handle.llm.get_metrics()
        if metric.name == name
    )


def run_counted(
    handle: EngineHandle, prompts: Sequence[Sequence[int]], params: Any
) -> tuple[Run, Commits]:
    """One batch, with what was committed meanwhile."""
    with counted_commits(handle) as commits:
        return handle.run(prompts, params), commits
