"""Packing: which tokens and starts, and that documents never see each other."""

from __future__ import annotations

import torch

from tests.test_train_ttt import make_head
from vllm_eagle3.train import draft_attention as module
from vllm_eagle3.train.draft_attention import draft_attention
from vllm_eagle3.train.packing import Packing, Run
from vllm_eagle3.train.ttt import unroll

# The drawing of `packing`, with a second reply in row 0 and an unused row.
SPANS = torch.tensor(
    [
        [0, 0, 0, 1, 1, 1, 1, 0, 2, 2],
        [0, 0, 1, 1, 1, 0, 0, 0, 0, 0],
        [0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
        [0, 1, 1, 1, 0, 0, 1, 0, 0, 0],
    ]
)


def test_packs_what_drafts_can_depend_on() -> None:
    packing = Packing(SPANS)
    assert packing.row.tolist() == [0] * 10 + [1] * 5 + [3] * 7
    assert packing.token.tolist() == [*range(10), *range(5), *range(7)]
    assert packing.documents == [
        Run(0, 10, 0, 0),
        Run(10, 15, 10, 10),
        Run(15, 22, 15, 15),
    ]


def test_starts_are_where_a_first_draft_is_valid() -> None:
    packing = Packing(SPANS)
    assert packing.starts.tolist() == [2, 3, 4, 7, 11, 12, 15, 16]
    assert packing.room.tolist() == [3, 2, 1, 1, 2, 1, 2, 1]
    assert packing.replies == [
        Run(0, 3, 2, 0),
        Run(3, 4, 7, 0),
        Run(4, 6, 11, 10),
        Run(6, 8, 15, 15),
    ]


def test_neighbouring_documents_and_replies_stay_apart() -> None:
    """A reply to the end of a row, then one from the second token of the next."""
    packing = Packing(torch.tensor([[0, 1, 1, 2, 2, 2], [0, 1, 1, 1, 1, 1]]))
    assert packing.starts.tolist() == [0, 2, 3, 6, 7, 8, 9]
    assert packing.room.tolist() == [1, 2, 1, 4, 3, 2, 1]
    assert [run.document for run in packing.replies] == [0, 0, 6]


def test_packed_rows_equal_rows_alone_in_value_and_gradient() -> None:
    head = make_head()
    generator = torch.Generator().manual_seed(2)
    taps = torch.randn(*SPANS.shape, 48, generator=generator).double()
    embeds = torch.randn(*SPANS.shape, 16, generator=generator).double()
    taps.requires_grad_()

    def outputs(rows: list[int]) -> tuple[torch.Tensor, list[torch.Tensor]]:
        steps = list(unroll(head, taps[rows], embeds[rows], SPANS[rows], 3))
        hidden = torch.cat([step.hidden for step in steps])
        loss = (hidden * hidden.detach().cos()).sum()
        parameters = [p for n, p in head.named_parameters() if "norm.w" not in n]
        parameters = [p for p in parameters if p is not head.lm_head.weight]
        return loss, list(torch.autograd.grad(loss, [taps, *parameters]))

    packed, packed_grads = outputs([0, 1, 2, 3])
    alone = [outputs([row]) for row in (0, 1, 3)]
    assert torch.allclose(packed, sum(loss for loss, _ in alone), atol=1e-12)
    for i, grad in enumerate(packed_grads):
        total = sum(grads[i] for _, grads in alone)
        assert torch.allclose(grad, total, atol=1e-12)
        assert grad.abs().max() > 1e-3


def attention_inputs() -> tuple[list[torch.Tensor], list[Run]]:
    torch.manual_seed(4)
    packing = Packing(SPANS)
    count, starts = packing.row.numel(), packing.starts.numel()
    shapes = [(4, starts, 8), (2, count, 8), (2, count, 8), *[(2, starts, 8)] * 4]
    tensors = [torch.randn(s).double().requires_grad_() for s in shapes]
    return tensors, packing.replies


def attend(q, k, v, k1, k2, v1, v2, runs) -> torch.Tensor:  # type: ignore[no-untyped-def]
    return draft_attention(q, (k, v), [(k1, v1), (k2, v2)], runs)


def test_attention_gradients_are_those_of_finite_differences(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(module, "BLOCK", 2)
    tensors, runs = attention_inputs()
    assert torch.autograd.gradcheck(lambda *t: attend(*t, runs), tensors)


def test_attention_equals_the_written_out_softmax() -> None:
    (q, k, v, k1, k2, v1, v2), runs = attention_inputs()
    got = attend(q, k, v, k1, k2, v1, v2, runs)
    for run in runs:
        for i in range(run.begin, run.end):
            seen = slice(run.document, run.first + i - run.begin + 1)
            for head in range(4):
                kv = head // 2
                keys = torch.cat([k[kv, seen], k1[kv, i, None], k2[kv, i, None]])
                values = torch.cat([v[kv, seen], v1[kv, i, None], v2[kv, i, None]])
                weights = (keys @ q[head, i] * 8**-0.5).softmax(0)
                assert torch.allclose(got[head, i], weights @ values)
