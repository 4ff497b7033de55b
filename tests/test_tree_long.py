"""A prompt of 6,000 tokens, read in chunks, with trees behind it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.near_ties import differing
from tests.tree_engine import run_counted, tree_settings

pytestmark = [pytest.mark.engine, pytest.mark.slow]

PROMPT, REPLY = 6000, 48


def _of_full_length(source: Path, folder: Path) -> Path:
    """The same model, made for long texts."""
    shutil.copytree(source, folder)
    config = json.loads((folder / "config.json").read_text())
    config["max_position_embeddings"] = 8192
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_long_prompt_gives_the_plain_text(
    engine: Any, models: Callable[[str], Path], tmp_path: Path
) -> None:
    from vllm import SamplingParams

    target, head = (_of_full_length(models(m), tmp_path / m) for m in ("f1", "h1"))
    draw = torch.Generator().manual_seed(6)
    prompts = [torch.randint(3, 512, (PROMPT + n,), generator=draw) for n in (0, 17)]
    prompts = [prompt.tolist() for prompt in prompts]

    def params(**settings: Any) -> Any:
        return SamplingParams(
            temperature=0,
            max_tokens=REPLY,
            ignore_eos=True,
            detokenize=False,
            **settings,
        )

    plain = engine(target, max_model_len=6400).run(prompts, params(logprobs=2))
    handle = engine(target, head, max_model_len=6400, **tree_settings(4, 6, 16))
    run, commits = run_counted(handle, prompts, params())
    assert not differing(plain, run.token_ids)
    assert run.accepted > 0
    assert commits.trees > 0
