"""The training loop: batches in a fixed order, gradients, evaluation, checkpoints."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object

from .. import __version__
from ..head_io import write_head
from . import checkpoint
from .config import TrainConfig
from .data import Row, collate, fingerprint
from .evaluate import PredictedAcceptance, predict_acceptance
from .features import TargetFeatures
from .run_log import RunLog, Window
from .schedule import Schedule
from .start import (
    RunData,
    StartCapture,
    read_run_data,
    read_target_config,
    start_run,
)
from .step import StepOutput, TrainingStep

__all__ = ["Best", "TrainConfig", "Trainer"]

Report = Callable[[dict[str, Any]], None]
# Refuses, by a ValueError, a target whose captured states do not give its logits.
Gate = Callable[[TargetFeatures, Sequence[Row]], None]
LOG_EVERY = 10
# Not part of what a run is: they may change when it goes on.
_INCIDENTAL = frozenset(
    {"out", "device", "features", "features_dir", "rows", "accumulate", "parity_rows"}
)


@dataclass(frozen=True)
class Best:
    """The best head so far, by held-out acceptance length and not by loss."""

    step: int
    acceptance_length: float
    n_alpha: tuple[float, ...]
    summary: dict[str, Any]


class Trainer:
    """One run. `train()` resumes from `out/checkpoint.pt` and ends with `out/head`.

    Under torchrun or `accelerate launch` every process makes one: an optimizer step
    then takes `accumulate` micro-batches of each rank, and equals the step of a single
    process that accumulates all of them.

    Args:
        config: the run.
        report: called on the main process with each record of the log.
        gate: called on the main process before the first step, with the target and
            some held-out rows.
        data: rows that are split already; None reads and splits those of `config`.
        start_capture: starts the engine that `features: vllm` asks for.

    Raises:
        ValueError: whatever is wrong with rows, target, head or configuration.
    """

    def __init__(
        self,
        config: TrainConfig,
        report: Report,
        gate: Gate | None = None,
        data: RunData | None = None,
        start_capture: StartCapture | None = None,
    ) -> None:
        self.config, self.report, self.gate = config, report, gate
        cpu = config.device == "cpu" or not torch.cuda.is_available()
        self.accelerator = Accelerator(
            cpu=cpu, gradient_accumulation_steps=config.accumulate
        )
        self.out = Path(config.out)
        self.out.mkdir(parents=True, exist_ok=True)
        torch.manual_seed(config.seed)
        self.target_config = read_target_config(config)
        self.data = data or read_run_data(config, self.target_config)
        with self.accelerator.main_process_first():
            self.begun = start_run(
                config,
                self.target_config,
                self.data,
                _name(self.accelerator.device),
                start_capture,
            )
        self.head, self.vocab = self.begun.head, self.begun.vocab
        optimizer = torch.optim.AdamW(
            self.head.parameters(),
            config.learning_rate,
            (0.9, 0.95),
            weight_decay=0.0,
            fused=True,
        )
        module = TrainingStep(self.head, self.vocab, config)
        self.module, self.optimizer = self.accelerator.prepare(module, optimizer)
        self.schedule = Schedule(config, self.data.train, self._batches_per_step)
        self.step = 0
        self.best: Best | None = None
        self.log: RunLog | None = None

    def train(self) -> Best:
        """Run to the end; return what the exported head is predicted to reach.

        Raises:
            ValueError: a loss that is not finite, a full disk, another run's folder.
        """
        self._resume()
        if self.accelerator.is_main_process:
            self.log = RunLog(self.out, self.step)
        self._write("start", **self._facts())
        if self.gate is not None and self.step == 0:
            with self.accelerator.main_process_first():
                if self.accelerator.is_main_process:
                    self.gate(
                        self.begun.target, self.data.held_out[: self.config.parity_rows]
                    )
        window = Window()
        for number, group in enumerate(self.schedule):
            if number < self.step:
                continue
            with window.clock():
                window.add(self._train_step(group))
            window.tokens += sum(len(row.ids) for row in chain(*group))
            self.step += 1
            if self.step % LOG_EVERY == 0:
                self._write("step", **window.take(self.accelerator))
            if self.step % self.config.evaluate_every == 0:
                self._evaluate_and_save()
        if self.best is None or self.step % self.config.evaluate_every:
            self._evaluate_and_save()
        assert self.best is not None
        if self.log is not None:
            self.log.close()
        return self.best

    @property
    def total_steps(self) -> int:
        return self.schedule.num_steps

    @property
    def _batches_per_step(self) -> int:
        return self.config.accumulate * self.accelerator.num_processes

    def _train_step(self, group: Sequence[Sequence[Row]]) -> list[StepOutput]:
        """One optimizer step; returns what this rank's micro-batches gave."""
        for parameters in self.optimizer.param_groups:
            parameters["lr"] = self.schedule.learning_rate(self.step)
        rank, world = self.accelerator.process_index, self.accelerator.num_processes
        outputs = []
        for rows in group[rank::world]:
            batch = collate(rows)
            with self.accelerator.accumulate(self.module):
                output: StepOutput = self.module(batch, self.begun.features(batch))
                self._require_finite(output.loss, "loss", rows)
                self.accelerator.backward(output.loss)
                if self.accelerator.sync_gradients:
                    norm = self.accelerator.clip_grad_norm_(
                        self.module.parameters(), self.config.grad_clip
                    )
                    self._require_finite(norm, "gradient", rows)
                self.optimizer.step()
                self.optimizer.zero_grad()
            outputs.append(output)
        return outputs

    def _require_finite(
        self, value: torch.Tensor, what: str, rows: Sequence[Row]
    ) -> None:
        if bool(torch.isfinite(value)):
            return
        path, kept = self._checkpoint_path, "there is no checkpoint yet"
        if path.is_file():
            kept = f"the last good checkpoint is {path}"
        names = ", ".join(row.where or row.kind for row in rows)
        raise ValueError(
            f"{what} is {value.item()} at step {self.step}, in the batch of {names}; "
            f"{kept}; lower learning_rate, or leave out a row that is broken"
        )

    def _evaluate_and_save(self) -> None:
        predicted = self._predict()
        self._write("eval", **predicted.summary(), by_kind=_lengths(predicted))
        best, length = self.best, predicted.acceptance_length
        is_best = best is None or length > best.acceptance_length
        if is_best:
            summary = predicted.summary()
            self.best = Best(self.step, length, predicted.n_alpha, summary)
        if self.accelerator.is_main_process:
            if is_best:
                self._export()
            self._checkpoint()
        self.accelerator.wait_for_everyone()

    def _predict(self) -> PredictedAcceptance:
        """Held-out acceptance, on every rank; each judges its share of the rows."""
        rank, world = self.accelerator.process_index, self.accelerator.num_processes
        share = predict_acceptance(
            self.head,
            self.begun.features,
            self.vocab,
            self.data.held_out[rank::world],
            self.config.draft_tokens,
            self.config.tokens_per_batch,
            self.config.precision,
        )
        return PredictedAcceptance(tuple(gather_object(list(share.rows))))

    def _export(self) -> None:
        assert self.best is not None
        served = deepcopy(self.head).to("cpu", torch.bfloat16)
        write_head(
            self.out / "head",
            served,
            self.vocab,
            target_config=self.target_config,
            extra={
                "step": self.best.step,
                "of_steps": self.total_steps,
                "held_out": self.best.summary,
                **self._facts(),
            },
            embed_tokens=self.begun.embedding,
        )

    def _facts(self) -> dict[str, Any]:
        """What the run is: written at the start of the log and into every head."""
        return {
            "rows": len(self.data.train),
            "held_out_rows": len(self.data.held_out),
            "reply_tokens": self.data.reply_tokens,
            "skipped": self.data.skipped,
            "data": fingerprint(self.data.train),
            "coverage": _coverage(self.data.reply_counts, self.vocab.to_target_ids),
            "steps": self.total_steps,
            "batches_per_step": self._batches_per_step,
            "processes": self.accelerator.num_processes,
            "parameters": sum(p.numel() for p in self.head.parameters()),
            "train": self.config.model_dump(mode="json"),
            "versions": {"vllm_eagle3": __version__, "torch": str(torch.__version__)},
            "argv": sys.argv,
        }

    @property
    def _checkpoint_path(self) -> Path:
        return self.out / "checkpoint.pt"

    def _identity(self) -> dict[str, Any]:
        """What must be the same for a run to go on."""
        config = self.config.model_dump(mode="json", exclude=set(_INCIDENTAL))
        return config | {
            "data": fingerprint(self.data.train),
            "batches_per_step": self._batches_per_step,
        }

    def _checkpoint(self) -> None:
        checkpoint.save(
            self._checkpoint_path,
            {
                "step": self.step,
                "best": None if self.best is None else asdict(self.best),
                "head": self.head.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "rng": torch.get_rng_state(),
                "identity": self._identity(),
                "facts": self._facts(),
            },
        )

    def _resume(self) -> None:
        state = checkpoint.load(self._checkpoint_path)
        if state is None:
            return
        checkpoint.require_same(self._checkpoint_path, state, self._identity())
        self.head.load_state_dict(state["head"])
        self.optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["rng"])
        self.step = state["step"]
        self.best = None if state["best"] is None else Best(**state["best"])

    def _write(self, event: str, **values: Any) -> None:
        if self.log is None:
            return
        record = {"event": event, "step": self.step, "of": self.total_steps, **values}
        self.log.write(record)
        self.report(record)


def _name(device: torch.device) -> str:
    """ "cuda:1", but "cpu" for every rank (accelerate numbers those too)."""
    return "cpu" if device.type == "cpu" else str(device)


def _lengths(predicted: PredictedAcceptance) -> dict[str, Any]:
    """Acceptance length and its interval per domain."""
    return {
        kind: [part.acceptance_length, *part.greedy.length_interval()]
        for kind, part in predicted.by_kind().items()
    }


def _coverage(counts: torch.Tensor, ids: torch.Tensor) -> float:
    return float(counts[ids].sum() / counts.sum().clamp(min=1))
