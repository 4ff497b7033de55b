"""Showing a benchmark: progress while it runs, a table and a verdict at the end."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table

from vllm_eagle3.bench.methods import Method
from vllm_eagle3.bench.plan import BenchPlan
from vllm_eagle3.bench.process import Timed

Record = dict[str, Any]

# A change smaller than this is not called a gain or a loss: two runs of the same
# method differ by as much.
NOTABLE = 0.03
_LINES_WITHOUT_TERMINAL = 10


class ProgressWatcher:
    """A `Watcher` that shows a bar per method, or a few lines where output is a file.

    Use as a context manager around `run_bench`.
    """

    def __init__(self, plan: BenchPlan, console: Console) -> None:
        self._console = console
        self._total = sum(
            plan.options.repeats * -(-len(plan.prompt_ids) // size)
            for size in plan.batch_sizes
        )
        self._seconds = dict.fromkeys((m.name for m in plan.methods), 0.0)
        self._tokens = dict.fromkeys(self._seconds, 0)
        self._done = dict.fromkeys(self._seconds, 0)
        self._progress = Progress(
            TextColumn("{task.description:<16}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[speed]}"),
            TimeElapsedColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._tasks = {
            name: self._progress.add_task(name, total=self._total, speed="starting")
            for name in self._seconds
        }

    def __enter__(self) -> ProgressWatcher:
        self._progress.start()
        names = ", ".join(self._seconds)
        self._console.print(f"starting engines: {names}", highlight=False)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._progress.stop()

    def started(self, method: Method, seconds: float) -> None:
        self._progress.update(self._tasks[method.name], speed="ready")
        self._say(f"{method.name}: engine ready after {seconds:.0f} s")

    def measured(self, method: Method, timed: Timed) -> None:
        name = method.name
        self._seconds[name] += timed.seconds
        self._tokens[name] += timed.new_tokens
        self._done[name] += 1
        speed = f"{self._tokens[name] / self._seconds[name]:.1f} tokens/s"
        self._progress.update(self._tasks[name], advance=1, speed=speed)
        every = max(1, self._total // _LINES_WITHOUT_TERMINAL)
        if self._done[name] % every == 0 or self._done[name] == self._total:
            self._say(f"{name}: {self._done[name]}/{self._total}, {speed}")

    def checking(self, num_prompts: int) -> None:
        if num_prompts:
            self._console.print(
                f"not the tokens of off: {num_prompts} of the prompts; looking closer",
                highlight=False,
            )

    def _say(self, line: str) -> None:
        if not self._console.is_terminal:
            self._console.print(line, highlight=False)


def results_table(runs: Sequence[Record]) -> Table:
    """One row per run; ranges are over repeats."""
    table = Table(title=_conditions(runs[0]))
    table.add_column("method")
    for heading in ("batch", "tokens/s", "speed-up", "acceptance length"):
        table.add_column(heading, justify="right")
    table.add_column("same text as off")
    for run in runs:
        length = run["acceptance_length"]
        table.add_row(
            run["method"],
            str(run["batch"]),
            _with_range(run["tokens_per_s"], run["tokens_per_s_range"], ".1f"),
            _with_range(run.get("speed_up"), run.get("speed_up_range"), ".2f"),
            "-" if length is None else f"{length:.2f}",
            _identity(run),
        )
    return table


def _conditions(run: Record) -> str:
    return (
        f"{run['prompts']} prompts, temperature {run['temperature']:g}, "
        f"up to {run['max_tokens']} new tokens, {run['dtype']}"
    )


def _with_range(
    value: float | None, ends: Sequence[float] | None, precision: str
) -> str:
    if value is None or ends is None:
        return "-"
    text = f"{value:{precision}}"
    if ends[0] == ends[1]:
        return text
    return f"{text} ({ends[0]:{precision}}..{ends[1]:{precision}})"


def _identity(run: Record) -> str:
    if run.get("identical") is None:
        return "-"
    text = f"{run['identical']} of {run['prompts']}"
    if run["near_ties"]:
        text += f", {run['near_ties']} near-tie" + "s" * (run["near_ties"] > 1)
    if run["different"]:
        text += f", {run['different']} DIFFERENT"
    return text


def verdict(runs: Sequence[Record]) -> str:
    """One line on whether the best speculative method pays; '' without a plain run."""
    candidates = [r for r in runs if "identical" in r and r.get("speed_up")]
    if not candidates:
        return ""
    best = max(candidates, key=lambda run: run["speed_up"])
    speed_up = best["speed_up"]
    what = f"{best['method']} at batch {best['batch']}"
    if speed_up > 1 + NOTABLE:
        return f"Speculation pays here: {what} is {speed_up:.2f} times as fast as off."
    if speed_up < 1 - NOTABLE:
        return (
            f"Speculation does not pay here: the best, {what}, runs at "
            f"{speed_up:.2f} times the speed of off."
        )
    return f"Speculation changes little here: {what} is {speed_up:.2f} times off."
