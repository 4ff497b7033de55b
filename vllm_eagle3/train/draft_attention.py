"""Attention of an unrolled draft: true features up to a start, then its own steps.

At step k the query of start i sees the base keys K^0[document..i] and its own keys
K^1[i]..K^k[i] (EAGLE-3, fig. 6), in one softmax:

                    base                 own
    step 2, i=3     0  1  2  3           1@3  2@3
    step 2, i=4     0  1  2  3  4        1@4  2@4

Base scores are made for one block of queries at a time, in the forward as in the
backward pass, so memory grows linearly with length. Of the forward pass the backward
pass needs only the output o and the log-sum-exp l of each query's scores s, base and
own together:

    w = exp(s - l),  dv = w do,  ds = w (do . v - do . o),  dq = ds k,  dk = ds q
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from .packing import Run

BLOCK = 128  # queries whose scores are alive at one time

KeyValue = tuple[torch.Tensor, torch.Tensor]


def draft_attention(
    q: torch.Tensor,  # [heads, queries, dim]
    base: KeyValue,  # [kv_heads, tokens, dim]
    own: Sequence[KeyValue],  # of each later step, [kv_heads, queries, dim]
    runs: Sequence[Run],  # which base keys each query sees; covers all queries
) -> torch.Tensor:
    """Output like `q`; products in q's dtype, softmax in at least fp32."""
    keys, values = zip(*own, strict=True) if own else ((), ())
    return _DraftAttention.apply(q, *base, runs, *keys, *values)


class _DraftAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        runs: Sequence[Run],
        *own: torch.Tensor,  # keys, then values
    ) -> torch.Tensor:
        grouped = _grouped(q, k)
        out, total = _attend_base(grouped, k, v, runs)
        if own:
            out, total = _merge_own(grouped, out, total, own)
        out = out.to(q.dtype)
        ctx.runs = runs
        ctx.save_for_backward(q, k, v, out, total, *own)
        return out.view_as(q)

    @staticmethod
    def backward(ctx: Any, grad_out: torch.Tensor) -> tuple[Any, ...]:
        q, k, v, out, total, *own = ctx.saved_tensors
        grouped, grad_out = _grouped(q, k), _grouped(grad_out, k)
        dot = (grad_out.to(total.dtype) * out).sum(-1)  # do . o
        grad_q, grad_k, grad_v = _base_gradients(
            grouped, k, v, grad_out, dot, total, ctx.runs
        )
        grads_own: list[torch.Tensor] = []
        if own:
            own_q, grads_own = _own_gradients(grouped, grad_out, dot, total, own)
            grad_q += own_q
        return (grad_q.to(q.dtype).view_as(q), grad_k, grad_v, None, *grads_own)


def _grouped(x: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """[heads, queries, dim] -> [kv_heads, group, queries, dim]."""
    return x.reshape(k.shape[0], -1, *x.shape[1:])


def _blocks(runs: Sequence[Run]) -> Iterator[tuple[slice, slice, int]]:
    """(queries, base keys, keys that only some of these queries see) of each block."""
    for run in runs:
        for block in run.blocks(BLOCK):
            size = block.end - block.begin
            keys = slice(block.document, block.first + size)
            yield slice(block.begin, block.end), keys, size


def _base_scores(
    grouped: torch.Tensor,  # [kv_heads, group, block, dim]
    k: torch.Tensor,  # [kv_heads, keys, dim]
    size: int,
) -> torch.Tensor:
    """Scaled, masked scores of one block, [kv_heads, group * block, keys]."""
    scores = grouped.flatten(1, 2) @ k.transpose(1, 2)
    scores = scores.to(_wide(k)) * k.shape[-1] ** -0.5
    future = torch.ones(size, size, dtype=torch.bool, device=k.device).triu(1)
    corner = scores.unflatten(1, (-1, size))[..., -size:]
    corner.masked_fill_(future, float("-inf"))
    return scores


def _attend_base(
    grouped: torch.Tensor, k: torch.Tensor, v: torch.Tensor, runs: Sequence[Run]
) -> tuple[torch.Tensor, torch.Tensor]:
    """(output over base keys alone, log-sum-exp of their scores), at least fp32."""
    out = torch.empty_like(grouped, dtype=_wide(k))
    total = out.new_empty(grouped.shape[:-1])
    for queries, keys, size in _blocks(runs):
        scores = _base_scores(grouped[:, :, queries], k[:, keys], size)
        mass = scores.logsumexp(-1, keepdim=True)
        weights = scores.sub_(mass).exp_().to(v.dtype)
        mixed = (weights @ v[:, keys]).unflatten(1, (-1, size))
        out[:, :, queries] = mixed.to(out.dtype)
        total[:, :, queries] = mass.view(total[:, :, queries].shape)
    return out, total


def _merge_own(
    grouped: torch.Tensor,
    out: torch.Tensor,
    total: torch.Tensor,
    own: Sequence[torch.Tensor],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add the own steps to an attention over base keys."""
    keys, values = _halves(own)
    queries = grouped.to(out.dtype)
    scores = [_own_scores(queries, key) for key in keys]
    merged = torch.stack([total, *scores], -1).logsumexp(-1)
    out = out * (total - merged).exp_()[..., None]
    for score, value in zip(scores, values, strict=True):
        out += (score - merged).exp_()[..., None] * value[:, None].to(out.dtype)
    return out, merged


def _own_scores(queries: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Scaled score of each query with its own key, [kv_heads, group, queries]."""
    key = key[:, None].to(queries.dtype) * key.shape[-1] ** -0.5
    return (queries * key).sum(-1)


def _base_gradients(
    grouped: torch.Tensor,  # [kv_heads, group, queries, dim]
    k: torch.Tensor,
    v: torch.Tensor,
    grad_out: torch.Tensor,  # like grouped
    dot: torch.Tensor,  # [kv_heads, group, queries]
    total: torch.Tensor,  # [kv_heads, group, queries]
    runs: Sequence[Run],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    wide, scale = _wide(k), k.shape[-1] ** -0.5
    grad_q = torch.empty_like(grouped, dtype=wide)
    grad_k, grad_v = (torch.zeros_like(x, dtype=wide) for x in (k, v))
    for queries, keys, size in _blocks(runs):
        part = grouped[:, :, queries]
        scores = _base_scores(part, k[:, keys], size)
        weights = scores.sub_(total[:, :, queries].flatten(1)[..., None]).exp_()
        grads = grad_out[:, :, queries].flatten(1, 2)
        grad_v[:, keys] += weights.to(v.dtype).transpose(1, 2) @ grads
        inner = (grads @ v[:, keys].transpose(1, 2)).to(wide)
        inner -= dot[:, :, queries].flatten(1)[..., None]
        grad_scores = inner.mul_(weights).mul_(scale).to(k.dtype)
        grad_q[:, :, queries] = (grad_scores @ k[:, keys]).to(wide).view(part.shape)
        grad_k[:, keys] += grad_scores.transpose(1, 2) @ part.flatten(1, 2)
    return grad_q, grad_k.to(k.dtype), grad_v.to(v.dtype)


def _own_gradients(
    grouped: torch.Tensor,
    grad_out: torch.Tensor,
    dot: torch.Tensor,
    total: torch.Tensor,
    own: Sequence[torch.Tensor],
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """(gradient of the queries, gradients of own keys and then own values)."""
    wide, scale = total.dtype, grouped.shape[-1] ** -0.5
    queries, grads = grouped.to(wide), grad_out.to(wide)
    grad_q = torch.zeros_like(queries)
    grad_keys, grad_values = [], []
    for key, value in zip(*_halves(own), strict=True):
        weights = (_own_scores(queries, key) - total).exp_()
        grad_values.append((weights[..., None] * grads).sum(1).to(value.dtype))
        inner = (grads * value[:, None].to(wide)).sum(-1).sub_(dot)
        grad_scores = inner.mul_(weights).mul_(scale)[..., None]
        grad_q += grad_scores * key[:, None].to(wide)
        grad_keys.append((grad_scores * queries).sum(1).to(key.dtype))
    return grad_q, grad_keys + grad_values


def _halves(
    own: Sequence[torch.Tensor],
) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]:
    return own[: len(own) // 2], own[len(own) // 2 :]


def _wide(x: torch.Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)
