"""What a run will do, before it does it: rows, vocabulary, bytes and time."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
import yaml
from rich.console import Console
from rich.table import Table
from safetensors import safe_open

from ..draft_head import DraftHeadConfig, Eagle3DraftHead
from .config import TrainConfig
from .data import Row, make_batches
from .start import RunData, new_head_config, read_run_data, read_target_config

# Sizes shown on the curve of the draft vocabulary.
_SIZES = (1024, 2048, 4096, 8192, 16384, 32768)
_FP32, _BF16 = 4, 2


@dataclass(frozen=True)
class Plan:
    """A run that was not started.

    Attributes:
        curve: (size of the draft vocabulary, share of the reply tokens it covers)
        positions: supervised positions of one epoch, all steps together
        operations: multiplications and additions of all matrix products of the run
        rate: what this machine multiplies a second, measured on the head's shapes
    """

    config: TrainConfig
    data: RunData
    curve: tuple[tuple[int, float], ...]
    batches: int
    positions: int
    parameters: int
    operations: float
    rate: float
    feature_bytes: int
    checkpoint_bytes: int

    @property
    def floor_seconds(self) -> float:
        """Time of the matrix products alone."""
        return self.operations / self.rate


def make_plan(config: TrainConfig) -> Plan:
    """Read rows and sizes, and estimate; the target's weights are not loaded.

    Raises:
        ValueError: what would also stop the run.
    """
    target_config = read_target_config(config)
    data = read_run_data(config, target_config)
    head = new_head_config(config, target_config)
    positions = sum(count_positions(data.train, config.num_steps))
    with torch.device("meta"):
        parameters = sum(p.numel() for p in Eagle3DraftHead(head).parameters())
    return Plan(
        config=config,
        data=data,
        curve=coverage_curve(data.reply_counts, config.draft_vocab_size),
        batches=len(make_batches(data.train, config.tokens_per_batch, config.seed)),
        positions=positions,
        parameters=parameters,
        operations=operations(config, target_config, data, head),
        rate=measure_rate(head, config.precision),
        feature_bytes=feature_bytes(
            [*data.train, *data.held_out],
            head,
            _BF16 if config.precision == "bf16" else _FP32,
        ),
        # Weights and two moments in fp32.
        checkpoint_bytes=3 * _FP32 * parameters,
    )


def count_positions(rows: Iterable[Row], num_steps: int) -> list[int]:
    """Supervised positions of each step over `rows`."""
    counts = [0] * num_steps
    for row in rows:
        for start, end, _ in row.spans:
            for k in range(num_steps):
                counts[k] += max(0, end - start - 1 - k)
    return counts


def coverage_curve(counts: torch.Tensor, chosen: int) -> tuple[tuple[int, float], ...]:
    """(size, share of the reply tokens among the `size` most frequent ids)."""
    shares = counts.sort(descending=True).values.cumsum(0) / counts.sum().clamp(min=1)
    sizes = sorted({n for n in (*_SIZES, chosen) if n <= counts.numel()})
    return tuple((size, float(shares[size - 1])) for size in sizes)


def operations(
    config: TrainConfig,
    target_config: Mapping[str, Any],
    data: RunData,
    head: DraftHeadConfig,
) -> float:
    """Operations of the run's matrix products, attention left out.

    A weight costs two operations per position in the forward pass and four in the
    backward pass. The target reads each token once an epoch, or once if its features
    are kept.
    """
    with torch.device("meta"):
        model = Eagle3DraftHead(head)
    layer = sum(p.numel() for p in model.layers.parameters())
    fc, output = model.fc.weight.numel(), model.lm_head.weight.numel()
    positions = count_positions(data.train, config.num_steps)
    trained = 6 * (
        data.tokens * (fc + layer)
        + sum(positions[1:]) * layer
        + sum(positions) * output
    )
    law = 2 * data.reply_tokens * head.draft_vocab_size * head.target_hidden_size
    readings = 1.0 if config.features_dir is not None else config.epochs
    reading = 2 * (
        data.tokens * _target_weights(Path(config.target))
        + data.reply_tokens * head.vocab_size * head.target_hidden_size
    )
    return config.epochs * (trained + law) + readings * reading


def _target_weights(target: Path) -> int:
    """Weights of the target's layers, from the headers of its files."""
    total = 0
    for path in target.glob("*.safetensors"):
        with safe_open(path, "pt") as stored:
            names = [name for name in stored.keys() if ".layers." in name]  # noqa: SIM118
            total += sum(prod(stored.get_slice(n).get_shape()) for n in names)
    return total


def measure_rate(head: DraftHeadConfig, precision: str) -> float:
    """Operations a second of the largest product of a step."""
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    hidden = torch.randn(512, head.hidden_size, dtype=dtype)
    weight = torch.randn(head.draft_vocab_size, head.hidden_size, dtype=dtype)
    best = float("inf")
    for _ in range(5):
        begun = time.perf_counter()
        hidden @ weight.T
        best = min(best, time.perf_counter() - begun)
    return 2 * hidden.numel() * head.draft_vocab_size / best


def feature_bytes(rows: Iterable[Row], head: DraftHeadConfig, item: int) -> int:
    """Bytes of the rows' features on disk, `item` bytes a number (`feature_store`)."""
    state = item * head.target_hidden_size
    return sum(
        state * len(head.tap_ids) * len(row.ids) + (state + 12) * row.num_reply_tokens
        for row in rows
    )


def show_plan(plan: Plan, console: Console) -> None:
    """Print the resolved configuration and the estimates."""
    settings = plan.config.model_dump(mode="json")
    console.print(yaml.safe_dump(settings, sort_keys=False), highlight=False)
    console.print(_rows_table(plan))
    curve = Table("draft vocabulary", "covers", title=None)
    for size, share in plan.curve:
        mark = " (chosen)" if size == plan.config.draft_vocab_size else ""
        curve.add_row(f"{size}{mark}", f"{share:.2%}")
    console.print(curve)
    console.print(_estimates_table(plan))


def _rows_table(plan: Plan) -> Table:
    data, table = plan.data, Table("rows", "", show_header=False)
    table.add_row("rows trained on", f"{len(data.train):,}")
    table.add_row("rows held out", f"{len(data.held_out):,}")
    for reason, count in data.skipped.items():
        table.add_row(f"rows skipped: {reason}", f"{count:,}")
    table.add_row("tokens an epoch", f"{data.tokens:,}")
    table.add_row("of them supervised (replies)", f"{data.reply_tokens:,}")
    table.add_row("supervised positions, all steps", f"{plan.positions:,}")
    table.add_row("micro-batches an epoch", f"{plan.batches:,}")
    return table


def _estimates_table(plan: Plan) -> Table:
    table = Table("estimate", "", show_header=False)
    stored = "kept" if plan.config.features_dir is not None else "if kept"
    table.add_row("trained parameters", f"{plan.parameters:,}")
    table.add_row(f"features on disk, {stored}", f"{plan.feature_bytes / 1e9:.2f} GB")
    table.add_row("checkpoint", f"{plan.checkpoint_bytes / 1e9:.2f} GB")
    table.add_row("matrix operations", f"{plan.operations:.2e}")
    table.add_row("measured rate", f"{plan.rate / 1e12:.3f} TFLOP/s")
    table.add_row("time, at least", f"{plan.floor_seconds / 60:.1f} min")
    return table
