"""The fused soft cross-entropy equals the plain formula, value and gradient."""

from __future__ import annotations

import pytest
import torch

from vllm_eagle3.train import losses
from vllm_eagle3.train.losses import soft_cross_entropy


@pytest.mark.parametrize("chunk", [4, 1024], ids=["several chunks", "one chunk"])
@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_equals_the_plain_formula(
    chunk: int, scale: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(losses, "CHUNK", chunk)
    torch.manual_seed(0)
    hidden = torch.randn(11, 8, requires_grad=True)
    weight = torch.randn(13, 8, requires_grad=True)
    # A law that leaves some mass outside the draft vocabulary.
    target = torch.rand(7, 13).softmax(-1) * torch.rand(7, 1)
    rows = torch.randint(0, 7, (11,))
    loss, best = soft_cross_entropy(hidden, weight, target, rows, scale)
    (3 * loss).backward()
    got = hidden.grad.clone(), weight.grad.clone()
    hidden.grad = weight.grad = None
    logits = hidden @ weight.T * scale
    plain = -(target[rows] * logits.log_softmax(-1)).sum()
    (3 * plain).backward()
    assert torch.allclose(loss, plain, rtol=1e-5)
    assert torch.equal(best, logits.argmax(-1))
    assert torch.allclose(got[0], hidden.grad, atol=1e-4)
    assert torch.allclose(got[1], weight.grad, atol=1e-4)
