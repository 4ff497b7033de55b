"""Heads that differ from ours and work as their checkpoint means them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.models.head_fixtures import SaveHead
from tests.models.head_variants import (
    HIDDEN,
    TARGET_CONFIG,
    VARIANTS,
    VOCAB,
    assert_same_head,
    edit_head,
    make_head,
    write_small_target,
)
from vllm_eagle3.head_io import (
    check_head,
    convert_head,
    fit_head,
    read_head,
    require_fitting_head,
    serving_overrides,
    write_head,
)
from vllm_eagle3.vocab import DraftVocab

TAPS = "eagle_aux_hidden_state_layer_ids"


# ---- differences that work as the checkpoint means them


def test_fitting_head_has_no_doubts(small_target: Path, save_head: SaveHead) -> None:
    assert {f.severity for f in check_head(save_head(), small_target)} == {"ok"}


WORKING: dict[str, tuple[dict[str, Any], str, str]] = {
    "no architecture": ({"drop": ("architectures",)}, "warning", "architectures"),
    "unusual architecture": (
        {"config": {"architectures": ["Qwen2ForCausalLMEagle3"]}},
        "warning",
        "architectures",
    ),
    "tied flag": (
        {"config": {"tie_word_embeddings": True}},
        "warning",
        "tie_word_embeddings",
    ),
    "fewer positions": (
        {"config": {"max_position_embeddings": 128}},
        "warning",
        "max_position_embeddings",
    ),
    "another rope": (
        {"config": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}},
        "warning",
        "rope_parameters",
    ),
    "own embedding": (
        {"tensors": {"embed_tokens.weight": torch.ones(VOCAB, HIDDEN)}},
        "warning",
        "embed_tokens.weight",
    ),
    "lm_head of the target": ({"drop": ("lm_head.weight",)}, "ok", "lm_head.weight"),
    "half precision": (
        {"tensors": {"norm.weight": torch.ones(HIDDEN, dtype=torch.float16)}},
        "ok",
        "dtype",
    ),
}


@pytest.mark.parametrize("difference", WORKING)
def test_difference_is_noted_and_works(
    difference: str, small_target: Path, save_head: SaveHead
) -> None:
    edit, severity, field = WORKING[difference]
    folder = edit_head(save_head(), **edit)
    require_fitting_head(folder, small_target)
    noted = {(f.severity, f.field) for f in check_head(folder, small_target)}
    assert (severity, field) in noted
    assert read_head(folder, small_target).head is not None


@pytest.mark.parametrize(
    ("variant", "switch"),
    [
        ("norm_before_fc", "norm_before_fc"),
        ("fc_norm", "fc_norm"),
        ("attention_bias", "attention_bias"),
    ],
)
def test_unwritten_switch_follows_its_weights(
    variant: str, switch: str, small_target: Path, save_head: SaveHead
) -> None:
    folder = edit_head(save_head(variant), drop=(switch,))
    assert serving_overrides(folder, small_target)[switch] is True
    assert_same_head(
        read_head(folder, small_target).head, make_head(**VARIANTS[variant])[0]
    )


def test_nested_switch_counts(small_target: Path, save_head: SaveHead) -> None:
    nested = {"norm_before_fc": True}
    folder = edit_head(save_head("norm_before_fc"), config={"eagle_config": nested})
    edit_head(folder, drop=("norm_before_fc",))
    assert read_head(folder, small_target).config.norm_before_fc


def test_zero_map_of_a_full_vocabulary_is_the_identity(
    small_target: Path, save_head: SaveHead
) -> None:
    zeros = torch.zeros(VOCAB, dtype=torch.int64)
    folder = edit_head(save_head(), tensors={"d2t": zeros})
    assert read_head(folder, small_target).vocab.is_full
    require_fitting_head(folder, small_target)


def test_zero_map_confirmed_by_the_mask_works(
    tmp_path: Path, small_target: Path
) -> None:
    head, _ = make_head(draft_vocab_size=40)
    write_head(tmp_path / "head", head, DraftVocab(torch.arange(40), VOCAB))
    assert len(read_head(tmp_path / "head", small_target).vocab) == 40
    findings = check_head(tmp_path / "head", small_target)
    assert ("warning", "d2t") in {(f.severity, f.field) for f in findings}


def test_vocabulary_size_settled_by_the_mask(
    small_target: Path, save_head: SaveHead
) -> None:
    folder = edit_head(save_head("reduced_vocab"), config={"vocab_size": 40})
    assert read_head(folder, small_target).config.vocab_size == VOCAB
    assert serving_overrides(folder, small_target)["vocab_size"] == VOCAB


@pytest.mark.parametrize("tied", [False, True])
def test_missing_lm_head_is_the_targets(
    tied: bool, tmp_path: Path, save_head: SaveHead
) -> None:
    small_target = write_small_target(tmp_path / "t", tie_word_embeddings=tied)
    name = "model.embed_tokens.weight" if tied else "lm_head.weight"
    folder = edit_head(save_head(), drop=("lm_head.weight",))
    expected = load_file(small_target / "model.safetensors")[name]
    assert torch.equal(read_head(folder, small_target).head.lm_head.weight, expected)
    with pytest.raises(ValueError, match="give the target's folder"):
        read_head(folder, TARGET_CONFIG)


# ---- which layers: the two conventions


def nested_only(ids: list[int]) -> dict[str, Any]:
    return {"config": {"eagle_config": {TAPS: ids}}, "drop": (TAPS,)}


@pytest.mark.parametrize(
    ("architecture", "stored", "meant"),
    [
        ("LlamaForCausalLMEagle3", [1, 3, 4], (2, 4, 5)),  # SpecForge: outputs
        ("LlamaForCausalLMEagle3", [0, 3, 6], (1, 4, 7)),
        ("LlamaForCausalLMEagle3", [2, 4, 5], (2, 4, 5)),  # the published inputs
        ("LlamaForCausalLM", [1, 3, 4], (1, 3, 4)),  # SafeAILab: inputs
    ],
)
def test_nested_ids_follow_the_checkpoints_convention(
    architecture: str,
    stored: list[int],
    meant: tuple[int, ...],
    small_target: Path,
    save_head: SaveHead,
) -> None:
    folder = edit_head(save_head(), **nested_only(stored))
    edit_head(folder, config={"architectures": [architecture]})
    assert read_head(folder, small_target).config.tap_ids == meant
    overrides = serving_overrides(folder, small_target)
    assert overrides[TAPS] == overrides["eagle_config"][TAPS] == list(meant)
    assert overrides["num_aux_hidden_states"] == len(meant)


# ---- serving overrides


def test_overrides_extend_positions_to_the_targets(
    small_target: Path, save_head: SaveHead
) -> None:
    folder = edit_head(save_head(), config={"max_position_embeddings": 128})
    assert serving_overrides(folder, small_target)["max_position_embeddings"] == 1024
    edit_head(folder, config={"max_position_embeddings": 4096})
    assert serving_overrides(folder, small_target)["max_position_embeddings"] == 4096


def test_overrides_settle_the_speculators_default(
    small_target: Path, save_head: SaveHead
) -> None:
    folder = edit_head(
        save_head("plain", "speculators"), drop=("norm_before_residual",)
    )
    assert serving_overrides(folder, small_target)["norm_before_residual"] is False


def test_target_may_be_a_config(small_target: Path, save_head: SaveHead) -> None:
    folder = save_head("everything")
    assert serving_overrides(folder, TARGET_CONFIG) == serving_overrides(
        folder, small_target
    )


# ---- heads of another kind


FOREIGN: dict[str, dict[str, Any]] = {
    "parallel drafting": {"config": {"mask_token_id": 5}},
    "head without taps": {"config": {"eagle_config": {"use_aux_hidden_state": False}}},
    "normed queries": {"tensors": {"midlayer.self_attn.q_norm.weight": torch.ones(32)}},
    "quantised": {"config": {"quantization_config": {"quant_method": "fp8"}}},
    "sliding window": {"config": {"layer_types": ["sliding_attention"]}},
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_head_of_another_kind_is_told_from_a_broken_one(
    kind: str, small_target: Path, save_head: SaveHead
) -> None:
    folder = edit_head(save_head(), **FOREIGN[kind])
    fit = fit_head(folder, small_target)
    assert fit.foreign and not fit.fields
    for refuse in (require_fitting_head, serving_overrides):
        with pytest.raises(ValueError, match="cannot be used"):
            refuse(folder, small_target)


def test_head_without_architectures_is_not_foreign(
    small_target: Path, save_head: SaveHead
) -> None:
    folder = edit_head(save_head("reduced_vocab"), drop=("architectures",))
    fit = fit_head(folder, small_target)
    assert fit.foreign == "" and fit.fields["architectures"]
    assert [f.field for f in fit.warnings] == ["architectures"]


@pytest.mark.parametrize("dropped", ["fc.weight", "lm_head.weight"])
def test_incomplete_head_is_broken_not_foreign(
    dropped: str, small_target: Path, save_head: SaveHead
) -> None:
    folder = edit_head(save_head("reduced_vocab"), drop=(dropped,))
    with pytest.raises(ValueError, match=f"{dropped}: missing"):
        fit_head(folder, small_target)


# ---- what stops vLLM itself


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        ({"drop": ("model_type",)}, "model_type: not written"),
        (
            {"config": {"layer_types": ["full_attention"] * 2}},
            "layer_types: 2 entries for 1 draft layers",
        ),
    ],
)
def test_config_that_vllm_cannot_read_is_sent_to_convert(
    edit: dict[str, Any],
    message: str,
    tmp_path: Path,
    small_target: Path,
    save_head: SaveHead,
) -> None:
    folder = edit_head(save_head(), **edit)
    with pytest.raises(ValueError, match=message):
        require_fitting_head(folder, small_target)
    convert_head(folder, tmp_path / "converted", "safeailab", small_target)
    require_fitting_head(tmp_path / "converted", small_target)
