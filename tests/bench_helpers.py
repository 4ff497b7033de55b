"""A folder that looks like a target, and options that fit it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.models.shapes import byte_tokenizer
from vllm_eagle3.bench.methods import Method
from vllm_eagle3.bench.plan import BenchOptions, Setting
from vllm_eagle3.bench.process import Timed

CONTEXT = 256


def fake_target(folder: Path, context: int = CONTEXT) -> Path:
    """Only what a plan reads: config and tokenizer."""
    folder.mkdir()
    config = {"model_type": "llama", "max_position_embeddings": context}
    (folder / "config.json").write_text(json.dumps(config))
    byte_tokenizer(300).save_pretrained(folder)
    return folder


def fake_head(folder: Path) -> Path:
    """The name of the folder tells `tests.fake_engine` what to do."""
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


def fake_options(
    folder: Path, behaviour: str = "right", **changes: Any
) -> BenchOptions:
    """Options over a fake target and head made in `folder`."""
    prompts = folder / "prompts.txt"
    prompts.write_text("one\nfour\nthree\n")
    options: dict[str, Any] = {
        "target": str(fake_target(folder / "target")),
        "head": str(fake_head(folder / behaviour)),
        "prompts": (str(prompts),),
        "out": folder / "out",
        "methods": "off,chain:2",
        "controls": False,
        "max_tokens": 6,
        "max_model_len": CONTEXT,
    }
    return BenchOptions(**{**options, **changes})


class Recorder:
    """A `Watcher` that keeps what it is told."""

    def __init__(self) -> None:
        self.order: list[str] = []
        self.started_methods: list[str] = []
        self.settings: list[Setting] = []
        self.checked = 0

    def started(self, method: Method, seconds: float) -> None:
        self.started_methods.append(method.name)

    def entering(self, setting: Setting) -> None:
        self.settings.append(setting)

    def measured(self, method: Method, timed: Timed) -> None:
        self.order.append(method.name)

    def checking(self, num_requests: int) -> None:
        self.checked += num_requests
