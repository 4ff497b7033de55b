"""The log of a run: one JSON object a line, and the same as TensorBoard's curves."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from .step import StepOutput


class RunLog:
    """Writes `out/log.jsonl` and `out/tensorboard`.

    Args:
        out: folder of the run.
        step: where the run goes on; what an earlier attempt logged after it is dropped,
            since those steps are made again.
    """

    def __init__(self, out: Path, step: int) -> None:
        self._path = out / "log.jsonl"
        _forget_after(self._path, step)
        # Here, because its import takes longer than all others of a dry run.
        from torch.utils.tensorboard import SummaryWriter

        self._curves = SummaryWriter(str(out / "tensorboard"), purge_step=step)

    def write(self, record: dict[str, Any]) -> None:
        with self._path.open("a", encoding="utf-8") as log:
            log.write(json.dumps(record) + "\n")
        for name, value in _scalars(record):
            self._curves.add_scalar(name, value, record["step"])
        self._curves.flush()

    def close(self) -> None:
        self._curves.close()


class Window:
    """Means since the last record of the log; `tokens` are those of all ranks."""

    def __init__(self) -> None:
        self._restart()

    def _restart(self) -> None:
        self._outputs: list[StepOutput] = []
        self.tokens, self._seconds = 0, 0.0

    @contextmanager
    def clock(self) -> Iterator[None]:
        """Count the time spent inside; evaluation is not training."""
        begun = time.monotonic()
        yield
        self._seconds += time.monotonic() - begun

    def add(self, outputs: Sequence[StepOutput]) -> None:
        """This rank's outputs of one optimizer step."""
        self._outputs += outputs

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
            "tokens_per_s": self.tokens / self._seconds,
        }
        self._restart()
        return record


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


def _forget_after(path: Path, step: int) -> None:
    """Keep the records up to `step`; a line torn by a kill is not kept either."""
    if not path.is_file():
        return
    whole = path.read_text(encoding="utf-8").split("\n")[:-1]
    kept = [line for line in whole if json.loads(line)["step"] <= step]
    path.write_text("".join(line + "\n" for line in kept), encoding="utf-8")
