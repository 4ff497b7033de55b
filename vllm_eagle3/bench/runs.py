"""Running a plan: one process per method, all loaded, interleaved batch by batch.

    for repeat, for batch of prompts, for method:  generate, alone on the machine

so that drift of the machine (heat, neighbours, clock) hits all methods alike. The
order of the methods rotates, so that none always follows the same one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Protocol

from vllm_eagle3.acceptance import DraftCounts
from vllm_eagle3.bench.identity import (
    Difference,
    first_differences,
    plain_gap,
)
from vllm_eagle3.bench.launch import worker_environ
from vllm_eagle3.bench.methods import Method
from vllm_eagle3.bench.plan import BenchPlan
from vllm_eagle3.bench.process import Timed, WorkerProcess
from vllm_eagle3.engine import Generation, Sampling

WARM_UP_TOKENS = 16

Workers = Mapping[str, WorkerProcess]  # method name -> its process
Batch = tuple[tuple[int, ...], ...]  # token ids of prompts that run together


class Watcher(Protocol):
    """Who wants to see how a benchmark goes."""

    def started(self, method: Method, seconds: float) -> None: ...

    def measured(self, method: Method, timed: Timed) -> None: ...

    def checking(self, num_prompts: int) -> None: ...


@dataclass
class Repeat:
    """All prompts once through one method."""

    seconds: float = 0.0
    new_tokens: int = 0
    counts: DraftCounts = field(default_factory=DraftCounts)
    token_ids: list[tuple[int, ...]] = field(default_factory=list)

    @property
    def tokens_per_s(self) -> float:
        return self.new_tokens / self.seconds

    def add(self, timed: Timed) -> None:
        self.seconds += timed.seconds
        self.new_tokens += timed.new_tokens
        self.counts += timed.counts
        self.token_ids += [g.token_ids for g in timed.generations]


@dataclass
class MethodRun:
    """One method at one batch size; `differences` None where there is no plain run."""

    method: Method
    batch_size: int
    repeats: list[Repeat]
    differences: list[Difference] | None = None


def run_bench(plan: BenchPlan, engine: str, watcher: Watcher) -> list[MethodRun]:
    """Start the engines, measure all batch sizes, compare the texts.

    Args:
        engine: `module:class`, see `bench.worker`.

    Raises:
        WorkerError: an engine failed; its log is in the output folder.
    """
    with ExitStack() as stack:
        workers = {
            method.name: stack.enter_context(_spawn(plan, method, engine))
            for method in plan.methods
        }
        # All at once: start-up is mostly one thread of imports and reading.
        for method in plan.methods:
            workers[method.name].request_start(plan.engine_spec(method))
        for method in plan.methods:
            watcher.started(method, workers[method.name].wait_started())
        runs = []
        for batch_size in plan.batch_sizes:
            runs += _run_batch_size(plan, workers, batch_size, watcher)
        return runs


def _spawn(plan: BenchPlan, method: Method, engine: str) -> WorkerProcess:
    return WorkerProcess(
        method.name,
        engine,
        worker_environ(method, plan.options.mode),
        plan.options.out / f"{method.name.replace(':', '-')}.log",
    )


def _run_batch_size(
    plan: BenchPlan, workers: Workers, batch_size: int, watcher: Watcher
) -> list[MethodRun]:
    options = plan.options
    sampling = Sampling(options.temperature, options.max_tokens)
    batches = _batches(plan.prompt_ids, batch_size)
    warm_up = replace(sampling, max_tokens=min(WARM_UP_TOKENS, options.max_tokens))
    for worker in workers.values():
        worker.generate(batches[0], warm_up)
    runs = {
        method.name: MethodRun(method, batch_size, [Repeat() for _ in _times(plan)])
        for method in plan.methods
    }
    for repeat in _times(plan):
        for index, batch in enumerate(batches):
            for method in _rotated(plan.methods, index):
                timed = workers[method.name].generate(batch, sampling)
                runs[method.name].repeats[repeat].add(timed)
                watcher.measured(method, timed)
    if options.temperature == 0 and "off" in runs:
        _compare(runs, workers["off"], batches, sampling, watcher)
    return list(runs.values())


def _times(plan: BenchPlan) -> range:
    return range(plan.options.repeats)


def _batches(prompts: Sequence[tuple[int, ...]], size: int) -> list[Batch]:
    return [tuple(prompts[i : i + size]) for i in range(0, len(prompts), size)]


def _rotated(methods: tuple[Method, ...], by: int) -> tuple[Method, ...]:
    by %= len(methods)
    return methods[by:] + methods[:by]


def _compare(
    runs: Mapping[str, MethodRun],
    off: WorkerProcess,
    batches: Sequence[Batch],
    sampling: Sampling,
    watcher: Watcher,
) -> None:
    """Fill in `differences`; repeats the plain run untimed for those that differ."""
    plain = runs["off"].repeats[0].token_ids
    found = {
        name: first_differences(plain, run.repeats[0].token_ids)
        for name, run in runs.items()
        if name != "off"
    }
    differing = {d.prompt for differences in found.values() for d in differences}
    watcher.checking(len(differing))
    again = _plain_again(differing, off, batches, sampling)
    for name, differences in found.items():
        runs[name].differences = [
            replace(d, gap=_gap(d, again[d.prompt], plain[d.prompt]))
            for d in differences
        ]


def _plain_again(
    prompts: set[int],
    off: WorkerProcess,
    batches: Sequence[Batch],
    sampling: Sampling,
) -> dict[int, Generation]:
    """The plain run's batches that hold these prompts, with two log-probabilities.

    Whole batches, because what runs together decides how sums are rounded.
    """
    size = len(batches[0])
    with_logprobs = replace(sampling, top_logprobs=2)
    again: dict[int, Generation] = {}
    for index in sorted({prompt // size for prompt in prompts}):
        generations = off.generate(batches[index], with_logprobs).generations
        again.update(enumerate(generations, start=index * size))
    return again


def _gap(
    difference: Difference, again: Generation, plain: tuple[int, ...]
) -> float | None:
    end = difference.position + 1
    if again.token_ids[:end] != plain[:end]:
        return None  # the plain run itself did not repeat: nothing can be said
    return plain_gap(difference, again)
