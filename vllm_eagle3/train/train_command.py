"""The command `train`: check the configuration, show the plan or run it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from .. import embedded
from .config import TrainConfig, read_config
from .parity import Score, teacher_parity_gate
from .plan import make_plan, show_plan
from .start import StartCapture


def run_train(
    config: Path,
    console: Console,
    overrides: Sequence[str] = (),
    dry_run: bool = False,
    score: Score | None = None,
    start_capture: StartCapture | None = None,
) -> None:
    """Train as `config` says, with progress on the console; or show the plan alone.

    Args:
        score: asked by the teacher-parity gate; None leaves the gate out.
        start_capture: starts the engine that `features: vllm` asks for.

    Raises:
        ValueError: whatever is wrong with the configuration, the data or the disk.
    """
    settings = resolve(read_config(config, overrides))
    if dry_run:
        show_plan(make_plan(settings), console)
        return
    from .trainer import Trainer

    gate = None
    if score is not None:
        gate = teacher_parity_gate(score, console.print)
    with _progress(console) as progress:
        shown = _Shown(progress)
        try:
            trainer = Trainer(settings, shown, gate, start_capture=start_capture)
            best = trainer.train()
        except OSError as error:
            raise ValueError(f"out: {settings.out}: {error}") from error
    if shown.is_main:
        low, high = best.summary["interval"]
        console.print(
            f"{settings.out}/head: step {best.step}, acceptance length "
            f"{best.acceptance_length:.3f} ({low:.3f} to {high:.3f}) predicted on "
            "held-out rows"
        )


def resolve(settings: TrainConfig) -> TrainConfig:
    """Embedded names become folders."""
    changes = {"target": str(embedded.resolve_target(settings.target))}
    if settings.warm_start is not None:
        changes["warm_start"] = str(embedded.resolve_head(settings.warm_start))
    return settings.model_copy(update=changes)


def _progress(console: Console) -> Progress:
    return Progress(
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.description}"),
        console=console,
    )


class _Shown:
    """Records of the log as a progress bar and lines; only the main rank has any."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress
        self.is_main = False
        self._task: Any = None

    def __call__(self, record: dict[str, Any]) -> None:
        self.is_main = True
        if self._task is None:
            self._task = self.progress.add_task("", total=record["of"])
        description = _step(record) if record["event"] == "step" else ""
        self.progress.update(
            self._task, completed=record["step"], description=description
        )
        if record["event"] == "start":
            self.progress.console.print(_start(record))
        elif record["event"] == "eval":
            self.progress.console.print(_eval(record))


def _start(record: dict[str, Any]) -> str:
    skipped = "".join(f", {n} {why}" for why, n in record["skipped"].items())
    return (
        f"{record['rows']} rows with {record['reply_tokens']:,} reply tokens"
        f" (skipped: {skipped[2:] or 'none'}), draft vocabulary covers "
        f"{record['coverage']:.2%}, {record['steps']} steps"
    )


def _step(record: dict[str, Any]) -> str:
    return (
        f"{record['tokens_per_s']:.0f} tokens/s  loss {record['loss']:.3f}  "
        f"right {_shares(record['hits'])}"
    )


def _eval(record: dict[str, Any]) -> str:
    low, high = record["interval"]
    return (
        f"step {record['step']}: acceptance length {record['acceptance_length']:.3f} "
        f"({low:.3f} to {high:.3f}), n-alpha {_shares(record['n_alpha'])}; sampled "
        f"drafts {record['sampled_acceptance_length']:.3f}"
    )


def _shares(values: Sequence[float]) -> str:
    return " ".join(f"{value:.2f}" for value in values)
