"""Training runs on tiny targets, for the tests."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from tests.models import random_llama
from vllm_eagle3.train.config import TrainConfig, validate

Models = Callable[[str], Path]


def write_rows(
    models: Models,
    path: Path,
    prompts: Sequence[Sequence[int]] = tuple(random_llama.known_prompts()[:6]),
    repeats: int = 3,
) -> Path:
    """F1's own greedy replies as a row file."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(models("f1"), dtype=torch.float32)
    lines = []
    for prompt in prompts:
        ids = model.generate(
            torch.tensor([list(prompt)]), max_new_tokens=24, do_sample=False
        )[0].tolist()
        spans = [[len(prompt), len(ids), 0.0]]
        lines.append(json.dumps({"kind": "x", "ids": ids, "spans": spans}) + "\n")
    path.write_text("".join(lines * repeats))
    return path


def values(models: Models, rows: Path, out: Path, **changes: Any) -> dict[str, Any]:
    """A small run as its YAML would say it."""
    return {
        "target": str(models("f1")),
        "rows": [str(rows)],
        "out": str(out),
        "draft_vocab_size": 256,
        "taps": [1, 3, 5],
        "num_steps": 3,
        "epochs": 6.0,
        "learning_rate": 3e-3,
        "tokens_per_batch": 512,
        "held_out_rows": 3,
        "evaluate_every": 6,
        "device": "cpu",
        "parity_rows": 0,
    } | changes


def config(models: Models, rows: Path, out: Path, **changes: Any) -> TrainConfig:
    return validate(values(models, rows, out, **changes), "test")
