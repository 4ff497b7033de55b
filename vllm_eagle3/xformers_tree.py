"""Our trees for xFormers' tree attention: an oracle, and an alternative on CUDA.

`xformers.ops.tree_attention` attends to a prefix and to a tree apart and merges the two
by log-sum-exp. It names a node by the ranks of its path and sorts nodes by depth and
then by path, so rows change places on the way in and back:

    root ─┬─ 0 ─┬─ 2          node      0     1     2      3
          │     └─ 3          choice   (0)   (1)  (0,0)  (0,1)
          └─ 1

It serves one tree on plain, dense keys, as `plain.py` has them. It knows neither a
softcap nor sliding windows, scales by head_dim ** -0.5, and has kernels for CUDA only.
"""

from __future__ import annotations

from typing import Any

import torch

Choice = tuple[int, ...]


def tree_choices(parents: torch.Tensor) -> tuple[list[Choice], torch.Tensor]:
    """Name the nodes of one tree as xFormers does.

    Args:
        parents: [num_nodes], node index or -1 for the root; below the node's index.

    Returns:
        Choices in xFormers' order, and their index -> node, [num_nodes].
    """
    choices: list[Choice] = []
    num_children: dict[int, int] = {}
    for parent in parents.tolist():
        rank = num_children.get(parent, 0)
        num_children[parent] = rank + 1
        choices.append((*(choices[parent] if parent >= 0 else ()), rank))
    order = sorted(range(len(choices)), key=lambda n: (len(choices[n]), choices[n]))
    return [choices[node] for node in order], torch.tensor(order, dtype=torch.int64)


def tree_metadata(
    parents: torch.Tensor,  # [num_nodes]
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
) -> tuple[Any, torch.Tensor]:
    """xFormers' `TreeAttnMetadata` of one tree, and its row -> our row.

    Raises:
        ValueError: a tree without nodes, or xFormers is not installed.
    """
    if parents.numel() == 0:
        raise ValueError("tree: got no nodes, want at least 1 for xFormers")
    try:
        from xformers.ops.tree_attention import TreeAttnMetadata
    except ImportError as error:
        raise ValueError(
            "xformers: not installed; `pip install xformers`, or use "
            "vllm_eagle3.tree_attention, which needs none"
        ) from error
    choices, order = tree_choices(parents)
    rows = torch.cat([order.new_zeros(1), order + 1])
    return TreeAttnMetadata.from_tree_choices(choices, dtype, device), rows.to(device)


def attention_inputs(
    q: torch.Tensor,  # [1 + num_nodes, num_heads, head_dim]
    k: torch.Tensor,  # [context + 1 + num_nodes, num_kv_heads, head_dim]
    v: torch.Tensor,  # [context + 1 + num_nodes, num_kv_heads, head_dim]
    parents: torch.Tensor,  # [num_nodes]
) -> tuple[dict[str, Any], torch.Tensor]:
    """Arguments of xFormers' `tree_attention`, and its row -> our row.

    Raises:
        ValueError: no prefix, or as `tree_metadata`.
    """
    num_rows, num_heads, head_dim = q.shape
    context, num_kv_heads = k.shape[0] - num_rows, k.shape[1]
    if context < 1:
        raise ValueError(
            f"k: got {k.shape[0]} keys for {num_rows} rows, want a prefix before them"
        )
    metadata, rows = tree_metadata(parents, q.dtype, q.device)
    from xformers.ops.fmha.attn_bias import BlockDiagonalPaddedKeysMask

    group = num_heads // num_kv_heads
    # [1, keys, num_kv_heads, group, head_dim]; the heads of a group share memory.
    wide_k, wide_v = (x[None, :, :, None].expand(-1, -1, -1, group, -1) for x in (k, v))
    inputs = {
        "q": q[rows].view(1, num_rows, num_kv_heads, group, head_dim),
        "spec_k": wide_k[:, context + rows],
        "spec_v": wide_v[:, context + rows],
        "cache_k": wide_k[:, :context],
        "cache_v": wide_v[:, :context],
        "spec_attn_bias": metadata.attention_bias,
        "prefix_attn_bias": BlockDiagonalPaddedKeysMask.from_seqlens(
            q_seqlen=[num_rows],
            kv_padding=context,
            kv_seqlen=[context],
            device=q.device,
        ),
    }
    return inputs, rows


def xformers_tree_attention(
    q: torch.Tensor,  # [1 + num_nodes, num_heads, head_dim]
    k: torch.Tensor,  # [context + 1 + num_nodes, num_kv_heads, head_dim]
    v: torch.Tensor,  # [context + 1 + num_nodes, num_kv_heads, head_dim]
    parents: torch.Tensor,  # [num_nodes]
) -> torch.Tensor:
    """Attend from the root and the nodes of one tree, [1 + num_nodes, heads, dim].

    Raises:
        ValueError: tensors that are not on a GPU, or as `attention_inputs`.
    """
    if not q.is_cuda:
        raise ValueError(
            f"q: got a tensor on {q.device}, xFormers' tree attention needs CUDA; "
            "use vllm_eagle3.tree_attention on other devices"
        )
    inputs, rows = attention_inputs(q, k, v, parents)
    from xformers.ops.tree_attention import tree_attention

    out = tree_attention(**inputs).flatten(2, 3)[0]
    return torch.empty_like(q).index_copy_(0, rows, out)
