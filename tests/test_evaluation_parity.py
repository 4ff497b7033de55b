"""The draft-parity gate names the first tensor that differs, whatever is wrong."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from tests.models import random_llama
from vllm_eagle3.draft_head import Eagle3DraftHead
from vllm_eagle3.evaluation.parity import first_difference
from vllm_eagle3.evaluation.predict import Predictor, prompt_batch

STEPS = 3
IDS = tuple(random_llama.known_prompts()[2])


@pytest.fixture(scope="module")
def predictor(models: Callable[[str], Path]) -> Predictor:
    return Predictor(models("f1"), models("h1"), torch.float32)


@torch.no_grad()
def record(
    head: Eagle3DraftHead, taps: torch.Tensor, embedding: torch.Tensor
) -> dict[str, torch.Tensor]:
    """What an engine with `head` computes: drafts one by one, over a cache."""
    cache: list[tuple[torch.Tensor, torch.Tensor]] = []

    def attend(
        _layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        cache.append((k, v))
        keys, values = (torch.cat(parts, 2) for parts in zip(*cache, strict=True))
        visible = torch.ones(q.shape[2], keys.shape[2]).tril(keys.shape[2] - q.shape[2])
        return F.scaled_dot_product_attention(
            q, keys, values, attn_mask=visible.bool(), enable_gqa=True
        )

    fused = head.fuse(taps)
    found = {"taps": taps, "head.fused": fused}
    token, features = torch.tensor([77]), fused[None]
    read, positions = torch.tensor([*IDS[1:], 77]), torch.arange(len(IDS))
    for k in range(STEPS):
        hidden = head(F.embedding(read, embedding)[None], features, positions, attend)
        hidden = hidden[:, -1:]
        logits = head.logits(hidden)[0]
        found |= {
            f"head.{k}.token_ids": token,
            f"head.{k}.feedback": head.feedback(hidden)[0],
            f"head.{k}.logits": logits,
        }
        read = token = logits.argmax(-1)
        features, positions = head.feedback(hidden), positions[-1:] + 1
    return found


class Recorded:
    """A worker that hands out what was recorded."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.tensors = tensors

    def capture_draft(self, prompt: Any, path: Path) -> None:
        assert tuple(prompt) == IDS
        save_file({n: t.contiguous() for n, t in self.tensors.items()}, path)


def judge(predictor: Predictor, tensors: dict[str, torch.Tensor], folder: Path) -> str:
    worker: Any = Recorded(tensors)
    found = first_difference(predictor, worker, [IDS], STEPS, folder)
    return "none" if found is None else found.name


@pytest.fixture
def honest(predictor: Predictor) -> dict[str, torch.Tensor]:
    taps = predictor.target.read(prompt_batch(IDS, 1)).taps[0]
    return record(predictor.head, taps, predictor.embedding)


def test_serial_drafts_of_the_same_head_do_not_differ(
    predictor: Predictor, honest: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    assert judge(predictor, honest, tmp_path) == "none"


@pytest.mark.parametrize(
    ("name", "first"),
    [
        ("fc.weight", "fused"),
        ("layers.0.hidden_norm.weight", "step 0, feedback"),
        ("norm.weight", "step 0, logits"),
    ],
)
def test_head_with_another_weight_is_found_where_it_shows(
    name: str,
    first: str,
    predictor: Predictor,
    honest: dict[str, torch.Tensor],
    tmp_path: Path,
) -> None:
    other = Eagle3DraftHead(predictor.head.config)
    other.load_state_dict(predictor.head.state_dict())
    with torch.no_grad():
        other.get_parameter(name).mul_(1.5)
    tensors = record(other, honest["taps"], predictor.embedding)
    assert judge(predictor, tensors, tmp_path) == first


def test_layers_of_another_number_are_found(
    predictor: Predictor, honest: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    low, mid, high = honest["taps"].chunk(3, -1)
    taps = torch.cat([low, high, mid], -1)
    tensors = record(predictor.head, taps, predictor.embedding)
    assert judge(predictor, tensors, tmp_path) == "tap 3"


def test_feedback_of_another_kind_is_found_in_the_next_step(
    predictor: Predictor, honest: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    tensors = dict(honest)
    tensors["head.1.logits"] = tensors["head.1.logits"].roll(1)
    assert judge(predictor, tensors, tmp_path) == "step 1, logits"
    tensors["head.1.feedback"] = torch.full_like(tensors["head.1.feedback"], torch.nan)
    assert judge(predictor, tensors, tmp_path) == "step 1, feedback"
