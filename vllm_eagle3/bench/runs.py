"""Running a plan: one process per method, all loaded, interleaved batch by batch.

    for setting, for repeat, for batch of prompts, for method:
        generate, alone on the machine

so that drift of the machine (heat, neighbours, clock) hits all methods alike. The
order of the methods rotates, so that none always follows the same one. Engines start
once, large enough for the largest batch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Protocol

from vllm_eagle3.acceptance import DraftCounts
from vllm_eagle3.bench.identity import (
    Difference,
    first_differences,
    plain_gap,
)
from vllm_eagle3.bench.methods import Method
from vllm_eagle3.bench.plan import BenchPlan, Setting
from vllm_eagle3.bench.process import Timed, WorkerProcess
from vllm_eagle3.bench.workload import PromptBatch
from vllm_eagle3.engine import Generation, Sampling

WARM_UP_TOKENS = 16

Workers = Mapping[str, WorkerProcess]  # method name -> its process


class Watcher(Protocol):
    """Who wants to see how a benchmark goes."""

    def started(self, method: Method, seconds: float) -> None: ...

    def entering(self, setting: Setting) -> None: ...

    def measured(self, method: Method, timed: Timed) -> None: ...

    def checking(self, num_requests: int) -> None: ...


@dataclass
class Repeat:
    """All batches once through one method."""

    batches: list[Timed] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        return sum(timed.seconds for timed in self.batches)

    @property
    def new_tokens(self) -> int:
        return sum(timed.new_tokens for timed in self.batches)

    @property
    def counts(self) -> DraftCounts:
        return total_counts(self.batches)

    @property
    def tokens_per_s(self) -> float:
        return self.new_tokens / self.seconds

    @property
    def token_ids(self) -> list[tuple[int, ...]]:
        """New tokens of every request, in order."""
        return [g.token_ids for timed in self.batches for g in timed.generations]


def total_counts(batches: Iterable[Timed]) -> DraftCounts:
    return sum((timed.counts for timed in batches), DraftCounts())


@dataclass
class MethodRun:
    """One method at one setting; `differences` None where there is no plain run."""

    method: Method
    setting: Setting
    batches: tuple[PromptBatch, ...]
    repeats: list[Repeat]
    differences: list[Difference] | None = None


def run_bench(plan: BenchPlan, engine: str, watcher: Watcher) -> list[MethodRun]:
    """Start the engines, measure at every setting, compare the texts.

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
        for setting in plan.settings:
            watcher.entering(setting)
            runs += _run_setting(plan, workers, setting, watcher)
        return runs


def _spawn(plan: BenchPlan, method: Method, engine: str) -> WorkerProcess:
    return WorkerProcess(
        method.name,
        engine,
        plan.environ(method),
        plan.options.out / log_name(method),
    )


def log_name(method: Method) -> str:
    """The log of a method's process; a model's path in its name becomes dashes."""
    return re.sub(r"[^\w.]+", "-", method.name) + ".log"


def _run_setting(
    plan: BenchPlan, workers: Workers, setting: Setting, watcher: Watcher
) -> list[MethodRun]:
    sampling = plan.sampling(setting)
    batches = plan.batches(setting)
    _warm_up(plan, workers, batches, sampling)
    runs = {
        method.name: MethodRun(method, setting, batches, []) for method in plan.methods
    }
    for repeat in range(plan.options.repeats):
        for run in runs.values():
            run.repeats.append(Repeat())
        for index, batch in enumerate(batches):
            for method in _rotated(plan.methods, repeat + index):
                timed = _generate(plan, workers[method.name], batch, sampling)
                runs[method.name].repeats[-1].batches.append(timed)
                watcher.measured(method, timed)
    if setting.temperature == 0 and "off" in runs:
        _compare(plan, runs, workers["off"], watcher)
    return list(runs.values())


def _warm_up(
    plan: BenchPlan,
    workers: Workers,
    batches: Sequence[PromptBatch],
    sampling: Sampling,
) -> None:
    """A few tokens, and all prompts as often as asked for: `auto` settles."""
    few = replace(sampling, max_tokens=min(WARM_UP_TOKENS, sampling.max_tokens))
    for worker in workers.values():
        _generate(plan, worker, batches[0], few)
        for _ in range(plan.options.warm_up):
            for batch in batches:
                _generate(plan, worker, batch, sampling)


def _generate(
    plan: BenchPlan, worker: WorkerProcess, batch: PromptBatch, sampling: Sampling
) -> Timed:
    prompts = [plan.prompt_ids[index] for index in batch.prompts]
    return worker.generate(prompts, plan.samplings(batch, sampling), batch.at_once)


def _rotated(methods: tuple[Method, ...], by: int) -> tuple[Method, ...]:
    by %= len(methods)
    return methods[by:] + methods[:by]


def _compare(
    plan: BenchPlan,
    runs: Mapping[str, MethodRun],
    worker: WorkerProcess,
    watcher: Watcher,
) -> None:
    """Fill in `differences`; repeats the plain run untimed for those that differ."""
    off = runs["off"]
    plain = off.repeats[0].token_ids
    found = {
        name: first_differences(plain, run.repeats[0].token_ids)
        for name, run in runs.items()
        if name != "off"
    }
    differing = {d.request for differences in found.values() for d in differences}
    watcher.checking(len(differing))
    again = _plain_again(plan, differing, off, worker)
    for name, differences in found.items():
        runs[name].differences = [
            replace(d, gap=_gap(d, again[d.request], plain[d.request]))
            for d in differences
        ]


def _plain_again(
    plan: BenchPlan, requests: set[int], off: MethodRun, worker: WorkerProcess
) -> dict[int, Generation]:
    """The plain run's batches that hold these requests, with two log-probabilities.

    Whole batches, because what runs together decides how sums are rounded.
    """
    size = len(off.batches[0].prompts)
    with_logprobs = replace(plan.sampling(off.setting), top_logprobs=2)
    again: dict[int, Generation] = {}
    for index in sorted({request // size for request in requests}):
        timed = _generate(plan, worker, off.batches[index], with_logprobs)
        again.update(enumerate(timed.generations, start=index * size))
    return again


def _gap(
    difference: Difference, again: Generation, plain: Sequence[int]
) -> float | None:
    end = difference.position + 1
    if again.token_ids[:end] != plain[:end]:
        return None  # the plain run itself did not repeat: nothing can be said
    return plain_gap(difference, again)
