"""The teacher-parity gate lets the engine's own target pass and no other."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, Gemma2Config

from tests.models import random_llama
from tests.models.shapes import byte_tokenizer
from vllm_eagle3.engine import EngineSpec
from vllm_eagle3.evaluation.scoring import scorer
from vllm_eagle3.taps import default_tap_ids
from vllm_eagle3.train.data import Row
from vllm_eagle3.train.features import TargetFeatures
from vllm_eagle3.train.parity import compare_with_engine, teacher_parity_gate
from vllm_eagle3.train.train_command import run_train
from vllm_eagle3.vocab import DraftVocab

Models = Callable[[str], Path]
ENGINE = "vllm_eagle3.integration.engine:VllmEngine"
ROWS = [
    Row("", tuple(prompt), ((3, len(prompt), 0.0),), f"rows.jsonl:{number}")
    for number, prompt in enumerate(random_llama.known_prompts()[1:5], 1)
]


def features(folder: Path) -> TargetFeatures:
    config = json.loads((folder / "config.json").read_text())
    vocab = DraftVocab(torch.arange(0, config["vocab_size"], 2), config["vocab_size"])
    taps = default_tap_ids(config["num_hidden_layers"])
    return TargetFeatures(folder, taps, vocab, torch.float32)


def true_scores(folder: Path, rows: Sequence[Row]) -> list[list[float]]:
    """What an engine without fault says of `rows`."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    scores = []
    for row in rows:
        ids = torch.tensor([row.ids])
        with torch.no_grad():
            log_probs = model(ids).logits[0, :-1].log_softmax(-1)
        scores.append(log_probs.gather(1, ids[0, 1:, None])[:, 0].tolist())
    return scores


def test_differences_are_zero_for_the_same_target(models: Models) -> None:
    parity = compare_with_engine(
        features(models("f1")), ROWS, true_scores(models("f1"), ROWS)
    )
    assert parity.num_tokens == sum(len(row.ids) - 3 for row in ROWS)
    assert parity.worst < 1e-4


def test_worst_place_is_found(models: Models) -> None:
    scores = true_scores(models("f1"), ROWS)
    scores[2][19] -= 5.0
    parity = compare_with_engine(features(models("f1")), ROWS, scores)
    # The engine has no score for the first id, so its 19th is of id 20.
    assert parity.worst_at == (2, 20)
    assert parity.worst == pytest.approx(5.0, abs=1e-3)


def test_training_does_not_start_on_another_target(
    models: Models, tmp_path: Path
) -> None:
    rows = tmp_path / "rows.jsonl"
    lines = [json.dumps({"ids": r.ids, "spans": r.spans}) for r in ROWS * 3]
    rows.write_text("\n".join(lines))
    config = tmp_path / "run.yaml"
    out = tmp_path / "out"
    config.write_text(
        f"target: {models('f1')}\nrows: [{rows}]\nout: {out}\nheld_out_rows: 3\n"
        "draft_vocab_size: 64\nepochs: 1\ntaps: [1, 3, 5]\nprecision: bf16\n"
        "tokens_per_batch: 64\nnum_steps: 1\n"
    )

    def of_another(
        spec: EngineSpec, prompts: Sequence[Sequence[int]]
    ) -> list[list[float]]:
        assert spec.target == str(models("f1")) and spec.dtype == "bfloat16"
        return [[-1.0] * (len(ids) - 1) for ids in prompts]

    with pytest.raises(
        ValueError, match=r"parity_rows: .*nats on average.*rows\.jsonl"
    ):
        run_train(config, Console(quiet=True), score=of_another)
    assert not (out / "head").exists()
    # Without the gate the same run goes through.
    run_train(config, Console(quiet=True), ["parity_rows=0"], score=of_another)
    assert (out / "head").is_dir()


@pytest.fixture
def gemma(tmp_path: Path) -> Path:
    """A random Gemma 2: 1 + w norms, soft caps, tied and scaled embeddings."""
    torch.manual_seed(6)
    config = Gemma2Config(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        final_logit_softcapping=5.0,
        query_pre_attn_scalar=32,
        sliding_window=64,
    )
    model: Any = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.add_(
                (0.3 if "norm" in name else 0.1) * torch.randn_like(parameter)
            )
    model.save_pretrained(tmp_path / "gemma")
    byte_tokenizer(512).save_pretrained(tmp_path / "gemma")
    return tmp_path / "gemma"


@pytest.mark.engine
@pytest.mark.parametrize("name", ["f1", pytest.param("gemma", marks=pytest.mark.slow)])
def test_engine_and_training_see_the_same_target(
    name: str, models: Models, request: pytest.FixtureRequest
) -> None:
    pytest.importorskip("vllm")
    folder = request.getfixturevalue(name) if name == "gemma" else models(name)
    said: list[str] = []
    target = features(folder)
    teacher_parity_gate(scorer(ENGINE), said.append)(target, ROWS)
    apart = re.search(r"differ by ([\d.]+) nats", said[0])
    assert apart is not None and float(apart[1]) <= 0.002
    # A norm of the wrong kind, here the final one doubled, does not pass.
    with torch.no_grad():
        target.final_norm.mul_(2).add_(1)
    wrong = compare_with_engine(target, ROWS, true_scores(folder, ROWS))
    assert wrong.mean > 0.1
