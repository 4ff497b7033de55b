from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from tests.models.head_variants import (
    HIDDEN,
    VARIANTS,
    VOCAB,
    causal_attention,
    draft_step,
    make_head,
)
from vllm_eagle3.draft_head import Eagle3DraftHead, RotaryEmbedding


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(5)


@pytest.mark.parametrize("variant", VARIANTS)
def test_shapes(variant: str) -> None:
    head, vocab = make_head(**VARIANTS[variant])
    step = draft_step(head, tokens=5)
    assert step["fused"].shape == step["feedback"].shape == (5, HIDDEN)
    assert step["logits"].shape == (5, len(vocab))


SWITCHED = sorted(set(VARIANTS) - {"plain", "two_layers", "five_taps", "everything"})


@pytest.mark.parametrize("variant", SWITCHED)
def test_every_switch_changes_what_is_computed(variant: str) -> None:
    plain, switched = (
        draft_step(make_head(**VARIANTS[name])[0]) for name in ("plain", variant)
    )
    assert any(
        plain[name].shape != switched[name].shape
        or not torch.allclose(plain[name], switched[name])
        for name in ("fused", "feedback", "logits")
    )


def test_step_by_step_equals_all_at_once() -> None:
    """Attention and positions are the caller's, so a cache changes nothing."""
    head, _ = make_head(num_hidden_layers=2)
    generator = torch.Generator().manual_seed(1)
    embeds, features = torch.randn(2, 1, 6, HIDDEN, generator=generator)
    whole = head(embeds, features, torch.arange(6), causal_attention)
    cache: dict[int, list[torch.Tensor]] = {0: [], 1: []}

    def attend(layer: int, q: Any, k: Any, v: Any) -> torch.Tensor:
        cache[layer].append(torch.stack([k, v]))
        keys, values = torch.cat(cache[layer], dim=-2)
        return torch.nn.functional.scaled_dot_product_attention(
            q, keys, values, enable_gqa=True
        )

    for i in range(6):
        at = slice(i, i + 1)
        one = head(embeds[:, at], features[:, at], torch.tensor([i]), attend)
        torch.testing.assert_close(one, whole[:, at], atol=1e-4, rtol=1e-4)


def test_positions_may_differ_by_row() -> None:
    head, _ = make_head()
    embeds, features = torch.randn(2, 2, 4, HIDDEN)
    positions = torch.stack([torch.arange(4), torch.arange(4) + 9])
    both = head(embeds, features, positions, causal_attention)
    second = head(embeds[1:], features[1:], positions[1], causal_attention)
    torch.testing.assert_close(both[1:], second, atol=1e-4, rtol=1e-4)


def test_only_relative_positions_matter() -> None:
    head, _ = make_head()
    embeds, features = torch.randn(2, 1, 4, HIDDEN)
    near, far = (
        head(embeds, features, torch.arange(4) + start, causal_attention)
        for start in (0, 500)
    )
    torch.testing.assert_close(near, far, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_cast_keeps_rotary_frequencies_exact(dtype: torch.dtype) -> None:
    head, _ = make_head()
    exact = head.rotary.inv_freq.clone()
    head.to(dtype)
    assert head.fc.weight.dtype == dtype
    assert torch.equal(head.rotary.inv_freq, exact)


def test_frequencies_exist_on_a_head_built_without_memory() -> None:
    config = make_head()[0].config
    with torch.device("meta"):
        head = Eagle3DraftHead(config)
    assert torch.equal(
        head.to_empty(device="cpu").rotary.inv_freq, RotaryEmbedding(config).inv_freq
    )


def test_rotary_is_no_weight() -> None:
    assert not [n for n in make_head()[0].state_dict() if "rotary" in n]


def test_gradients_reach_every_weight() -> None:
    head, _ = make_head(**VARIANTS["everything"])
    taps = torch.randn(1, 3, head.config.target_hidden_size * 2)
    embeds = torch.randn(1, 3, HIDDEN)
    hidden = head(embeds, head.fuse(taps), torch.arange(3), causal_attention)
    head.logits(hidden).square().sum().backward()
    # A key bias acts only through rotary positions: a small gradient, not none.
    assert all(p.grad is not None and p.grad.any() for p in head.parameters())


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        ({"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}, "rope_type"),
        ({"rope_type": "longrope", "rope_theta": 1e4}, "rope_type"),
        ({"rope_type": "spiral", "rope_theta": 1e4}, "rope_type"),
        (
            {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
            "partial_rotary_factor",
        ),
    ],
)
def test_refuses_rope(rope: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_head(rope_parameters=rope)


def test_refuses_activation() -> None:
    config = dataclasses.replace(make_head()[0].config, hidden_act="gelu")
    with pytest.raises(ValueError, match="hidden_act"):
        Eagle3DraftHead(config)


def test_reduced_head_scores_only_its_vocabulary() -> None:
    head, vocab = make_head(draft_vocab_size=40)
    assert head.lm_head.out_features == len(vocab) == 40 < VOCAB
