"""Every fault is refused by name, by loading, checking and serving alike."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models.head_fixtures import SaveHead
from tests.models.head_variants import (
    HIDDEN,
    TARGET_CONFIG,
    VOCAB,
    edit_head,
)
from vllm_eagle3.draft_head import Eagle3DraftHead
from vllm_eagle3.head_io import (
    head_config_for_target,
    read_head,
    require_fitting_head,
    serving_overrides,
    write_head,
)
from vllm_eagle3.vocab import DraftVocab

TAPS = "eagle_aux_hidden_state_layer_ids"
Q_PROJ = "midlayer.self_attn.q_proj.weight"


# ---- faults that are refused: how the head is made, and what the message says

REDUCED = {"variant": "reduced_vocab"}
FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "reduced vocabulary without map": (
        REDUCED | {"drop": ("d2t",)},
        "d2t: missing, but the head scores 40 of 96",
    ),
    "map of wrong length": (
        REDUCED | {"tensors": {"d2t": torch.zeros(39, dtype=torch.int64)}},
        r"d2t: got torch.int64 \[39\], want int64 \[40\]",
    ),
    "map of floats": (
        REDUCED | {"tensors": {"d2t": torch.zeros(40)}},
        "d2t: got torch.float32",
    ),
    "map of zeros": (
        REDUCED
        | {"tensors": {"d2t": torch.zeros(40, dtype=torch.int64)}, "drop": ("t2d",)},
        "d2t: all zeros: the head's tokens would be the ids 0..39",
    ),
    "maps that disagree": (
        REDUCED | {"tensors": {"d2t": torch.full((40,), 3)}},
        "d2t and t2d name different token ids",
    ),
    "mask of another vocabulary": (
        REDUCED | {"tensors": {"t2d": torch.ones(95, dtype=torch.bool)}},
        r"t2d: got \[95\], want \[96\]",
    ),
    "map that leaves the vocabulary": (
        REDUCED | {"tensors": {"d2t": torch.full((40,), 60)}},
        "d2t: .*leave the target's range",
    ),
    "full vocabulary with offsets": (
        {"tensors": {"d2t": torch.ones(VOCAB, dtype=torch.int64)}},
        "d2t: .*leave the target's range",
    ),
    "draft vocabulary above the target's": (
        {"config": {"draft_vocab_size": 97}},
        "draft_vocab_size: got 97, want at most the target's 96",
    ),
    "unused weight": (
        {"tensors": {"midlayer.mlp_norm.weight": torch.ones(32)}},
        "layers.0.mlp_norm.weight: unused",
    ),
    "missing weight": (
        {"drop": ("midlayer.hidden_norm.weight",)},
        "layers.0.hidden_norm.weight: missing",
    ),
    "second layer missing": (
        {"config": {"num_hidden_layers": 2}},
        "layers.1.mlp.up_proj.weight: missing",
    ),
    "second layer unused": (
        {"variant": "two_layers", "config": {"num_hidden_layers": 1}},
        "layers.1.mlp.up_proj.weight: unused",
    ),
    "misshapen weight": (
        {"tensors": {Q_PROJ: torch.zeros(128, 128)}},
        r"q_proj.weight: got \[128, 128\], want \[128, 256\]",
    ),
    "diverged weight": (
        {"tensors": {"norm.weight": torch.full((HIDDEN,), float("nan"))}},
        "norm.weight: holds NaN",
    ),
    "quantised weight": (
        {"tensors": {Q_PROJ: torch.zeros(128, 256, dtype=torch.int8)}},
        "q_proj.weight: got torch.int8",
    ),
    "norm switch without its weight": (
        {"config": {"norm_before_fc": True}},
        "input_norm.weight: missing",
    ),
    "per-tap norm switch without weights": (
        {"config": {"fc_norm": True}},
        "fc_norm.2.weight: missing",
    ),
    "norm weight against its switch": (
        {"variant": "norm_before_fc", "config": {"norm_before_fc": False}},
        "norm_before_fc: config.json says false, but the checkpoint holds",
    ),
    "unknown switch": (
        {"config": {"norm_before_lunch": True}},
        "norm_before_lunch: unknown switch",
    ),
    "unknown nested switch": (
        {"config": {"eagle_config": {"use_magic": True}}},
        "use_magic: unknown switch",
    ),
    "bias of the output projection missing": (
        {
            "variant": "attention_bias",
            "drop": ("midlayer.self_attn.o_proj.bias",),
        },
        "o_proj.bias: missing, but attention_bias gives.*store zeros",
    ),
    "biases in the MLP": ({"config": {"mlp_bias": True}}, "mlp_bias: got True"),
    "another activation": ({"config": {"hidden_act": "gelu"}}, "hidden_act: got"),
    "sliding window": (
        {"config": {"layer_types": ["sliding_attention"]}},
        "layer_types: got sliding_attention",
    ),
    "head without taps": (
        {"config": {"eagle_config": {"use_aux_hidden_state": False}}},
        "use_aux_hidden_state: got False",
    ),
    "parallel drafting": ({"config": {"mask_token_id": 5}}, "mask_token_id: got 5"),
    "scaling that no head has": (
        {"config": {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}},
        "rope_type: got 'dynamic'",
    ),
    "too few taps for fc": (
        {"config": {TAPS: [1, 2], "eagle_config": None}},
        "fc.weight: reads 384 features, but 2 taps",
    ),
    "tap outside the target": (
        {"config": {TAPS: [1, 2, 9], "eagle_config": None}},
        r"taps: got \[1, 2, 9\] for a target of 8 layers",
    ),
    "negative tap": (
        {"config": {TAPS: [-1, 2, 5], "eagle_config": None}},
        "taps: got",
    ),
    "repeated tap": (
        {"config": {TAPS: [2, 3, 3], "eagle_config": None}},
        "taps: got .*drops repeats",
    ),
    "unsorted taps": (
        {"config": {TAPS: [5, 4, 2], "eagle_config": None}},
        "taps: got .*sorts ids",
    ),
    "taps that disagree": (
        {"config": {TAPS: [2, 3, 5]}},
        "top level says .* eagle_config",
    ),
    "taps that are no integers": (
        {"config": {TAPS: "2,4,5"}},
        "want a list of integers",
    ),
    "vocabulary of another target": (
        {"config": {"vocab_size": 95}},
        "vocab_size: the head says 95, the target 96",
    ),
    "missing field": (
        {"drop": ("num_attention_heads",)},
        "num_attention_heads: missing in the head's config.json",
    ),
    "field of wrong type": (
        {"config": {"hidden_size": "128"}},
        "hidden_size: got '128', want a positive integer",
    ),
    "indivisible heads": (
        {"config": {"num_key_value_heads": 3}},
        "num_key_value_heads: got 3, want a divisor of 4",
    ),
    "part of the config that is no object": (
        {"config": {"eagle_config": 7}},
        "eagle_config: got 7, want an object",
    ),
    "reduced vocabulary without lm_head": (
        REDUCED | {"drop": ("lm_head.weight",)},
        "lm_head.weight: missing, and the target's lm_head scores 96",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_refused_by_name(
    fault: str, small_target: Path, save_head: SaveHead
) -> None:
    case, message = FAULTS[fault]
    folder = save_head(case.get("variant", "plain"))
    edit = {k: v for k, v in case.items() if k != "variant"}
    edit_head(folder, **edit)
    for refuse in (read_head, require_fitting_head, serving_overrides):
        with pytest.raises(ValueError, match=message):
            refuse(folder, small_target)


def test_all_errors_are_named_together(small_target: Path, save_head: SaveHead) -> None:
    folder = edit_head(save_head("reduced_vocab"), drop=("d2t", "fc.weight"))
    with pytest.raises(ValueError, match="cannot be used") as caught:
        require_fitting_head(folder, small_target)
    assert "d2t: missing" in str(caught.value)
    assert "fc.weight: missing" in str(caught.value)


# ---- faults that need the target


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hidden_size": 64}, "target_hidden_size: the head reads features of width"),
        ({"vocab_size": 100}, "vocab_size: the head says 96, the target 100"),
        ({"num_hidden_layers": 4}, "for a target of 4 layers"),
    ],
)
def test_head_of_another_target(
    fields: dict[str, Any], message: str, save_head: SaveHead
) -> None:
    with pytest.raises(ValueError, match=message):
        require_fitting_head(save_head(), TARGET_CONFIG | fields)


def test_head_narrower_than_its_target_needs_an_embedding(
    tmp_path: Path, save_head: SaveHead
) -> None:
    head = Eagle3DraftHead(
        head_config_for_target(TARGET_CONFIG, VOCAB, target_hidden_size=64)
    )
    write_head(tmp_path / "head", head, DraftVocab.full(VOCAB))
    with pytest.raises(ValueError, match="stores none of its own"):
        require_fitting_head(tmp_path / "head", TARGET_CONFIG | {"hidden_size": 64})


def test_taps_not_written_follow_the_target(save_head: SaveHead) -> None:
    folder = edit_head(save_head(), drop=(TAPS, "eagle_config"))
    assert read_head(folder, TARGET_CONFIG).config.tap_ids == (2, 4, 5)
    shallow = read_head(folder, TARGET_CONFIG | {"num_hidden_layers": 6})
    assert shallow.config.tap_ids == (1, 3, 6)
    assert any("gives no three layers for a target of 6" in n for n in shallow.notes)
    with pytest.raises(ValueError, match="reads 384 features, but 2 taps"):
        read_head(folder, TARGET_CONFIG | {"num_hidden_layers": 2})
    with pytest.raises(ValueError, match="give the target's config too"):
        read_head(folder)


# ---- broken files


def break_nothing_but_remove(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def truncate(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def pickle_only(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def store_twice(folder: Path) -> None:
    (folder / "copy.safetensors").write_bytes(
        (folder / "model.safetensors").read_bytes()
    )


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (break_nothing_but_remove("config.json"), r"config\.json is missing"),
        (break_nothing_but_remove("model.safetensors"), r"holds no \*\.safetensors"),
        (truncate, "broken or cut short"),
        (pickle_only, "can run code.*convert them to safetensors"),
        (store_twice, "stored twice"),
        (lambda f: (f / "config.json").write_text("{"), "cannot be read as JSON"),
        (lambda f: (f / "config.json").write_text("[]"), "holds a list"),
        (lambda f: (f / "model.safetensors").write_bytes(b""), "broken or cut short"),
        (
            lambda f: (f / "model.safetensors.index.json").write_text("{}"),
            "is no weight index",
        ),
    ],
)
def test_broken_files(
    damage: Callable[[Path], None],
    message: str,
    small_target: Path,
    save_head: SaveHead,
) -> None:
    folder = save_head()
    damage(folder)
    for refuse in (read_head, require_fitting_head, serving_overrides):
        with pytest.raises(ValueError, match=message):
            refuse(folder, small_target)


def test_missing_folders(tmp_path: Path, save_head: SaveHead) -> None:
    with pytest.raises(ValueError, match=r"head: .*nowhere is no folder"):
        read_head(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"target: .*nowhere is no folder"):
        require_fitting_head(save_head(), tmp_path / "nowhere")
