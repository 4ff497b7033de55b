"""The training loop: features on the fly, unrolled draft, soft cross-entropy."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, Field

from ..draft_head import Eagle3DraftHead
from ..head_io import (
    head_config_for_target,
    read_head,
    require_fitting_head,
    write_head,
)
from ..vocab import DraftVocab
from .data import (
    Batch,
    Row,
    collate,
    count_reply_tokens,
    make_batches,
    read_rows,
    split_rows,
    usable_rows,
)
from .evaluate import PredictedAcceptance, predict_acceptance
from .feature_store import StoredFeatures
from .features import Features, TargetFeatures
from .losses import soft_cross_entropy
from .ttt import unroll

Report = Callable[[dict[str, Any]], None]


class TrainConfig(BaseModel):
    """Everything a run depends on; unknown keys are refused."""

    model_config = ConfigDict(extra="forbid")

    target: str
    rows: list[str]
    out: str
    draft_vocab_size: int = Field(default=8192, gt=0)
    # A head to go on from; its draft vocabulary and switches are kept.
    warm_start: str | None = None
    # Where the target's features are kept for later epochs; None reads them each time.
    features_dir: str | None = None
    tap_ids: tuple[int, ...] | None = None
    fc_norm: bool = False
    norm_output: bool = False
    num_steps: int = Field(default=7, gt=0, le=16)
    step_decay: float = Field(default=0.8, gt=0, le=1)
    epochs: float = Field(default=2.0, gt=0)
    learning_rate: float = Field(default=1e-3, gt=0)
    warmup: float = Field(default=0.02, ge=0, lt=1)
    grad_clip: float = Field(default=0.5, gt=0)
    tokens_per_batch: int = Field(default=2048, gt=0)
    max_length: int = Field(default=2048, gt=2)
    held_out_rows: int = Field(default=64, gt=0)
    evaluate_every: int = Field(default=250, gt=0)
    seed: int = 0


class Trainer:
    """One run. `train()` resumes from `out/checkpoint.pt` and ends with a head."""

    def __init__(self, config: TrainConfig, report: Report) -> None:
        self.config = config
        self.report = report
        self.out = Path(config.out)
        self.out.mkdir(parents=True, exist_ok=True)
        torch.manual_seed(config.seed)
        rows, skipped = usable_rows(read_rows(config.rows), config.max_length)
        self.train_rows, self.held_out = split_rows(
            rows, config.held_out_rows, config.seed
        )
        self.target_config = json.loads(
            (Path(config.target) / "config.json").read_text(encoding="utf-8")
        )
        self.head, self.vocab = self._start()
        target = TargetFeatures(config.target, self.head.config.tap_ids, self.vocab)
        self.features: TargetFeatures | StoredFeatures = target
        if config.features_dir is not None:
            self.features = StoredFeatures(target, config.features_dir)
            self.features.require_room(rows)
        if config.warm_start is None:
            self._start_from_target(target)
        self.optimizer = torch.optim.AdamW(
            self.head.parameters(), config.learning_rate, (0.9, 0.95), weight_decay=0.0
        )
        self.total_steps = sum(1 for _ in self._schedule())
        self.step = 0
        self.best_length = 0.0
        report(
            {
                "event": "start",
                "rows": len(self.train_rows),
                "reply_tokens": sum(r.num_reply_tokens for r in self.train_rows),
                "skipped": skipped,
                "steps": self.total_steps,
                "parameters": sum(p.numel() for p in self.head.parameters()),
            }
        )

    def train(self) -> PredictedAcceptance:
        """Run to the end; return the held-out acceptance of the exported head."""
        self._resume()
        started, tokens = time.monotonic(), 0
        for number, rows in enumerate(self._schedule()):
            if number < self.step:
                continue
            batch = collate(rows)
            loss, alphas = self._train_step(batch)
            self.step += 1
            tokens += batch.num_tokens
            if self.step % 20 == 0:
                speed = tokens / (time.monotonic() - started)
                self._log("step", loss=loss, accuracy=alphas, tokens_per_s=speed)
            if self.step % self.config.evaluate_every == 0:
                self._evaluate_and_save()
        return self._evaluate_and_save()

    def _start(self) -> tuple[Eagle3DraftHead, DraftVocab]:
        """A new head for the target, or the one to go on from."""
        config = self.config
        if config.warm_start is None:
            vocab = self._choose_vocab()
            head_config = head_config_for_target(
                self.target_config,
                len(vocab),
                config.tap_ids,
                fc_norm=config.fc_norm,
                norm_output=config.norm_output,
            )
            return Eagle3DraftHead(head_config), vocab
        require_fitting_head(config.warm_start, config.target)
        loaded = read_head(config.warm_start, config.target, torch.float32)
        asked = {
            "draft_vocab_size": (config.draft_vocab_size, len(loaded.vocab)),
            "tap_ids": (config.tap_ids or loaded.config.tap_ids, loaded.config.tap_ids),
            "fc_norm": (config.fc_norm, loaded.config.fc_norm),
            "norm_output": (config.norm_output, loaded.config.norm_output),
        }
        for field, (ours, theirs) in asked.items():
            if ours != theirs:
                raise ValueError(
                    f"{field}: got {ours}, but the head of warm_start "
                    f"({config.warm_start}) has {theirs}; use {theirs}, or start anew"
                )
        return loaded.head, loaded.vocab

    def _choose_vocab(self) -> DraftVocab:
        """The most frequent reply tokens; fixed at the start, also across resumes."""
        counts = count_reply_tokens(self.train_rows, self.target_config["vocab_size"])
        vocab = DraftVocab.most_frequent(counts, self.config.draft_vocab_size)
        covered = counts[vocab.to_target_ids].sum() / counts.sum().clamp(min=1)
        self.report({"event": "vocab", "size": len(vocab), "coverage": float(covered)})
        return vocab

    @torch.no_grad()
    def _start_from_target(self, target: TargetFeatures) -> None:
        """Start near the target: its output rows, its final norm, its high features.

        In 60 steps this was worth a tenth of the loss over random initial values.
        """
        head, config = self.head, self.head.config
        if config.hidden_size != config.target_hidden_size:
            return
        head.lm_head.weight.copy_(target.lm_head[self.vocab.to_target_ids])
        head.norm.weight.copy_(target.final_norm)
        head.fc.weight.mul_(0.1)
        head.fc.weight[:, -config.hidden_size :] += torch.eye(config.hidden_size)

    def _schedule(self) -> Iterator[list[Row]]:
        """The batches of the whole run, in the same order after any resume."""
        config = self.config
        whole, part = divmod(config.epochs, 1)
        for epoch in range(int(whole) + (part > 0)):
            batches = make_batches(
                self.train_rows, config.tokens_per_batch, config.seed + epoch
            )
            yield from batches if epoch < whole else batches[: int(part * len(batches))]

    def _learning_rate(self) -> float:
        done = self.step / self.total_steps
        warm = min(1.0, (self.step + 1) / (self.config.warmup * self.total_steps + 1))
        return self.config.learning_rate * warm * (1 - done)

    def _train_step(self, batch: Batch) -> tuple[float, list[float]]:
        for group in self.optimizer.param_groups:
            group["lr"] = self._learning_rate()
        loss, accuracy = self._loss(batch, self.features(batch))
        if not torch.isfinite(loss):
            raise ValueError(
                f"loss is {loss.item()} at step {self.step}; the last good checkpoint "
                f"is {self.out}/checkpoint.pt; lower learning_rate"
            )
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.head.parameters(), self.config.grad_clip)
        self.optimizer.step()
        return loss.item(), accuracy

    def _loss(
        self, batch: Batch, features: Features
    ) -> tuple[torch.Tensor, list[float]]:
        """Sum over steps of decay^k times the mean soft cross-entropy of step k."""
        head, taps = self.head, features.taps
        total, accuracy = taps.new_zeros((), dtype=torch.float32), []
        steps = self.config.num_steps
        with torch.autocast(taps.device.type, torch.bfloat16):
            weight = head.lm_head.weight.to(torch.bfloat16)
            for step in unroll(head, taps, features.embeds, batch.span_ids, steps):
                rows = features.law_row[step.row, step.predicted]
                hidden = head.norm(step.hidden).to(torch.bfloat16)
                loss, best = soft_cross_entropy(
                    hidden, weight, features.law, rows, head.config.logit_scale
                )
                decay = self.config.step_decay**step.k
                total = total + decay * loss / rows.numel()
                drafts = self.vocab.to_target_ids[best.cpu()]
                right = drafts == features.best[rows].cpu()
                accuracy.append(round(right.float().mean().item(), 4))
        return total, accuracy

    def _evaluate_and_save(self) -> PredictedAcceptance:
        predicted = predict_acceptance(
            self.head,
            self.features,
            self.vocab,
            self.held_out,
            5,
            self.config.tokens_per_batch,
        )
        length = predicted.acceptance_length
        self._log("eval", acceptance_length=length, n_alpha=predicted.n_alpha)
        if length > self.best_length:
            self.best_length = length
            self._export(predicted)
        self._checkpoint()
        return predicted

    def _export(self, predicted: PredictedAcceptance) -> None:
        """Keep the head that is best by held-out acceptance length, not by loss."""
        served = deepcopy(self.head).to(torch.bfloat16)
        write_head(
            self.out / "head",
            served,
            self.vocab,
            target_config=self.target_config,
            extra={
                "step": self.step,
                "of_steps": self.total_steps,
                "held_out_acceptance_length": predicted.acceptance_length,
                "held_out_n_alpha": predicted.n_alpha,
                "train": self.config.model_dump(),
            },
        )

    def _checkpoint(self) -> None:
        state = {
            "step": self.step,
            "best_length": self.best_length,
            "head": self.head.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "rng": torch.get_rng_state(),
            "config": self.config.model_dump(),
        }
        partial = self.out / "checkpoint.partial"
        torch.save(state, partial)
        os.replace(partial, self.out / "checkpoint.pt")

    def _resume(self) -> None:
        path = self.out / "checkpoint.pt"
        if not path.is_file():
            return
        state = torch.load(path, weights_only=True)
        if state["config"] != self.config.model_dump():
            raise ValueError(
                f"{path} belongs to another configuration; choose another `out` "
                "or restore the configuration that started it"
            )
        self.head.load_state_dict(state["head"])
        self.optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["rng"])
        self.step, self.best_length = state["step"], state["best_length"]
        self._log("resumed")

    def _log(self, event: str, **values: Any) -> None:
        record = {"event": event, "step": self.step, "of": self.total_steps, **values}
        with (self.out / "log.jsonl").open("a", encoding="utf-8") as log:
            log.write(json.dumps(record) + "\n")
        self.report(record)
