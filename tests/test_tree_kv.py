"""KV after commit equals that of a fresh prefill, in every layer of target and head."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.engine_run import EngineHandle
from tests.models.random_llama import known_prompts, other_prompts
from tests.tree_engine import counted_commits, runner_of, tree_settings

pytestmark = pytest.mark.engine

BLOCK_SIZE = 32
REPLY = 45
# 17, 33, 128 and 31, 65 tokens: replies cross the edges of blocks of 32.
PROMPTS = [*(known_prompts()[i] for i in (2, 4, 6)), *other_prompts()[3:6:2]]


Cached = dict[str, torch.Tensor]  # layer -> [num_blocks, ...], one request's blocks


def _generate(
    handle: EngineHandle, prompts: list[list[int]], length: int
) -> tuple[list[list[int]], list[Cached]]:
    """Replies, and what every layer held of each request after its last step."""
    from vllm import SamplingParams

    params = SamplingParams(
        temperature=0, max_tokens=length, ignore_eos=True, detokenize=False
    )
    runner, layers = runner_of(handle), _layers(handle)
    cached: dict[str, Cached] = {}
    take = runner.take_draft_token_ids

    def recording() -> Any:
        """Called after a step; later its blocks may be another request's."""
        drafts = take()  # the head runs here
        for req_id in runner.input_batch.req_ids:
            blocks = list(runner.requests[req_id].block_ids[0])
            cached[req_id] = {n: x.kv_cache[blocks] for n, x in layers.items()}
        return drafts

    runner.take_draft_token_ids = recording
    try:
        run = handle.run(prompts, params)
    finally:
        runner.take_draft_token_ids = take
    in_order = sorted(cached, key=lambda req_id: int(req_id.split("-")[0]))
    return run.token_ids, [cached[req_id] for req_id in in_order]


def _layers(handle: EngineHandle) -> dict[str, Any]:
    """Attention layers of target and head by name."""
    context = runner_of(handle).vllm_config.compilation_config.static_forward_context
    return {name: layer for name, layer in context.items() if hasattr(layer, "impl")}


def _filled(layer: Any, num_tokens: int) -> torch.Tensor:
    """Mask over the elements of a block that hold the first `num_tokens` tokens.

    Layouts differ, so the layer's own kernel is asked: it writes ones to zeros.
    """
    block = torch.zeros_like(layer.kv_cache[:1])
    shape = (num_tokens, layer.num_kv_heads, layer.head_size)
    ones = torch.ones(shape, dtype=block.dtype)
    layer.impl.do_kv_cache_update(layer, ones, ones, block, torch.arange(num_tokens))
    return block[0] == 1


def _kept(layer: Any, blocks: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """Keys and values of the first tokens, flat, in the layout's own order."""
    full, rest = divmod(num_tokens, BLOCK_SIZE)
    whole = blocks[:full].flatten()
    return torch.cat([whole, blocks[full][_filled(layer, rest)]]) if rest else whole


SHAPES = [(4, 6, 16), pytest.param((8, 3, 24), marks=pytest.mark.slow)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_cache_equals_that_of_a_fresh_prefill(
    engine: Any, shape: tuple[int, int, int]
) -> None:
    handle = engine("f1", "h1", **tree_settings(*shape))
    with counted_commits(handle) as commits:
        replies, grown = _generate(handle, PROMPTS, REPLY)
    assert commits.branches > 0
    # The last token's keys and values are not computed yet.
    texts = [
        prompt + reply[:-1] for prompt, reply in zip(PROMPTS, replies, strict=True)
    ]
    again, fresh = _generate(handle, texts, 1)
    assert [reply[0] for reply in again] == [reply[-1] for reply in replies]
    for name, layer in _layers(handle).items():
        for row, text in enumerate(texts):
            got = _kept(layer, grown[row][name], len(text))
            want = _kept(layer, fresh[row][name], len(text))
            assert want.abs().max() > 0.1
            torch.testing.assert_close(
                got,
                want,
                atol=1e-3,
                rtol=1e-3,
                msg=lambda found, of=(name, row): f"layer, request {of}: {found}",
            )
