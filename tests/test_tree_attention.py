"""The reference of tree attention: every path of a tree is an ordinary sequence."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F

from tests.tree_cases import CASES, Batch, Case, Parents, make_batch, random_tree
from vllm_eagle3 import tree_attention as module
from vllm_eagle3.tree_attention import (
    implementation,
    reference_tree_attention,
    tree_attention,
)

TOLERANCE = {torch.float32: (1e-5, 1e-5), torch.bfloat16: (1e-2, 8e-3)}


def path_to(tree: Parents, row: int) -> list[int]:
    """Rows from the root to `row`."""
    path = [row]
    while path[0]:
        path.insert(0, tree[path[0] - 1] + 1)
    return path


def causal_attention(
    q: torch.Tensor,  # [rows, heads, head_dim], the last rows of the sequence
    k: torch.Tensor,  # [length, kv_heads, head_dim]
    v: torch.Tensor,
    case: Case,
) -> torch.Tensor:
    """What a plain decoder computes for a sequence; fp32."""
    q, k, v = (x.float().transpose(0, 1) for x in (q, k, v))
    length = k.shape[1]
    position = torch.arange(length)
    distance = position[length - q.shape[1] :, None] - position
    visible = (distance >= 0) & (distance < (case.sliding_window or length + 1))
    if not case.softcap:
        out = F.scaled_dot_product_attention(
            q[None], k[None], v[None], attn_mask=visible, enable_gqa=True
        )[0]
        return out.transpose(0, 1)
    group = q.shape[0] // k.shape[0]
    outs = []
    for head in range(q.shape[0]):
        scores = q[head] @ k[head // group].T * case.head_dim**-0.5
        scores = (scores / case.softcap).tanh() * case.softcap
        scores = scores.where(visible, torch.tensor(-torch.inf))
        outs.append(scores.softmax(-1) @ v[head // group])
    return torch.stack(outs, 1)


def attend(case: Case, batch: Batch) -> torch.Tensor:
    return tree_attention(
        *batch.args,
        batch.scale,
        case.softcap,
        case.sliding_window,
        case.first_row,
    )


@pytest.mark.parametrize("name", CASES)
def test_every_path_is_an_ordinary_sequence(name: str) -> None:
    case = CASES[name]
    batch = make_batch(case)
    out, start = attend(case, batch), 0
    for req, tree in enumerate(case.trees):
        context = case.contexts[req]
        for row in range(case.first_row, len(tree) + 1):
            path = path_to(tree, row)
            sequence = [*range(context), *(context + r for r in path)]
            expected = causal_attention(
                batch.queries[req][path],
                batch.keys[req][sequence],
                batch.values[req][sequence],
                case,
            )
            atol, rtol = TOLERANCE[case.dtype]
            torch.testing.assert_close(
                out[start + row - case.first_row].float(),
                expected[-1],
                atol=atol,
                rtol=rtol,
            )
        start += len(tree) + 1 - case.first_row


def test_result_keeps_shape_and_dtype() -> None:
    batch = make_batch(CASES["bf16"])
    out = attend(CASES["bf16"], batch)
    assert out.shape == batch.args[0].shape and out.dtype == torch.bfloat16


def test_a_request_without_rows_and_padding_rows_do_no_harm() -> None:
    case = Case([random_tree(4)], [9])
    batch = make_batch(case)
    q, k, v, table, contexts, starts, bits = batch.args
    padded = tree_attention(
        torch.cat([q, torch.full_like(q, torch.nan)]),
        k,
        v,
        table.repeat(2, 1),
        contexts.repeat(2),
        torch.cat([starts, starts[-1:]]),
        bits.repeat(2, 1),
        batch.scale,
    )
    assert torch.equal(padded[: len(q)], attend(case, batch))
    assert not padded[len(q) :].any()


def test_a_truncated_tree_ignores_the_masks_behind_it() -> None:
    case = Case([random_tree(8)], [9])
    batch = make_batch(case)
    q, k, v, table, contexts, _, bits = batch.args
    kept = 5
    cut = tree_attention(
        q[:kept], k, v, table, contexts, torch.tensor([0, kept]), bits, batch.scale
    )
    torch.testing.assert_close(cut, attend(case, batch)[:kept])


def test_cache_may_have_any_strides() -> None:
    case = Case([random_tree(8)], [9])
    batch = make_batch(case)
    q, k, v, *rest = batch.args
    fused = torch.stack([k, v], dim=1)  # [num_blocks, 2, block_size, ...]
    out = tree_attention(q, fused[:, 0], fused[:, 1], *rest, batch.scale)
    assert torch.equal(out, attend(case, batch))


@pytest.fixture
def forgotten_choice() -> Iterator[None]:
    implementation.cache_clear()
    yield
    implementation.cache_clear()


def test_a_cpu_gets_the_reference() -> None:
    assert implementation("cpu") is reference_tree_attention


@pytest.mark.skipif(not module.HAS_TRITON, reason="Triton is not installed")
@pytest.mark.usefixtures("forgotten_choice")
def test_a_gpu_gets_the_kernel() -> None:
    assert implementation("cuda").__module__ == "vllm_eagle3.kernels.tree_attention"


@pytest.mark.usefixtures("forgotten_choice")
def test_a_gpu_without_triton_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HAS_TRITON", False)
    with pytest.warns(UserWarning, match="pip install triton"):
        assert implementation("cuda") is reference_tree_attention


def with_argument(batch: Batch, at: int, value: torch.Tensor) -> list[torch.Tensor]:
    args = list(batch.args)
    args[at] = value
    return args


GOOD = make_batch(Case([random_tree(4)], [9]))
Q, K, V, TABLE, CONTEXTS, STARTS, BITS = range(7)


@pytest.mark.parametrize(
    ("at", "value", "message"),
    [
        (Q, GOOD.args[Q][0], r"q: got torch.float32 of shape \(4, 32\)"),
        (Q, GOOD.args[Q].bfloat16(), "want the queries' torch.bfloat16"),
        (Q, GOOD.args[Q][:, :3], "heads: got 3 of size 32 for 2 KV heads"),
        (K, GOOD.args[K][:1], "cache: got keys"),
        (TABLE, GOOD.args[TABLE][0], r"block_table: got shape \(2,\)"),
        (STARTS, GOOD.args[STARTS][:1], r"query_start_loc: .* want \[2\]"),
        (STARTS, torch.tensor([0, 6]), "request 0 has 6 rows, want at most 5"),
        (BITS, GOOD.args[BITS].int(), r"ancestor_bits: .* want int64 \[1, num_nodes\]"),
        (BITS, GOOD.args[BITS].repeat(1, 17), "got 68 nodes, want at most 64"),
    ],
)
def test_arguments_that_do_not_fit_are_named(
    at: int, value: torch.Tensor, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        tree_attention(*with_argument(GOOD, at, value), GOOD.scale)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"softcap": -1.0}, "softcap: got -1.0"),
        ({"sliding_window": 0}, "sliding_window: got 0"),
        ({"first_row": 5}, r"first_row: got 5, want 0\.\.4"),
    ],
)
def test_options_that_cannot_be_are_named(
    options: dict[str, float], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        tree_attention(*GOOD.args, GOOD.scale, **options)
