"""EAGLE-3 decoding of one request on a plain PyTorch target: the method in one page.

The engine does the same for a batch inside vLLM, with the same functions for growing,
verifying and committing; a test compares the two step by step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from .argmax import argmax
from .drafter import TreeShape, grow
from .plain import PlainHead, PlainTarget
from .tree import DraftTree
from .verify import Verdict, match_tree

# pick(logits [rows, vocab]) -> the target's token at each row, [rows]
Pick = Callable[[torch.Tensor], torch.Tensor]


def greedy(logits: torch.Tensor) -> torch.Tensor:
    """The target's own choice at temperature 0."""
    return argmax(logits)


@dataclass(frozen=True)
class Step:
    """One target pass: the drafts it judged, and its verdict."""

    tree: DraftTree
    verdict: Verdict


def decode(
    target: PlainTarget,
    head: PlainHead,
    prompt_ids: list[int],
    max_tokens: int,
    shape: TreeShape,
    pick: Pick = greedy,
) -> tuple[list[int], list[Step]]:
    """Generate `max_tokens` tokens; return them and the steps that made them."""
    # The target reads the prompt and says the first token.
    prompt = torch.tensor(prompt_ids)
    causal = torch.ones(len(prompt), len(prompt), dtype=torch.bool).tril()
    logits, taps = target.forward(prompt, torch.arange(len(prompt)), causal)
    output = [int(pick(logits[-1:]))]
    # The head always reads a feature beside the token that came after it.
    following = torch.tensor([*prompt_ids[1:], output[-1]])
    steps: list[Step] = []
    while len(output) < max_tokens:
        tree = grow(
            head.extend(following, taps), head.advance, head.to_target_ids, shape
        )
        # One target pass judges the root (the last token) and every node.
        rows = torch.cat([torch.tensor([output[-1]]), tree.token_ids[0]])
        depths = torch.cat([torch.zeros(1, dtype=torch.int64), tree.depths[0]])
        logits, taps = target.forward(rows, depths, _root_and_ancestors(tree))
        verdict = match_tree(
            tree.token_ids,
            tree.parents,
            torch.tensor([tree.num_nodes]),
            pick(logits)[None],
        )
        # Only the root and the accepted path stay, in cache and features alike.
        path = torch.cat([torch.zeros(1, dtype=torch.int64), verdict.nodes[0] + 1])
        target.commit(len(rows), path)
        taps, following = taps[path], verdict.token_ids[0]
        output += following.tolist()
        steps.append(Step(tree, verdict))
    return output[:max_tokens], steps


def _root_and_ancestors(tree: DraftTree) -> torch.Tensor:
    """[1 + num_nodes, 1 + num_nodes]: every row sees the root and its ancestors."""
    visible = torch.zeros(tree.num_nodes + 1, tree.num_nodes + 1, dtype=torch.bool)
    visible[:, 0] = True
    visible[1:, 1:] = tree.ancestor_mask()[0]
    return visible
