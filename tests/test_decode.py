"""The plain oracle: it equals plain decoding, and the engine equals it step by step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models import random_llama
from tests.tree_engine import judged_steps
from vllm_eagle3.decode import Step, decode
from vllm_eagle3.drafter import TreeShape
from vllm_eagle3.head_io import read_head
from vllm_eagle3.plain import PlainHead, PlainTarget

Models = Callable[[str], Path]
MAX_TOKENS = 40
PROMPTS = [random_llama.known_prompts()[i] for i in (1, 4)]


def oracle(models: Models, head_name: str) -> tuple[PlainTarget, PlainHead]:
    loaded = read_head(models(head_name), models("f1"))
    target = PlainTarget.load(models("f1"), loaded.config.tap_ids, torch.float32)
    return target, PlainHead(loaded.head.float(), loaded.vocab, target)


def plain_tokens(models: Models, prompt: list[int]) -> list[int]:
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(models("f1"), dtype=torch.float32)
    ids = torch.tensor([prompt])
    for _ in range(MAX_TOKENS):
        with torch.no_grad():
            best = model(ids).logits[:, -1].argmax(-1)
        ids = torch.cat([ids, best[None]], dim=1)
    return ids[0, len(prompt) :].tolist()


SHAPES = [
    TreeShape.chain(1),
    TreeShape.chain(3),
    TreeShape(num_nodes=12, top_k=4, depth=3),
    TreeShape(num_nodes=8, top_k=8, depth=1),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("head_name", ["h1", "h3"])
def test_any_shape_and_head_decodes_the_targets_own_text(
    models: Models, shape: TreeShape, head_name: str
) -> None:
    target, head = oracle(models, head_name)
    tokens, steps = decode(target, head, PROMPTS[0], MAX_TOKENS, shape)
    assert tokens == plain_tokens(models, PROMPTS[0])
    accepted = sum(int(step.verdict.num_accepted) for step in steps)
    # H1 knows this text by heart; the random head must not slip anything in.
    assert accepted > len(steps) // 2 if head_name == "h1" else accepted <= len(steps)


def test_target_cache_after_commit_is_that_of_a_plain_run(models: Models) -> None:
    target, head = oracle(models, "h1")
    shape = TreeShape(num_nodes=12, top_k=4, depth=3)
    tokens, _ = decode(target, head, PROMPTS[0], MAX_TOKENS, shape)
    fresh, _ = oracle(models, "h1")
    ids = torch.tensor([*PROMPTS[0], *tokens])
    causal = torch.ones(len(ids), len(ids), dtype=torch.bool).tril()
    fresh.forward(ids, torch.arange(len(ids)), causal)
    kept = min(len(ids), target.cache.get_seq_length())
    assert kept >= len(PROMPTS[0]) + MAX_TOKENS - 5
    for ours, plain in zip(target.cache.layers, fresh.cache.layers, strict=True):
        assert torch.allclose(
            ours.keys[..., :kept, :], plain.keys[..., :kept, :], atol=1e-4
        )


STEP_SHAPES = {
    "chain": TreeShape.chain(3),
    "tree": TreeShape(num_nodes=12, top_k=4, depth=3),
}


@pytest.mark.engine
@pytest.mark.parametrize("kind", STEP_SHAPES)
def test_engine_equals_the_oracle_step_by_step(
    models: Models, engine: Any, kind: str
) -> None:
    """The same trees (as sets of paths), accepted paths and emitted tokens."""
    from vllm import SamplingParams

    shape = STEP_SHAPES[kind]
    options: dict[str, Any] = {"shape": kind}
    if kind == "tree":
        options |= {"top_k": shape.top_k, "depth": shape.depth}
    handle = engine(
        "f1",
        "h1",
        num_speculative_tokens=shape.num_nodes,
        additional_config={"vllm_eagle3": options},
    )
    params = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)
    for prompt in PROMPTS:
        with judged_steps(handle) as judged:
            run = handle.run([prompt], params)
        target, head = oracle(models, "h1")
        tokens, steps = decode(target, head, prompt, MAX_TOKENS, shape)
        assert run.token_ids[0] == tokens
        got = [(step.paths(), step.emitted) for step in judged]
        expected = [(paths(step), step.verdict.token_ids[0].tolist()) for step in steps]
        # The engine drafts no further than its last token needs.
        assert got[: len(expected) - 2] == expected[: len(expected) - 2]
        assert run.accepted > len(steps) // 2


def paths(step: Step) -> set[tuple[int, ...]]:
    """Tokens from the root to each node of the oracle's tree."""
    tree = step.tree
    return {tuple(tree.token_ids[0][seen].tolist()) for seen in tree.ancestor_mask()[0]}
