"""The fused losses equal their plain formulas, in value and gradient."""

from __future__ import annotations

import pytest
import torch

from vllm_eagle3.train import losses
from vllm_eagle3.train.config import LossConfig
from vllm_eagle3.train.losses import Positions, draft_loss, position_weights

N, M, VOCAB, HIDDEN = 11, 7, 13, 8


def problem() -> tuple[torch.Tensor, torch.Tensor, Positions]:
    torch.manual_seed(0)
    hidden = torch.randn(N, HIDDEN, dtype=torch.double, requires_grad=True)
    weight = torch.randn(VOCAB, HIDDEN, dtype=torch.double, requires_grad=True)
    # A law that leaves some mass outside the draft vocabulary.
    law = torch.randn(M, VOCAB).double().mul(2).softmax(-1) * torch.rand(M, 1)
    row = torch.randint(0, M, (N,))
    truth = law.argmax(-1)[row]
    truth[:2] = (hidden @ weight.T).argmax(-1)[:2]  # hits
    truth[3] = -1
    return hidden, weight, Positions(law, row, truth, torch.rand(N).double())


def plain_loss(z: torch.Tensor, at: Positions, config: LossConfig) -> torch.Tensor:
    p, q = at.law[at.row], z.softmax(-1)
    if config.preset == "reference":
        p = p / p.sum(-1, keepdim=True)
    loss = -(p * q.log()).sum(-1)
    if config.kind == "lk_hybrid":
        alpha = torch.minimum(p, q).sum(-1)
        lam = (-config.eta * alpha.detach()).exp()
        loss = lam * loss + (1 - lam) * (1 - alpha)
    return loss


CONFIGS = {
    "soft_ce": LossConfig(),
    "lk_hybrid": LossConfig(kind="lk_hybrid"),
    "total variation": LossConfig(kind="lk_hybrid", eta=1e9),
    "reference": LossConfig(preset="reference"),
}


@pytest.mark.parametrize("chunk", [5, 1024], ids=["several chunks", "one chunk"])
@pytest.mark.parametrize("scale", [1.0, 0.5])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_equals_the_plain_formula(
    config: LossConfig, chunk: int, scale: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(losses, "CHUNK", chunk)
    monkeypatch.setattr(losses, "JUDGED", max(2, chunk // 2))
    hidden, weight, at = problem()
    loss, judged = draft_loss(hidden, weight, at, config, scale)
    got = torch.autograd.grad(3 * loss, (hidden, weight))
    logits = hidden @ weight.T * scale
    each = plain_loss(logits, at, config)
    want = torch.autograd.grad(3 * (each * at.weight).sum(), (hidden, weight))
    assert torch.allclose(judged.loss, each) and each.std() > 0.03
    assert torch.allclose(loss, (each * at.weight).sum())
    assert torch.equal(judged.hit, logits.argmax(-1) == at.truth)
    for ours, theirs in zip(got, want, strict=True):
        assert torch.allclose(ours, theirs, atol=1e-12)


@pytest.mark.parametrize(
    # lam is a constant of the gradient, so that only its two ends can be differentiated
    # numerically.
    "config",
    [CONFIGS["soft_ce"], CONFIGS["total variation"], CONFIGS["reference"]],
)
def test_gradients_are_those_of_finite_differences(config: LossConfig) -> None:
    hidden, weight, at = problem()
    assert torch.autograd.gradcheck(
        lambda h, w: draft_loss(h, w, at, config)[0], (hidden, weight)
    )


def test_mass_outside_the_draft_vocabulary_counts_as_refused() -> None:
    """The best possible head still loses exactly the mass it cannot draft."""
    law = torch.tensor([[0.3, 0.1]])  # 0.6 elsewhere
    at = Positions(law, torch.tensor([0]), torch.tensor([-1]), torch.ones(1))
    config = LossConfig(kind="lk_hybrid", eta=1e9)
    hidden = torch.eye(2)[:1]
    for q in (0.3, 0.75, 0.9):  # as on the full vocabulary, renormalised, and between
        weight = torch.tensor([[q], [1 - q]]).log() @ torch.tensor([[1.0, 0.0]])
        _, judged = draft_loss(hidden, weight, at, config)
        assert judged.loss[0] == pytest.approx(0.6, abs=1e-6)
        assert not judged.hit[0]


def test_reference_preset_is_the_reference_trainers_loss() -> None:
    """Literally: mask * p * log q, summed over the vocabulary, mean over all cells."""
    rows, tokens, vocab = 2, 20, 9
    draft_ids = torch.tensor([0, 2, 3, 7])
    torch.manual_seed(1)
    target_logits = torch.randn(rows, tokens, vocab).double()
    target_logits[..., 5] += 0.5  # often best, and outside
    out = torch.randn(rows, tokens, draft_ids.numel()).double()
    loss_mask = torch.rand(rows, tokens) < 0.6

    best = target_logits.argmax(-1)
    in_vocab = torch.isin(best, draft_ids)
    p = target_logits[..., draft_ids].softmax(-1)
    mask = (in_vocab & loss_mask)[..., None]
    theirs = -(mask * p * out.log_softmax(-1)).sum(-1).mean()

    law = target_logits.softmax(-1)[..., draft_ids][loss_mask]
    to_draft = torch.full((vocab,), -1)
    to_draft[draft_ids] = torch.arange(draft_ids.numel())
    truth = to_draft[best[loss_mask]]
    config = LossConfig(preset="reference")
    share = position_weights(truth, rows * tokens, 1.0, config)
    assert 0 < (share == 0).sum() < share.numel()
    at = Positions(law, torch.arange(len(law)), truth, share.double())
    ours, _ = draft_loss(out[loss_mask], torch.eye(4).double(), at, config)
    assert torch.allclose(ours, theirs, atol=1e-9)


def test_a_step_is_the_mean_over_its_valid_positions() -> None:
    share = position_weights(torch.tensor([1, -1, 0, 2]), 99, 0.8, LossConfig())
    assert torch.allclose(share, torch.full((4,), 0.2))
