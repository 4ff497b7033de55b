"""Showing a benchmark: a live table while it runs, tables and a verdict at the end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table

from vllm_eagle3.acceptance import acceptance_length
from vllm_eagle3.bench.methods import Method
from vllm_eagle3.bench.plan import BenchPlan, Setting
from vllm_eagle3.bench.process import Timed
from vllm_eagle3.bench.runs import Repeat
from vllm_eagle3.bench.statistics import MAX_RELATIVE_WIDTH

Record = dict[str, Any]

# A change smaller than this is not called a gain or a loss: two runs of the same
# method differ by as much.
NOTABLE = 0.03
_LINES_WITHOUT_TERMINAL = 10


@dataclass
class _Row:
    """What is known of a method at the current setting."""

    state: str = "starting"
    so_far: Repeat = field(default_factory=Repeat)


class LiveTable:
    """A `Watcher` that shows a table, or a few lines where output is a file.

    The table has no speed-ups: those are for the end, when it is known how far they
    can be trusted. Use as a context manager around `run_bench`.
    """

    def __init__(self, plan: BenchPlan, console: Console) -> None:
        self._plan = plan
        self._console = console
        self._setting = plan.settings[0]
        self._rows = {method.name: _Row() for method in plan.methods}
        self._live = Live(
            get_renderable=self.table,
            console=console,
            refresh_per_second=4,
            transient=True,
            auto_refresh=console.is_terminal,
        )

    def __enter__(self) -> LiveTable:
        names = ", ".join(self._rows)
        self._console.print(f"starting engines: {names}", highlight=False)
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._console.is_terminal:
            self._live.stop()

    def started(self, method: Method, seconds: float) -> None:
        self._rows[method.name].state = "ready"
        self._say(f"{method.name}: engine ready after {seconds:.0f} s")

    def entering(self, setting: Setting) -> None:
        self._setting = setting
        self._total = self._plan.options.repeats * len(self._plan.batches(setting))
        self._rows = {name: _Row("warming up") for name in self._rows}
        self._say(setting_name(setting.temperature, setting.batch_size))

    def measured(self, method: Method, timed: Timed) -> None:
        row = self._rows[method.name]
        row.so_far.batches.append(timed)
        done = len(row.so_far.batches)
        row.state = f"{done}/{self._total}"
        lines = max(1, _LINES_WITHOUT_TERMINAL // len(self._plan.settings))
        every = max(1, self._total // lines)
        if done % every == 0 or done == self._total:
            speed = f"{row.so_far.tokens_per_s:.1f} tokens/s"
            self._say(f"{method.name}: {row.state}, {speed}")

    def checking(self, num_requests: int) -> None:
        if num_requests:
            self._console.print(
                f"not the tokens of off: {num_requests} of the requests; "
                "looking closer",
                highlight=False,
            )

    def table(self) -> Table:
        setting = self._setting
        table = Table(title=setting_name(setting.temperature, setting.batch_size))
        table.add_column("method")
        for heading in ("batches", "tokens/s", "acceptance length", "seconds"):
            table.add_column(heading, justify="right")
        for name, row in self._rows.items():
            so_far = row.so_far
            length = acceptance_length(so_far.counts)
            table.add_row(
                name,
                row.state,
                f"{so_far.tokens_per_s:.1f}" if so_far.batches else "-",
                "-" if length is None else f"{length:.2f}",
                f"{so_far.seconds:.0f}" if so_far.batches else "-",
            )
        return table

    def _say(self, line: str) -> None:
        if not self._console.is_terminal:
            self._console.print(line, highlight=False)


def setting_name(temperature: float, batch_size: int) -> str:
    return f"temperature {temperature:g}, batch {batch_size}"


def results_table(runs: Sequence[Record]) -> Table:
    """One row per run; ranges are over repeats, intervals of 95%."""
    table = Table(title=_conditions(runs[0]))
    table.add_column("method")
    for heading in ("T", "batch", "tokens/s", "speed-up", "acceptance length"):
        table.add_column(heading, justify="right")
    table.add_column("same text as off")
    for index, run in enumerate(runs):
        length = run["acceptance_length"]
        table.add_row(
            run["method"],
            f"{run['temperature']:g}",
            str(run["batch"]),
            _with_range(run["tokens_per_s"], run["tokens_per_s_range"], ".1f"),
            speed_up_text(run),
            "-" if length is None else f"{length:.2f}",
            identity_text(run),
            end_section=_ends_setting(runs, index),
        )
    return table


def _ends_setting(runs: Sequence[Record], index: int) -> bool:
    following = runs[index + 1 : index + 2]
    return any(_setting_of(run) != _setting_of(runs[index]) for run in following)


def _setting_of(run: Record) -> tuple[float, int]:
    return run["temperature"], run["batch"]


def _conditions(run: Record) -> str:
    return (
        f"{run['prompts']} prompts, up to {run['max_tokens']} new tokens, "
        f"{run['dtype']}"
    )


def _with_range(value: float, ends: Sequence[float], precision: str) -> str:
    text = f"{value:{precision}}"
    if ends[0] == ends[1]:
        return text
    return f"{text} ({ends[0]:{precision}}..{ends[1]:{precision}})"


def speed_up_text(run: Record) -> str:
    """A speed-up with its interval, or why there is none."""
    if run.get("speed_up") is None:
        needed = run.get("repeats_needed")
        return "-" if needed is None else f"too noisy: --repeats {needed}"
    return _with_range(run["speed_up"], run["speed_up_interval"], ".2f")


def identity_text(run: Record) -> str:
    """How many requests gave the tokens of the plain run."""
    if run.get("identical") is None:
        return "-"
    text = f"{run['identical']} of {run['requests']}"
    if run["near_ties"]:
        text += f", {run['near_ties']} near-tie" + "s" * (run["near_ties"] > 1)
    if run["different"]:
        text += f", {run['different']} DIFFERENT"
    return text


def notes(runs: Sequence[Record]) -> list[str]:
    """What a reader of the table has to know; nothing where all is well."""
    lines = []
    needed = [run["repeats_needed"] for run in runs if run.get("repeats_needed")]
    if needed:
        lines.append(
            f"{len(needed)} speed-ups are not shown: from so few measurements they "
            f"would be noise. --repeats {max(needed)} gives all of them."
        )
    uneven = [run for run in runs if run.get("token_counts_equal") is False]
    if uneven:
        names = ", ".join(sorted({run["method"] for run in uneven}))
        lines.append(
            f"Not as many tokens as off in some batches of {names}: a near-tie can "
            "move the end of a reply. --ignore-eos makes all replies equally long."
        )
    return lines


def verdict(runs: Sequence[Record]) -> str:
    """One line on whether the best speculative method pays; '' if nothing is known."""
    candidates = [r for r in runs if "identical" in r and r.get("speed_up")]
    if not candidates:
        return ""
    # The one whose gain is surest: a wide interval is no merit.
    best = max(candidates, key=lambda run: run["speed_up_interval"][0])
    low, high = best["speed_up_interval"]
    speed_up = best["speed_up"]
    what = f"{best['method']} at batch {best['batch']}"
    if best["temperature"]:
        what += f", temperature {best['temperature']:g},"
    if low > 1 and speed_up > 1 + NOTABLE:
        return f"Speculation pays here: {what} is {speed_up:.2f} times as fast as off."
    if high < 1 and speed_up < 1 - NOTABLE:
        return (
            f"Speculation does not pay here: the best, {what}, runs at "
            f"{speed_up:.2f} times the speed of off."
        )
    if high - low > 2 * MAX_RELATIVE_WIDTH:
        return (
            f"No telling whether speculation pays here: the best, {what}, is between "
            f"{low:.2f} and {high:.2f} times off."
        )
    return f"Speculation changes little here: {what} is {speed_up:.2f} times off."
