"""The command `soak`: run, show a live line, write the report."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from vllm_eagle3.acceptance import acceptance_length
from vllm_eagle3.bench.environment import describe_environment, settings
from vllm_eagle3.bench.results import write_json
from vllm_eagle3.soak.checks import Check, Round, check_all
from vllm_eagle3.soak.meter import Counters
from vllm_eagle3.soak.run import (
    Progress,
    Soaked,
    SoakOptions,
    run_soak,
    wrong_answers,
)

LOG_SECONDS = 10.0
_MOST_REPORTED = 50


def run_soak_command(options: SoakOptions, console: Console) -> bool:
    """Soak, write `out`/soak.json and print the checks; True if all hold.

    Raises:
        ServerError: a server did not start.
    """
    console.print(
        f"{options.rounds} rounds of {options.distinct} requests, {options.concurrency}"
        f" at a time; logs in {options.out}",
        highlight=False,
    )
    with LiveLine(console) as show:
        soaked = run_soak(options, show)
    checks = check_all(soaked.rounds, soaked.expected.laws, soaked.is_alive)
    write_json(options.out / "soak.json", make_report(options, soaked, checks))
    console.print(_rounds_table(soaked.rounds))
    console.print(_checks_table(checks))
    for index, number, kind, verdict in wrong_answers(soaked.rounds)[:5]:
        where = f"round {index + 1}, request {number} ({kind})"
        console.print(f"{where}: {verdict.wrong}", markup=False, highlight=False)
    return all(check.ok for check in checks)


class LiveLine:
    """How it goes, in one line that changes; in a log, a line every ten seconds."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._status = console.status("starting a server")
        self._next_line = 0.0

    def __enter__(self) -> LiveLine:
        self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._status.stop()

    def __call__(self, moment: Progress) -> None:
        line = describe(moment)
        self._status.update(line)
        if not self._console.is_terminal and time.monotonic() >= self._next_line:
            self._console.print(line, highlight=False)
            self._next_line = time.monotonic() + LOG_SECONDS


def describe(moment: Progress) -> str:
    """One line on a moment of the soak."""
    length = moment.acceptance_length
    return (
        f"{moment.stage}: {moment.done}/{moment.total}, {moment.wrong} wrong, "
        f"{moment.tokens_per_s:.0f} tokens/s, acceptance length "
        f"{'-' if length is None else f'{length:.2f}'}, KV {moment.kv_use:.0%}, "
        f"memory {moment.memory / 2**20:.0f} MiB"
    )


def make_report(
    options: SoakOptions, soaked: Soaked, checks: Sequence[Check]
) -> dict[str, Any]:
    """The content of soak.json."""
    verdicts = [v for each in soaked.rounds for v in each.verdicts]
    return {
        "ok": all(check.ok for check in checks),
        "checks": [asdict(check) for check in checks],
        "requests": len(verdicts),
        "kinds": dict(Counter(kind for _, kind, _ in verdicts)),
        "wrong": [
            {"round": index, "request": number, "kind": kind, "why": verdict.wrong}
            for index, number, kind, verdict in wrong_answers(soaked.rounds)
        ][:_MOST_REPORTED],
        "near_ties": sum(verdict.near_tie for _, _, verdict in verdicts),
        "rounds": [_round_record(each) for each in soaked.rounds],
        "options": {
            **{name: str(getattr(options, name)) for name in ("target", "head")},
            "method": options.method.name,
            "concurrency": options.concurrency,
            "distinct": options.distinct,
            "kv_blocks": options.num_blocks,
            "seed": options.seed,
        },
        "environment": {**describe_environment(), "settings": settings(os.environ)},
    }


def _round_record(each: Round) -> dict[str, Any]:
    return {
        "requests": len(each.verdicts),
        "seconds": each.seconds,
        "tokens_per_s": _speed(each),
        "acceptance_length": acceptance_length(each.counters.drafts),
        "kv_left": each.kv_left,
        "memory": each.memory,
        "counters": asdict(each.counters),
    }


def _speed(each: Round) -> float:
    return each.counters.new_tokens / each.seconds if each.seconds else 0.0


def _rounds_table(rounds: Sequence[Round]) -> Table:
    table = Table("round", "requests", "tokens/s", "acceptance length")
    for name in ("cache hits", "preemptions", "KV left", "memory, MiB"):
        table.add_column(name)
    for index, each in enumerate(rounds):
        counters: Counters = each.counters
        length = acceptance_length(counters.drafts)
        table.add_row(
            str(index + 1),
            str(len(each.verdicts)),
            f"{_speed(each):.0f}",
            "-" if length is None else f"{length:.3f}",
            f"{counters.hit_rate:.1%}",
            str(counters.preemptions),
            f"{each.kv_left:.1%}",
            f"{max(each.memory, default=0) / 2**20:.0f}",
        )
    return table


def _checks_table(checks: Sequence[Check]) -> Table:
    table = Table("check", "holds", "found")
    for check in checks:
        table.add_row(check.name, "yes" if check.ok else "[bold red]NO[/]", check.found)
    return table
