"""Our trees in xFormers' terms; its kernels need CUDA and are not run here."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch

from tests.tree_cases import Case, Parents, chain, deep, make_batch, random_tree, wide
from vllm_eagle3.tree_attention import tree_attention
from vllm_eagle3.tree_bits import ancestor_bits, unpack_bits
from vllm_eagle3.xformers_tree import (
    attention_inputs,
    tree_choices,
    tree_metadata,
    xformers_tree_attention,
)

needs_xformers = pytest.mark.skipif(
    importlib.util.find_spec("xformers") is None, reason="xformers is not installed"
)
TREES = {
    "drawn": [-1, -1, 0, 0],
    "chain": chain(5),
    "wide": wide(5),
    "deep": deep(9),
    "child of a late node": [-1, 0, -1, 1, 2, 0],
    **{f"random {seed}": random_tree(16, seed) for seed in range(5)},
}
every_tree = pytest.mark.parametrize("tree", TREES.values(), ids=TREES)


def ancestors(tree: Parents) -> torch.Tensor:
    return unpack_bits(ancestor_bits(torch.tensor([tree])))[0]


def test_drawn_tree_has_the_drawn_choices() -> None:
    choices, order = tree_choices(torch.tensor(TREES["drawn"]))
    assert choices == [(0,), (1,), (0, 0), (0, 1)]
    assert order.tolist() == [0, 1, 2, 3]


@every_tree
def test_a_choice_begins_with_the_choices_of_its_ancestors(tree: Parents) -> None:
    choices, order = tree_choices(torch.tensor(tree))
    begins = [[a[: len(b)] == b for b in choices] for a in choices]
    assert torch.equal(torch.tensor(begins), ancestors(tree)[order][:, order])
    assert choices == sorted(choices, key=lambda c: (len(c), c))


@needs_xformers
@every_tree
def test_metadata_describes_our_tree(tree: Parents) -> None:
    parents = torch.tensor(tree)
    metadata, rows = tree_metadata(parents, torch.float32)
    visible = torch.zeros(len(tree) + 1, len(tree) + 1, dtype=torch.bool)
    visible[:, 0] = True
    visible[1:, 1:] = ancestors(tree)
    assert torch.equal(metadata.attention_bias == 0, visible[rows][:, rows])
    depths = visible.sum(1) - 1
    assert metadata.tree_seq_position_ids.tolist() == depths[rows].tolist()
    parent_rows = rows[metadata.parent_node_indices]
    assert parent_rows.tolist() == (parents[rows[1:] - 1] + 1).tolist()


def stand_in(
    q: torch.Tensor,
    spec_k: torch.Tensor,
    spec_v: torch.Tensor,
    cache_k: torch.Tensor,
    cache_v: torch.Tensor,
    spec_attn_bias: torch.Tensor,
    prefix_attn_bias: Any,
) -> torch.Tensor:
    """The contract of xFormers' op in one softmax; [1, rows, groups, heads, dim]."""
    prefix = prefix_attn_bias.materialize((q.shape[1], cache_k.shape[1]))
    bias = torch.cat([prefix, spec_attn_bias], dim=1)
    k, v = torch.cat([cache_k, spec_k], 1), torch.cat([cache_v, spec_v], 1)
    scores = torch.einsum("bmghd,bnghd->bghmn", q, k) * q.shape[-1] ** -0.5
    return torch.einsum("bghmn,bnghd->bmghd", (scores + bias).softmax(-1), v)


@needs_xformers
@every_tree
def test_inputs_give_the_attention_of_our_reference(tree: Parents) -> None:
    batch = make_batch(Case([tree], [13], heads=6, kv_heads=2))
    inputs, rows = attention_inputs(
        batch.queries[0], batch.keys[0], batch.values[0], torch.tensor(tree)
    )
    expected = tree_attention(*batch.args, batch.scale)
    torch.testing.assert_close(stand_in(**inputs)[0].flatten(1, 2), expected[rows])


def test_a_cpu_is_refused() -> None:
    x = torch.zeros(3, 2, 32)
    with pytest.raises(ValueError, match="got a tensor on cpu"):
        xformers_tree_attention(x[:2], x, x, torch.tensor([-1]))


def test_a_tree_without_nodes_is_refused() -> None:
    with pytest.raises(ValueError, match="got no nodes"):
        tree_metadata(torch.empty(0, dtype=torch.int64), torch.float32)


@pytest.mark.skipif(
    importlib.util.find_spec("xformers") is not None, reason="xformers is installed"
)
def test_missing_xformers_is_named() -> None:
    with pytest.raises(ValueError, match="xformers: not installed"):
        tree_metadata(torch.tensor([-1]), torch.float32)


@pytest.mark.gpu
@needs_xformers
@every_tree
def test_xformers_and_our_kernel_agree(tree: Parents) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    batch = make_batch(Case([tree], [13], heads=6, kv_heads=2, dtype=torch.bfloat16))
    dense = (batch.queries[0], batch.keys[0], batch.values[0], torch.tensor(tree))
    theirs = xformers_tree_attention(*(x.cuda() for x in dense))
    ours = tree_attention(*(x.cuda() for x in batch.args), batch.scale)
    torch.testing.assert_close(theirs, ours, atol=1e-2, rtol=1e-2)
