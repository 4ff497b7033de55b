"""Draft losses over the draft vocabulary, with the output projection fused in.

Logits are the largest tensor of training (valid positions x draft vocabulary, for
every step). They are made chunk by chunk and dropped: the gradients of these losses
with respect to the logits z are known in closed form, so they are folded into the
gradients of the hidden states and of `lm_head` at once.

With p the target's law restricted to the draft vocabulary (its sum is the *coverage*,
1 for a full vocabulary), q = softmax(z) and alpha = sum_v min(p, q), the probability
that a token drafted from q is accepted:

    soft_ce     L = -sum_v p log q                     dL/dz = (sum_v p) q - p
    lk_hybrid   L = lam * soft_ce + (1 - lam)(1 - alpha),  lam = exp(-eta alpha)
                d(1 - alpha)/dz = q (sum_{q < p} q - [q < p])

lk_hybrid is arXiv 2602.23881, with lam per position and not differentiated. Mass
outside the draft vocabulary cannot be drafted: it counts as refused, so 1 - alpha is
the total variation over the whole vocabulary. (Renormalising p instead promises an
alpha above what serving can reach.)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from .config import LossConfig

# Positions multiplied at one time: their logits are alive, in the products' dtype.
CHUNK = 1024
# Of these, positions judged at one time in fp32: a dozen passes over few enough numbers
# for a CPU's caches.
JUDGED = 64


@dataclass(frozen=True)
class Positions:
    """What to judge each drafted position by; n positions of all steps together.

    law: [m, draft_vocab], the target's probabilities of m tokens
    row: [n] -> row of `law`
    truth: [n], draft id of the target's argmax, -1 outside the draft vocabulary
    weight: [n], fp32: share of the position in the loss
    """

    law: torch.Tensor
    row: torch.Tensor
    truth: torch.Tensor
    weight: torch.Tensor


@dataclass(frozen=True)
class Judged:
    """Per position, not differentiable: its loss, and whether the target would agree.

    loss: [n], fp32
    hit: [n], bool: the head's best token is the target's
    """

    loss: torch.Tensor
    hit: torch.Tensor


def draft_loss(
    hidden: torch.Tensor,  # [n, hidden], after the head's norm
    weight: torch.Tensor,  # [draft_vocab, hidden]: lm_head
    positions: Positions,
    config: LossConfig,
    scale: float = 1.0,
) -> tuple[torch.Tensor, Judged]:
    """Weighted sum of the loss over all positions (EAGLE-3, section 3.2).

    The products are made in `hidden`'s dtype; `weight` may be wider (master weights),
    and its gradient then is too.

    Args:
        scale: logit scale of the head.

    Returns:
        (loss, a scalar in at least fp32; what was seen at each position)
    """
    rule = _Rule(
        eta=config.eta if config.kind == "lk_hybrid" else None,
        renormalise=config.preset == "reference",
        scale=scale,
    )
    # The dtypes are chosen here; autocast would also lower the sums.
    with torch.autocast(hidden.device.type, enabled=False):
        loss, each, hit = _FusedLoss.apply(hidden, weight, positions, rule)
    return loss, Judged(each, hit)


class _Rule(NamedTuple):
    """How one position is judged; `eta` is None for the soft cross-entropy."""

    eta: float | None
    renormalise: bool
    scale: float


class _FusedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        at: Positions,
        rule: _Rule,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        narrow_weight = weight.to(hidden.dtype)
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=wide)
        each = hidden.new_empty(hidden.shape[0], dtype=wide)
        hit = torch.empty_like(at.truth, dtype=torch.bool)
        for begin in range(0, hidden.shape[0], CHUNK):
            part = slice(begin, begin + CHUNK)
            logits = hidden[part] @ narrow_weight.T
            grad = logits  # overwritten, to hold one such tensor at a time
            each[part], hit[part] = _judge_chunk(logits, at, part, rule)
            share = (rule.scale * at.weight[part, None]).to(wide)
            grad_hidden[part] = ((grad @ narrow_weight) * share).to(hidden.dtype)
            grad_weight += grad.T @ (hidden[part] * share).to(hidden.dtype)
        ctx.save_for_backward(grad_hidden, grad_weight.to(weight.dtype))
        ctx.mark_non_differentiable(each, hit)
        return (each * at.weight).sum(), each, hit

    @staticmethod
    def backward(ctx: Any, grad_loss: torch.Tensor, *_: Any) -> tuple[Any, ...]:
        grad_hidden, grad_weight = ctx.saved_tensors
        return (
            grad_hidden * grad_loss.to(grad_hidden.dtype),
            grad_weight * grad_loss.to(grad_weight.dtype),
            None,
            None,
        )


def _judge_chunk(
    logits: torch.Tensor,  # [c, draft_vocab], overwritten by their gradients
    at: Positions,
    part: slice,
    rule: _Rule,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(loss [c], hit [c]) of the positions `part`."""
    wide = torch.promote_types(logits.dtype, torch.float32)
    losses, hits = [], []
    pieces = (x[part].split(JUDGED) for x in (at.row, at.truth))
    for some, row, truth in zip(logits.split(JUDGED), *pieces, strict=True):
        p = at.law[row].to(wide)
        if rule.renormalise:
            p /= p.sum(-1, keepdim=True)
        z = some.to(wide, copy=True)
        if rule.scale != 1.0:
            z *= rule.scale
        loss, hit, grad = _judge(z, p, truth, rule.eta)
        some.copy_(grad)
        losses.append(loss)
        hits.append(hit)
    return torch.cat(losses), torch.cat(hits)


def _judge(
    z: torch.Tensor,  # [c, draft_vocab], scaled logits, overwritten
    p: torch.Tensor,  # [c, draft_vocab], overwritten
    truth: torch.Tensor,  # [c]
    eta: float | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(loss [c], hit [c], gradient with respect to the logits [c, draft_vocab])."""
    z -= z.amax(-1, keepdim=True)
    # The best logit is 0 now. (An argmax would cost as much as all the exponentials.)
    hit = (z.gather(1, truth.clamp(min=0)[:, None])[:, 0] == 0) & (truth >= 0)
    mass = p.sum(-1)
    loss = -torch.linalg.vecdot(p, z)
    q = z.exp_()
    total = q.sum(-1)
    loss += mass * total.log()
    if eta is None:
        return loss, hit, q.mul_((mass / total)[:, None]).sub_(p)
    q /= total[:, None]
    alpha = torch.minimum(p, q).sum(-1)
    lam = (-eta * alpha).exp_()
    below = q * (q < p)
    # lam (mass q - p) + (1 - lam) (sum(below) q - below)
    factor = lam * mass + (1 - lam) * below.sum(-1)
    grad = (q * factor[:, None]).sub_(p.mul_(lam[:, None]))
    grad -= below.mul_((1 - lam)[:, None])
    return lam * loss + (1 - lam) * (1 - alpha), hit, grad


def feature_loss(
    features: torch.Tensor,  # [n, hidden]: the head's, after its norm
    wanted: torch.Tensor,  # [n, hidden]: the target's, after its final norm
    weight: torch.Tensor,  # [n]
) -> torch.Tensor:
    """Smooth L1 between what the two output layers read (EAGLE, section 3.2), weighted.

    EAGLE-3 drops this loss to free the head; kept to measure what that is worth.
    """
    loss = F.smooth_l1_loss(features.float(), wanted.float(), reduction="none")
    return (loss.mean(-1) * weight).sum()


def position_weights(
    truth: torch.Tensor, num_cells: int, factor: float, config: LossConfig
) -> torch.Tensor:
    """Share of each position of one step in the loss, [n].

    `coverage`: factor / n, the mean over the valid positions.

    `reference`, as the reference trainer (SafeAILab/EAGLE, cnets.py) has it:
      - p is renormalised over the draft vocabulary (in `draft_loss`);
      - positions whose target argmax is outside the draft vocabulary are dropped;
      - the sum is divided by ALL cells of the padded batch, prompt and padding too, so
        a batch with short replies learns more slowly.
    Which positions are valid stays ours: the reference does not shift the loss mask
    with the tokens, and so never trains the first draft of a reply.

    Args:
        truth: draft id of the target's argmax, -1 outside the draft vocabulary, [n].
        num_cells: rows x tokens of the padded batch.
        factor: weight of the step, 0.8^k.
    """
    if config.preset == "reference":
        return (truth >= 0).float() * (factor / num_cells)
    return torch.full_like(truth, factor / truth.numel(), dtype=torch.float32)
