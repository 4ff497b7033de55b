"""States captured in the worker are those of a plain forward of the target."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.models import random_llama
from vllm_eagle3.engine import EngineMode, EngineSpec

pytestmark = pytest.mark.engine


def test_states_are_those_of_transformers(
    models: Callable[[str], Path], tmp_path: Path
) -> None:
    pytest.importorskip("vllm")
    from transformers import AutoModelForCausalLM

    from vllm_eagle3.integration.engine import VllmEngine

    engine = VllmEngine(
        EngineSpec(
            str(models("f1")),
            str(models("h1")),
            num_speculative_tokens=1,
            dtype="float32",
            max_model_len=512,
            mode=EngineMode(enforce_eager=True, threads=1),
            options={"shape": "off"},
        )
    )
    prompts = random_llama.known_prompts()
    path = tmp_path / "states.safetensors"
    engine.capture(prompts, path)
    # The engine computes no drafts, and generates as before.
    assert engine.metrics().drafts == 0
    captured = load_file(path)
    assert len(captured) == 2 * len(prompts)
    model: Any = AutoModelForCausalLM.from_pretrained(models("f1"), dtype=torch.float32)
    for number, ids in enumerate(prompts):
        with torch.no_grad():
            states = model(torch.tensor([ids]), output_hidden_states=True).hidden_states
        taps = torch.cat([states[i][0] for i in random_llama.TAP_IDS], -1)
        for name, wanted in {"taps": taps, "last": states[-1][0]}.items():
            got = captured[f"{number}.{name}"]
            torch.testing.assert_close(got, wanted, atol=2e-3, rtol=2e-3)
    engine.close()
