"""`vllm-eagle3 convert`: the shipped head there and back, and what it says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from vllm_eagle3 import cli, embedded

TAPS = "eagle_aux_hidden_state_layer_ids"


def run(*arguments: str) -> int | str | None:
    with pytest.raises(SystemExit) as done:
        cli.main(["convert", *arguments])
    return done.value.code


def test_shipped_head_goes_there_and_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    there, back = tmp_path / "there", tmp_path / "back"
    assert run("smollm2", str(there), "--to", "specforge") == 0
    assert run(str(there), str(back), "--to", "safeailab") == 0
    assert "safeailab, from specforge" in capsys.readouterr().out
    config = json.loads((there / "config.json").read_text())
    # SpecForge and SGLang number a tap by the layer it leaves.
    assert config["eagle_config"][TAPS] == [i - 1 for i in config[TAPS]]
    stored = load_file(embedded.head_path("smollm2") / "model.safetensors")
    again = load_file(back / "model.safetensors")
    assert stored.keys() == again.keys()
    assert all(torch.equal(stored[name], again[name]) for name in stored)


def test_unknown_layout_is_refused_with_the_known_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("smollm2", str(tmp_path / "out"), "--to", "gguf") == 2
    assert "safeailab" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
