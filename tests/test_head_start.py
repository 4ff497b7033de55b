"""What an engine's start makes of a head: warnings, one reading, refusals by name."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.bigram_heads import exact_head
from tests.engine_run import llm_settings
from tests.models.bigram import TAP_IDS, VOCAB, bigram_table
from tests.models.head_variants import edit_head
from tests.models.shapes import head_config
from vllm_eagle3.draft_head import Eagle3DraftHead
from vllm_eagle3.head_io import head_config_for_target, write_head
from vllm_eagle3.vocab import DraftVocab

pytest.importorskip("vllm")
pytestmark = pytest.mark.engine

Models = Callable[[str], Path]
TAPS = "eagle_aux_hidden_state_layer_ids"
FULL = DraftVocab.full(VOCAB)


# ---- warnings, one reading, copies


@pytest.fixture
def engine_config(models: Models) -> Callable[..., Any]:
    """engine_config(head, target="f2") -> VllmConfig, as an engine starts with it.

    More keywords are keys of `speculative_config`.
    """
    from vllm.engine.arg_utils import EngineArgs

    def create(
        head: Path, target: Path | None = None, ranks: int = 1, **speculation: Any
    ) -> Any:
        settings = llm_settings(
            str(target or models("f2")),
            str(head),
            speculation=speculation,
            tensor_parallel_size=ranks,
        )
        return EngineArgs(**settings).create_engine_config()

    return create


def test_a_head_made_for_a_target_has_its_positions(
    models: Models,
    engine_config: Callable[..., Any],
    tmp_path: Path,
    warnings: list[str],
) -> None:
    rope = {"rope_type": "linear", "rope_theta": 5e4, "factor": 4.0}
    fields = {"rope_parameters": rope, "max_position_embeddings": 4096}
    shutil.copytree(models("f2"), tmp_path / "target")
    edit_head(tmp_path / "target", config=fields, drop=("rope_theta",))
    target_config = json.loads((tmp_path / "target" / "config.json").read_text())
    head = Eagle3DraftHead(head_config_for_target(target_config, VOCAB))
    write_head(tmp_path / "head", head, FULL)
    made = engine_config(tmp_path / "head", tmp_path / "target")
    hf_config = made.speculative_config.draft_model_config.hf_config
    assert hf_config.max_position_embeddings == 4096
    assert hf_config.rope_parameters == rope
    assert not [m for m in warnings if "rope" in m or "position" in m]
    edit_head(tmp_path / "head", {"max_position_embeddings": 2048})
    made = engine_config(tmp_path / "head", tmp_path / "target")
    hf_config = made.speculative_config.draft_model_config.hf_config
    assert hf_config.max_position_embeddings == 4096
    assert [m for m in warnings if "max_position_embeddings: the head says 2048" in m]


def test_head_is_read_once_and_its_meaning_is_pickled(
    models: Models,
    engine_config: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from vllm_eagle3 import head_serving

    read: list[Path] = []
    stock = head_serving.read_head_files
    monkeypatch.setattr(
        head_serving, "read_head_files", lambda d: read.append(d) or stock(d)
    )
    config = engine_config(models("h2"))
    copy = pickle.loads(pickle.dumps(config.speculative_config))
    assert read == [models("h2")]
    hf_config = copy.draft_model_config.hf_config
    assert getattr(hf_config, TAPS) == [1, 2, 3]
    assert callable(copy.draft_model_config.hf_overrides)


def test_a_name_that_says_eagle3_needs_no_method(
    models: Models, engine_config: Callable[..., Any], tmp_path: Path
) -> None:
    shutil.copytree(models("h2"), tmp_path / "my-eagle3")
    edit_head(tmp_path / "my-eagle3", drop=("architectures",))
    config = engine_config(tmp_path / "my-eagle3", method=None)
    assert config.speculative_config.method == "eagle3"
    assert config.parallel_config.worker_cls.startswith("vllm_eagle3.")


# ---- refused at start, by name, with nothing started

Q_NORM = "midlayer.q_norm.weight"
REDUCED = torch.arange(80, 128)
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "reduced vocabulary without map": ({"drop": ("d2t",)}, "d2t: missing, but the"),
    "reduced vocabulary, zero map": (
        {"tensors": {"d2t": torch.zeros(48, dtype=torch.int64)}, "drop": ("t2d",)},
        "d2t: all zeros",
    ),
    "map of another head": (
        {"tensors": {"d2t": torch.zeros(47, dtype=torch.int64)}},
        r"d2t: got torch.int64 \[47\], want int64 \[48\]",
    ),
    "reduced vocabulary without lm_head": (
        {"drop": ("lm_head.weight",)},
        "lm_head.weight: missing, and the target's lm_head scores 128",
    ),
    "switch without its weight": (
        {"config": {"norm_before_fc": True}},
        "input_norm.weight: missing",
    ),
    "unknown switch": ({"config": {"norm_of_all": True}}, "norm_of_all: unknown"),
    "unused weight": ({"tensors": {Q_NORM: torch.ones(2)}}, "q_norm.weight: unused"),
    "tap outside the target": (
        {"config": {TAPS: [1, 2, 5], "eagle_config": None}},
        "for a target of 4 layers",
    ),
    "repeated tap": (
        {"config": {TAPS: [1, 2, 2], "eagle_config": None}},
        "vLLM drops repeats",
    ),
    "model type missing": ({"drop": ("model_type",)}, "model_type: not written"),
}


@pytest.mark.parametrize("fault", REFUSED)
def test_fault_is_refused_before_anything_starts(
    fault: str, engine_config: Callable[..., Any], tmp_path: Path
) -> None:
    edit, message = REFUSED[fault]
    vocab = DraftVocab(REDUCED, VOCAB)
    write_head(tmp_path / "head", exact_head(bigram_table(), vocab), vocab)
    edit_head(tmp_path / "head", **edit)
    with pytest.raises(ValueError, match=message):
        engine_config(tmp_path / "head")


SHARDS: dict[str, tuple[dict[str, int], int | None, str]] = {
    "heads": (
        {"num_attention_heads": 1, "num_key_value_heads": 1},
        None,
        "num_attention_heads: the head has 1, which 2 ranks cannot share",
    ),
    "inner size": ({"intermediate_size": 95}, 2, "intermediate_size: the head has 95"),
    "size": ({}, 3, "draft_tensor_parallel_size: got 3 with tensor_parallel_size 2"),
}


@pytest.mark.parametrize("case", SHARDS)
def test_head_that_its_ranks_cannot_share_is_refused_before_anything_starts(
    case: str, engine_config: Callable[..., Any], tmp_path: Path
) -> None:
    changes, draft_size, message = SHARDS[case]
    config = head_config(vocab_size=VOCAB, kv_heads=4, tap_ids=TAP_IDS)
    write_head(tmp_path / "head", Eagle3DraftHead(replace(config, **changes)), FULL)
    with pytest.raises(ValueError, match=message):
        engine_config(tmp_path / "head", ranks=2, draft_tensor_parallel_size=draft_size)
    whole = engine_config(tmp_path / "head", ranks=2, draft_tensor_parallel_size=1)
    assert whole.parallel_config.worker_cls.startswith("vllm_eagle3.")


def truncated(folder: Path) -> Path:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    return folder


def without_weights(folder: Path) -> Path:
    (folder / "model.safetensors").unlink()
    return folder


def a_file(folder: Path) -> Path:
    return folder / "config.json"


def nowhere(folder: Path) -> Path:
    return folder / "nowhere"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (nowhere, "speculative_config model: got .*which is no folder; want the"),
        (a_file, "speculative_config model: got .*which is no folder; want the"),
        (truncated, "broken or cut short.*fetch it again"),
        (without_weights, r"holds no \*.safetensors file; give the folder of a"),
    ],
)
def test_broken_head_is_refused_by_the_engine(
    damage: Callable[[Path], Path], message: str, models: Models, tmp_path: Path
) -> None:
    from vllm import LLM

    shutil.copytree(models("h2"), tmp_path / "head")
    with pytest.raises(ValueError, match=message):
        LLM(**llm_settings(str(models("f2")), str(damage(tmp_path / "head"))))


def test_head_of_another_target_is_refused_by_the_engine(models: Models) -> None:
    from vllm import LLM

    with pytest.raises(ValueError, match="made for another target"):
        LLM(**llm_settings(str(models("f1")), str(models("h2"))))


def test_missing_target_is_named(models: Models, tmp_path: Path) -> None:
    from vllm import LLM

    with pytest.raises(ValueError, match="no-target"):
        LLM(**llm_settings(str(tmp_path / "no-target"), str(models("h2"))))
