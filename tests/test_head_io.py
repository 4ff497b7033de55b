"""Round trips, what is written, and embeddings that a checkpoint carries."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.models.head_fixtures import SaveHead
from tests.models.head_variants import (
    HIDDEN,
    TARGET_CONFIG,
    VARIANTS,
    VOCAB,
    assert_same_head,
    edit_head,
    make_head,
)
from vllm_eagle3.head_io import (
    check_head,
    convert_head,
    read_head,
    write_head,
)
from vllm_eagle3.head_layouts import LAYOUTS
from vllm_eagle3.vocab import DraftVocab

TAPS = "eagle_aux_hidden_state_layer_ids"


def config_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


# ---- round trips


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_round_trip(
    variant: str, layout: str, small_target: Path, save_head: SaveHead
) -> None:
    head, vocab = make_head(**VARIANTS[variant])
    loaded = read_head(save_head(variant, layout), small_target)
    assert loaded.layout == layout
    assert loaded.config == head.config
    assert torch.equal(loaded.vocab.to_target_ids, vocab.to_target_ids)
    assert_same_head(loaded.head, head)


@pytest.mark.parametrize("source", LAYOUTS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_convert_keeps_the_head(
    source: str, layout: str, tmp_path: Path, small_target: Path, save_head: SaveHead
) -> None:
    folder = save_head("reduced_vocab", source)
    convert_head(folder, tmp_path / "converted", layout, small_target)
    loaded = read_head(tmp_path / "converted", small_target)
    assert loaded.layout == layout
    assert loaded.provenance["converted_from"] == source
    assert_same_head(loaded.head, make_head(**VARIANTS["reduced_vocab"])[0])
    convert_head(tmp_path / "converted", tmp_path / "back", source, small_target)
    there, back = (
        load_file(f / "model.safetensors") for f in (folder, tmp_path / "back")
    )
    assert there.keys() == back.keys()
    assert all(torch.equal(there[name], back[name]) for name in there)
    before, after = config_of(folder), config_of(tmp_path / "back")
    assert before.pop("vllm_eagle3") != after.pop("vllm_eagle3")
    assert before == after


EXPRESSIBLE = {
    "plain": LAYOUTS,
    "norm_before_residual": ("speculators",),
    "norm_before_fc": ("speculators",),
    "fc_norm": ("specforge", "speculators"),
    "norm_output": ("specforge", "speculators"),
    "two_layers": ("speculators",),
    "attention_bias": ("speculators",),
    "logit_scale": (),
    "five_taps": ("specforge", "speculators"),
    "head_dim": ("specforge", "speculators"),
    "linear_rope": LAYOUTS,
    "llama3_rope": ("specforge", "speculators"),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("variant", EXPRESSIBLE)
def test_convert_refuses_what_the_layouts_program_would_ignore(
    variant: str, layout: str, tmp_path: Path, small_target: Path, save_head: SaveHead
) -> None:
    folder = save_head(variant, "speculators")
    if layout in EXPRESSIBLE[variant]:
        convert_head(folder, tmp_path / "converted", layout, small_target)
        loaded = read_head(tmp_path / "converted", small_target)
        assert_same_head(loaded.head, make_head(**VARIANTS[variant])[0])
        return
    field = {"two_layers": "num_hidden_layers", "five_taps": "taps"}.get(
        variant, variant
    )
    field = "rope_type" if "rope" in field else field
    with pytest.raises(ValueError, match=f"{layout} cannot express {field}"):
        convert_head(folder, tmp_path / "converted", layout, small_target)
    assert not (tmp_path / "converted").exists()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_read_keeps_the_stored_dtype(
    dtype: torch.dtype, tmp_path: Path, small_target: Path
) -> None:
    head, vocab = make_head()
    write_head(tmp_path / "head", head.to(dtype), vocab)
    assert read_head(tmp_path / "head", small_target).head.fc.weight.dtype == dtype
    asked = read_head(tmp_path / "head", small_target, dtype=torch.float32)
    assert_same_head(asked.head, head.to(torch.float32))


def test_sharded_weights_are_read(small_target: Path, save_head: SaveHead) -> None:
    folder = save_head()
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = {name: f"part{i % 2}.safetensors" for i, name in enumerate(weights)}
    for part in set(names.values()):
        chosen = {n: w for n, w in weights.items() if names[n] == part}
        save_file(chosen, folder / part)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": names}))
    assert_same_head(read_head(folder, small_target).head, make_head()[0])
    (folder / "part1.safetensors").unlink()
    with pytest.raises(ValueError, match=r"part1\.safetensors.*fetch the missing"):
        read_head(folder, small_target)


# ---- what is written


def test_written_config_leaves_nothing_to_defaults(
    save_head: SaveHead,
) -> None:
    config = config_of(save_head("five_taps"))
    ids = [0, 2, 4, 5, 8]
    assert config[TAPS] == config["eagle_config"][TAPS] == ids
    assert config["num_aux_hidden_states"] == 5
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["tie_word_embeddings"] is False
    assert config["draft_vocab_size"] == VOCAB
    assert config["max_position_embeddings"] == 1024
    assert config["rope_parameters"] == TARGET_CONFIG["rope_parameters"]
    assert config["rope_theta"] == 50000.0
    for switch in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"):
        assert config[switch] is False


@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_embedding_is_written(layout: str, save_head: SaveHead) -> None:
    names = load_file(save_head("reduced_vocab", layout) / "model.safetensors")
    assert {"d2t", "t2d"} < set(names)
    assert not [n for n in names if "embed" in n]


def test_full_vocabulary_has_no_map(save_head: SaveHead) -> None:
    assert not {"d2t", "t2d"} & set(load_file(save_head() / "model.safetensors"))


def test_specforge_ids_are_written_one_lower(save_head: SaveHead) -> None:
    config = config_of(save_head("plain", "specforge"))
    assert config[TAPS] == [2, 4, 5]
    assert config["eagle_config"][TAPS] == [1, 3, 4]


def test_provenance_is_kept(tmp_path: Path, small_target: Path) -> None:
    head, vocab = make_head()
    write_head(tmp_path / "head", head, vocab, extra={"step": 7})
    assert read_head(tmp_path / "head", small_target).provenance["step"] == 7


def test_write_replaces_a_head_whole(tmp_path: Path, small_target: Path) -> None:
    folder = tmp_path / "head"
    write_head(folder, *make_head(**VARIANTS["reduced_vocab"]))
    write_head(folder, *make_head())
    assert read_head(folder, small_target).vocab.is_full
    assert [p.name for p in tmp_path.iterdir()] == ["head"]


def test_interrupted_write_leaves_the_old_head(
    tmp_path: Path, small_target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "head"
    write_head(folder, *make_head())

    def no_space(*_: Any, **__: Any) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr("vllm_eagle3.head_files.save_file", no_space)
    with pytest.raises(OSError, match="No space"):
        write_head(folder, *make_head(norm_output=True))
    assert read_head(folder, small_target).config.norm_output is False
    assert [p.name for p in tmp_path.iterdir()] == ["head"]


def test_write_refuses_to_delete_other_files(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(ValueError, match=r"thesis\.tex"):
        write_head(tmp_path, *make_head())


def test_write_refuses_a_foreign_vocabulary(tmp_path: Path) -> None:
    head, _ = make_head()
    with pytest.raises(ValueError, match="maps 3 of 96 ids, the head scores 96"):
        write_head(tmp_path / "head", head, DraftVocab(torch.arange(3), VOCAB))
    assert not (tmp_path / "head").exists()


def test_write_refuses_another_target(tmp_path: Path) -> None:
    other = TARGET_CONFIG | {"hidden_size": 64}
    with pytest.raises(ValueError, match="target_hidden_size"):
        write_head(tmp_path / "head", *make_head(), target_config=other)


def test_unknown_layout_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"want one of.*speculators"):
        write_head(tmp_path / "head", *make_head(), layout="gguf")


# ---- embeddings in the checkpoint


def test_embedding_equal_to_the_targets_is_left_out(
    tmp_path: Path, small_target: Path, save_head: SaveHead
) -> None:
    shared = load_file(small_target / "model.safetensors")["model.embed_tokens.weight"]
    stored = {"embed_tokens.weight": shared.to(torch.bfloat16)}
    folder = edit_head(save_head(), tensors=stored)
    findings = check_head(folder, small_target)
    assert ("ok", "embed_tokens.weight") in {(f.severity, f.field) for f in findings}
    convert_head(folder, tmp_path / "converted", "safeailab", small_target)
    assert read_head(tmp_path / "converted", small_target).embed_tokens is None
    with pytest.raises(ValueError, match="give the target's folder"):
        convert_head(folder, tmp_path / "blind", "safeailab", TARGET_CONFIG)


def test_own_embedding_is_never_lost(
    tmp_path: Path, small_target: Path, save_head: SaveHead
) -> None:
    own = {"embed_tokens.weight": torch.ones(VOCAB, HIDDEN)}
    folder = edit_head(save_head(), tensors=own)
    loaded = read_head(folder, small_target)
    assert loaded.embed_tokens is not None
    assert torch.equal(loaded.embed_tokens, own["embed_tokens.weight"])
    with pytest.raises(ValueError, match="would change the head"):
        convert_head(folder, tmp_path / "converted", "safeailab", small_target)
    assert not (tmp_path / "converted").exists()
