from __future__ import annotations

from typing import Any

import pytest

from tests.models.head_variants import (
    HIDDEN,
    TARGET_CONFIG,
    VOCAB,
)
from vllm_eagle3.head_io import (
    head_config_for_target,
)


def test_config_comes_from_the_target() -> None:
    config = head_config_for_target(TARGET_CONFIG, 40, fc_norm=True)
    assert (config.hidden_size, config.draft_vocab_size) == (HIDDEN, 40)
    assert config.tap_ids == (2, 4, 5)
    assert config.max_position_embeddings == 1024
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 50000.0}
    assert config.rms_norm_eps == 1e-5
    assert config.fc_norm and not config.norm_output


def test_multimodal_target_and_old_rope_spelling() -> None:
    text = {k: v for k, v in TARGET_CONFIG.items() if k != "rope_parameters"}
    scaling = {"type": "linear", "factor": 2.0}
    text |= {
        "rope_theta": 1e6,
        "rope_scaling": scaling,
        "max_position_embeddings": 4096,
    }
    config = head_config_for_target({"text_config": text}, VOCAB)
    assert config.max_position_embeddings == 4096
    assert config.rope_parameters == {
        "rope_type": "linear",
        "factor": 2.0,
        "rope_theta": 1e6,
    }


@pytest.mark.parametrize("num_layers", [1, 2, 3, 4])
def test_few_layer_targets(num_layers: int) -> None:
    config = TARGET_CONFIG | {"num_hidden_layers": num_layers}
    taps = head_config_for_target(config, VOCAB).tap_ids
    assert len(taps) == min(3, num_layers) and taps[-1] <= num_layers


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"draft_vocab_size": 0}, "draft_vocab_size: got 0"),
        ({"draft_vocab_size": 97}, "draft_vocab_size: got 97"),
        ({"tap_ids": (1, 9)}, "for a target of 8 layers"),
        ({"fc_nrom": True}, r"unknown \['fc_nrom'\]"),
    ],
)
def test_head_config_refuses(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        head_config_for_target(TARGET_CONFIG, **({"draft_vocab_size": 8} | arguments))


def test_head_config_names_the_missing_field() -> None:
    with pytest.raises(ValueError, match="hidden_size: missing in the target's"):
        head_config_for_target({"vocab_size": 9, "num_hidden_layers": 3}, 9)
