"""Training-time test equals a loop that really drafts step by step."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from vllm_eagle3.draft_head import DraftHeadConfig, Eagle3DraftHead
from vllm_eagle3.train.packing import Packing
from vllm_eagle3.train.ttt import unroll

TOKENS, STEPS, HIDDEN = 12, 4, 16


def make_head(**switches: object) -> Eagle3DraftHead:
    torch.manual_seed(3)
    config = DraftHeadConfig(
        hidden_size=HIDDEN,
        intermediate_size=24,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        vocab_size=40,
        draft_vocab_size=20,
        target_hidden_size=HIDDEN,
        tap_ids=(1, 2, 3),
        **switches,  # type: ignore[arg-type]
    )
    return Eagle3DraftHead(config).double()


def inputs(rows: int = 2) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    taps = torch.randn(rows, TOKENS, 3 * HIDDEN, generator=generator).double()
    embeds = torch.randn(rows, TOKENS, HIDDEN, generator=generator).double()
    span_ids = torch.zeros(rows, TOKENS, dtype=torch.int64)
    span_ids[0, 3:9] = 1
    span_ids[1, 2:5] = 1
    span_ids[1, 7:12] = 2
    return taps, embeds, span_ids


def valid_starts(span_ids: torch.Tensor, k: int) -> list[tuple[int, int]]:
    """(row, i) of the starts where step `k` is valid."""
    packing = Packing(span_ids)
    starts = packing.starts[packing.room > k]
    rows, tokens = packing.row[starts], packing.token[starts]
    return list(zip(rows.tolist(), tokens.tolist(), strict=True))


def serial_draft(
    head: Eagle3DraftHead, taps: torch.Tensor, embeds: torch.Tensor, start: int
) -> list[torch.Tensor]:
    """Draft from one index of one row with a real cache; hidden of every step."""
    cache: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}

    def attend(
        layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> torch.Tensor:
        cache.setdefault(layer, []).append((k, v))
        keys = torch.cat([k for k, _ in cache[layer]], dim=2)
        values = torch.cat([v for _, v in cache[layer]], dim=2)
        rows, length = q.shape[2], keys.shape[2]
        visible = torch.ones(rows, length, dtype=torch.bool).tril(length - rows)
        return F.scaled_dot_product_attention(
            q, keys, values, attn_mask=visible, enable_gqa=True
        )

    features = head.fuse(taps[None, : start + 1])
    following = embeds[None, 1 : start + 2]
    hidden = head(following, features, torch.arange(start + 1), attend)[:, -1:]
    found = [hidden[0, 0]]
    for k in range(1, STEPS):
        if start + 1 + k >= TOKENS:
            break
        following = embeds[None, start + 1 + k : start + 2 + k]
        position = torch.tensor([start + k])
        hidden = head(following, head.feedback(hidden), position, attend)
        found.append(hidden[0, 0])
    return found


@pytest.mark.parametrize(
    "switches",
    [{}, {"fc_norm": True, "norm_output": True}, {"num_hidden_layers": 2}],
    ids=["plain", "3.1", "two layers"],
)
def test_every_step_equals_serial_drafting_in_value_and_gradient(
    switches: dict[str, object],
) -> None:
    head = make_head(**switches)
    taps, embeds, span_ids = inputs()
    weight = torch.randn(HIDDEN, generator=torch.Generator().manual_seed(9)).double()
    ours = torch.zeros((), dtype=torch.double)
    seen = 0
    for step in unroll(head, taps, embeds, span_ids, STEPS):
        for hidden, row, start in zip(step.hidden, step.row, step.start, strict=True):
            serial = serial_draft(head, taps[row], embeds[row], int(start))[step.k]
            assert torch.allclose(hidden, serial, atol=1e-10)
            ours = ours + 0.8**step.k * (hidden @ weight)
            seen += 1
    assert seen > 10
    ours_grads = torch.autograd.grad(ours, list(head.parameters()), allow_unused=True)
    theirs = torch.zeros((), dtype=torch.double)
    for k in range(STEPS):
        for row, start in valid_starts(span_ids, k):
            hidden = serial_draft(head, taps[row], embeds[row], start)[k]
            theirs = theirs + 0.8**k * (hidden @ weight)
    grads = torch.autograd.grad(theirs, list(head.parameters()), allow_unused=True)
    for got, want in zip(ours_grads, grads, strict=True):
        assert (got is None) == (want is None)
        assert want is None or torch.allclose(got, want, atol=1e-9)


def test_only_drafts_that_start_and_end_in_one_reply_are_valid() -> None:
    # One row: prompt at 0..2, reply at 3..8, prompt at 9, reply at 10..11.
    span_ids = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1, 1, 0, 2, 2]])
    # i = 2 drafts after the first reply token x_3 and predicts x_4.
    assert valid_starts(span_ids, 0) == [(0, i) for i in (2, 3, 4, 5, 6, 9)]
    assert valid_starts(span_ids, 2) == [(0, i) for i in (2, 3, 4)]


def test_padding_changes_nothing() -> None:
    head = make_head()
    taps, embeds, span_ids = inputs(rows=2)
    alone = list(unroll(head, taps[:1, :10], embeds[:1, :10], span_ids[:1, :10], STEPS))
    together = list(unroll(head, taps, embeds, span_ids, STEPS))
    for a, b in zip(alone, together, strict=True):
        of_first = b.row == 0
        assert torch.allclose(a.hidden, b.hidden[of_first], atol=1e-10)
        assert torch.equal(a.start, b.start[of_first])
