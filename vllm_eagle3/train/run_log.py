"""The log of a run: one JSON object a line, and TensorBoard's scalars where it is."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from .step import StepOutput


class RunLog:
    """Writes `out/log.jsonl` and `out/tensorboard`.

    Args:
        out: folder of the run.
        step: where the run goes on; curves of an earlier attempt end there.
    """

    def __init__(self, out: Path, step: int) -> None:
        self._path = out / "log.jsonl"
        self._tensorboard: Any = _writer(out / "tensorboard", step)

    def write(self, record: dict[str, Any]) -> None:
        with self._path.open("a", encoding="utf-8") as log:
            log.write(json.dumps(record) + "\n")
        if self._tensorboard is not None:
            for name, value in _scalars(record):
                self._tensorboard.add_scalar(name, value, record["step"])
            self._tensorboard.flush()

    def close(self) -> None:
        if self._tensorboard is not None:
            self._tensorboard.close()


class Window:
    """Means since the last record of the log."""

    def __init__(self) -> None:
        self._restart()

    def _restart(self) -> None:
        self._outputs: list[StepOutput] = []
        self._tokens, self._since = 0, time.monotonic()

    def add(self, outputs: Sequence[StepOutput], tokens: int) -> None:
        """One optimizer step: this rank's outputs, the tokens of all ranks."""
        self._outputs += outputs
        self._tokens += tokens

    def take(self, accelerator: Accelerator) -> dict[str, Any]:
        """Means over steps and ranks, tokens per second; then start anew."""
        rows = [
            torch.cat([output.loss.detach()[None], output.losses, output.hits])
            for output in self._outputs
        ]
        means = accelerator.reduce(torch.stack(rows).mean(0), "mean")
        loss, *each = means.tolist()
        half = len(each) // 2
        record = {
            "loss": loss,
            "losses": each[:half],
            "hits": each[half:],
            "tokens_per_s": self._tokens / (time.monotonic() - self._since),
        }
        self._restart()
        return record


def _writer(directory: Path, step: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(directory), purge_step=step)


def _scalars(record: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """("step/loss", 1.2), ("step/hits/0", 0.4), ... of one record."""
    for name, value in record.items():
        if name in ("event", "step", "of"):
            continue
        values = value if isinstance(value, (list, tuple)) else [value]
        for i, item in enumerate(values):
            if isinstance(item, (int, float)):
                place = f"/{i}" if len(values) > 1 else ""
                yield f"{record['event']}/{name}{place}", float(item)
