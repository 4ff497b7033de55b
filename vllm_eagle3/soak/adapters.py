"""LoRA adapters with random weights: enough to change a target's text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

RANK = 4
_GAIN = 0.3  # root mean square of what the adapter adds to a unit input
_CONFIG = {
    "peft_type": "LORA",
    "r": RANK,
    "lora_alpha": RANK,
    "bias": "none",
    "target_modules": ["q_proj", "v_proj"],
}


def write_adapter(folder: Path, target: Path, seed: int) -> None:
    """Write an adapter of the query and value projections of a Llama-type target."""
    config = json.loads((target / "config.json").read_text("utf-8"))
    generator = torch.Generator().manual_seed(seed)
    weights: dict[str, torch.Tensor] = {}
    for layer in range(config["num_hidden_layers"]):
        for name, width in _widths(config).items():
            module = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            down = torch.randn(RANK, config["hidden_size"], generator=generator)
            up = torch.randn(width, RANK, generator=generator)
            weights[f"{module}.lora_A.weight"] = down / config["hidden_size"] ** 0.5
            weights[f"{module}.lora_B.weight"] = up * (_GAIN / RANK**0.5)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(_CONFIG), "utf-8")
    save_file(weights, folder / "adapter_model.safetensors")


def _widths(config: dict[str, Any]) -> dict[str, int]:
    heads = config["num_attention_heads"]
    size = config.get("head_dim") or config["hidden_size"] // heads
    return {
        "q_proj": heads * size,
        "v_proj": (config.get("num_key_value_heads") or heads) * size,
    }
