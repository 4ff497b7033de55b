"""Draft losses over the draft vocabulary, with the output projection fused in.

Logits are the largest tensor of training (valid positions x draft vocabulary, once per
step). They are made chunk by chunk and dropped: the gradient of a soft cross-entropy
with respect to its logits is known in closed form, so it is folded into the gradients
of the hidden states and of `lm_head` at once.
"""

from __future__ import annotations

from typing import Any

import torch

CHUNK = 1024  # positions whose logits are alive at one time


class _FusedSoftCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,  # [n, hidden]
        weight: torch.Tensor,  # [draft_vocab, hidden]
        target: torch.Tensor,  # [m, draft_vocab]
        rows: torch.Tensor,  # [n] -> row of `target`
        scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=torch.float32)
        best = torch.empty(hidden.shape[0], dtype=torch.int64, device=hidden.device)
        loss = hidden.new_zeros((), dtype=torch.float32)
        for begin in range(0, hidden.shape[0], CHUNK):
            part = slice(begin, begin + CHUNK)
            p = target[rows[part]].float()
            logits = (hidden[part] @ weight.T).float().mul_(scale)
            best[part] = logits.argmax(-1)
            log_q = logits.log_softmax(-1)
            loss += -(p * log_q).sum()
            # d loss / d logits = mass(p) * q - p
            grad = log_q.exp_().mul_(p.sum(-1, keepdim=True)).sub_(p).mul_(scale)
            grad = grad.to(hidden.dtype)
            grad_hidden[part] = grad @ weight
            grad_weight += (grad.T @ hidden[part]).float()
        ctx.save_for_backward(grad_hidden, grad_weight.to(weight.dtype))
        ctx.mark_non_differentiable(best)
        return loss, best

    @staticmethod
    def backward(ctx: Any, grad_loss: torch.Tensor, _: torch.Tensor) -> tuple[Any, ...]:
        grad_hidden, grad_weight = ctx.saved_tensors
        return (
            grad_hidden * grad_loss.to(grad_hidden.dtype),
            grad_weight * grad_loss.to(grad_weight.dtype),
            None,
            None,
            None,
        )


def soft_cross_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    rows: torch.Tensor,
    scale: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum over positions of -sum_v p(v) log q(v) (EAGLE-3, section 3.2).

    `p` is the target's law on the draft vocabulary WITHOUT renormalising: mass outside
    cannot be drafted, so such a position simply weighs less.

    Args:
        hidden: normed hidden states, [n, hidden].
        weight: lm_head, [draft_vocab, hidden], in the dtype to multiply in.
        target: target probabilities, [m, draft_vocab].
        rows: which row of `target` each position is judged by, [n].
        scale: logit scale of the head.

    Returns:
        (loss, fp32 scalar; the head's argmax as draft ids, int64 [n])
    """
    loss, best = _FusedSoftCrossEntropy.apply(hidden, weight, target, rows, scale)
    return loss, best
