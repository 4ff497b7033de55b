"""The texts an evaluation is about, and the engine's figures on the same prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from ..acceptance import DraftCounts
from ..bench.launch import worker_environ
from ..bench.methods import Method
from ..bench.plan import BenchPlan
from ..bench.process import WorkerProcess
from ..engine import Sampling


@dataclass(frozen=True)
class Text:
    """What the target says to a prompt without speculation.

    `tail` goes on behind the end of the reply, over an end mark too: drafts of a last
    step are judged there.
    """

    prompt: tuple[int, ...]
    reply: tuple[int, ...]
    tail: tuple[int, ...]

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.prompt + self.reply + self.tail


@dataclass(frozen=True)
class Observed:
    """One prompt: the plain text, and vLLM's chain on it (its counters, its reply)."""

    text: Text
    counts: DraftCounts
    speculative_reply: tuple[int, ...]


Progress = Callable[[int], None]  # prompts done


def observe(
    plan: BenchPlan,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    num_drafts: int,
    engine: str,
    logs: Path,
    progress: Progress,
) -> list[Observed]:
    """Run every prompt alone, without speculation and then with it.

    Args:
        plan: of two methods, plain decoding and a chain of `num_drafts`.
        engine: `module:class`, see `bench.worker`.
        logs: folder for what the engines print.

    Raises:
        WorkerError: an engine failed.
    """
    with ExitStack() as stack:
        off, chain = (
            stack.enter_context(_spawn(plan, method, engine, logs))
            for method in plan.methods
        )
        for worker, method in zip((off, chain), plan.methods, strict=True):
            worker.request_start(plan.engine_spec(method))
        for worker in (off, chain):
            worker.wait_started()
        observed = []
        for ids in prompts:
            text = _plain_text(off, tuple(ids), sampling, num_drafts)
            timed = chain.generate([ids], sampling)
            reply = timed.generations[0].token_ids
            observed.append(Observed(text, timed.counts, reply))
            progress(len(observed))
        return observed


def _spawn(plan: BenchPlan, method: Method, engine: str, logs: Path) -> WorkerProcess:
    environ = worker_environ(method, plan.options.mode)
    log = logs / f"{method.name.replace(':', '-')}.log"
    return WorkerProcess(method.name, engine, environ, log)


def _plain_text(
    off: WorkerProcess, prompt: tuple[int, ...], sampling: Sampling, num_tail: int
) -> Text:
    reply = off.generate([prompt], sampling).generations[0].token_ids
    onwards = Sampling(sampling.temperature, num_tail, ignore_eos=True)
    tail = off.generate([prompt + reply], onwards).generations[0].token_ids
    return Text(prompt, reply, tail)
