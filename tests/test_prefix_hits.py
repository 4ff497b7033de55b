"""Hits in the prefix cache leave one token of a block to be computed again."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.engine_run import EngineHandle, EnginePool
from tests.models.random_llama import known_prompts
from tests.test_tree_kv import _filled, _generate, _layers
from tests.tree_engine import counter, runner_of, tree_settings

pytest.importorskip("vllm")
pytestmark = pytest.mark.engine

SIZE = 32
SHAPES: dict[str, dict[str, Any]] = {
    "chain": {"num_speculative_tokens": 5},
    "tree": tree_settings(4, 5, 12),
    "auto": {"additional_config": {"vllm_eagle3": {"shape": "auto"}}},
}
SETTINGS = {"block_size": SIZE, "max_model_len": 256, "enable_prefix_caching": True}


def _prompt(length: int, last: int = 0) -> list[int]:
    """The same beginning for all lengths; `last` replaces the last token."""
    prompt = [3 + 7 * place % 89 for place in range(length)]
    return [*prompt[:-1], last] if last else prompt


def _cached_tokens(handle: EngineHandle, prompt: list[int]) -> int:
    from vllm import SamplingParams

    before = counter(handle, "vllm:prefix_cache_hits")
    params = SamplingParams(temperature=0, max_tokens=2, detokenize=False)
    (output,) = handle.llm.generate(
        [{"prompt_token_ids": prompt}], params, use_tqdm=False
    )
    hits = counter(handle, "vllm:prefix_cache_hits") - before
    assert hits == output.num_cached_tokens
    return int(hits)


@pytest.mark.parametrize("shape", SHAPES)
def test_all_but_the_last_token_of_the_cached_blocks_is_taken(
    engine: EnginePool, shape: str
) -> None:
    handle = engine("f1", "h1", **SETTINGS, **SHAPES[shape])
    assert _cached_tokens(handle, _prompt(5 * SIZE + 9)) == 0
    for length, cached in {
        SIZE - 1: 0,
        SIZE: SIZE - 1,
        SIZE + 1: SIZE - 1,
        2 * SIZE - 1: SIZE - 1,
        2 * SIZE: 2 * SIZE - 1,
        2 * SIZE + 1: 2 * SIZE - 1,
        5 * SIZE + 9: 5 * SIZE - 1,
    }.items():
        assert _cached_tokens(handle, _prompt(length)) == cached, length
    _generate(handle, known_prompts()[:7], 20)
    assert counter(handle, "vllm:spec_decode_num_accepted_tokens") > 0


@pytest.mark.parametrize("shape", ["chain", "tree"])
def test_copied_blocks_hold_what_a_fresh_prefill_writes(
    engine: EnginePool, shape: str
) -> None:
    """In the target and the head, for a prompt that differs right behind the block."""
    handle = engine("f1", "h1", **SETTINGS, **SHAPES[shape])
    _generate(handle, [_prompt(3 * SIZE + 20)], 4)
    other = _prompt(3 * SIZE + 1, last=96)
    assert _cached_tokens(handle, [*other, 5]) == 3 * SIZE - 1
    (reply,), (copied,) = _generate(handle, [[*other, 7, 5]], 2)
    handle.llm.reset_prefix_cache()
    (again,), (fresh,) = _generate(handle, [[*other, 7, 5]], 2)
    assert reply == again
    for name, layer in _layers(handle).items():
        mask = _filled(layer, 3)
        got, want = (
            torch.cat([each[name][:3].flatten(), each[name][3][mask]])
            for each in (copied, fresh)
        )
        assert want.abs().max() > 0.1
        torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4, msg=name)


def test_a_block_that_the_same_step_fills_is_not_copied(engine: EnginePool) -> None:
    handle = engine("f1", "h1", **SETTINGS, **SHAPES["tree"])
    handle.llm.reset_prefix_cache()
    copies: list[Any] = []
    runner = runner_of(handle)
    copy = runner._copy_blocks
    runner._copy_blocks = lambda pairs: (copies.extend(pairs), copy(pairs))
    prompts = [_prompt(2 * SIZE + 4), _prompt(2 * SIZE + 4, last=90)]
    try:
        (first, second), _ = _generate(handle, prompts, 20)
        assert not copies
        (again, other), _ = _generate(handle, prompts, 20)
        assert len(copies) == 2
    finally:
        del runner._copy_blocks
    assert (again, other) == (first, second)
    assert first != second
