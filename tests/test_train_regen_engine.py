"""Replies through a real engine: the same tokens as in one batch, in any order."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from vllm_eagle3.engine import EngineMode, EngineSpec, Sampling
from vllm_eagle3.train.data import read_rows
from vllm_eagle3.train.regen import Ask, write_replies

pytestmark = pytest.mark.engine


def test_streamed_replies_are_those_of_a_batch(
    models: Callable[[str], Path], tmp_path: Path
) -> None:
    pytest.importorskip("vllm")
    from vllm_eagle3.integration.engine import VllmEngine

    spec = EngineSpec(
        str(models("f1")),
        dtype="float32",
        max_model_len=128,
        max_num_seqs=3,
        mode=EngineMode(enforce_eager=True, threads=1),
    )
    engine = VllmEngine(spec)
    prompts = [(5 + n, 9, 3 * n) for n in range(8)]
    lengths = [4, 30, 7, 12, 25, 3, 9, 16]  # they end out of order
    asks = [
        Ask(ids, Sampling(0.0, length, ignore_eos=True))
        for ids, length in zip(prompts, lengths, strict=True)
    ]
    out = tmp_path / "rows.jsonl"
    assert write_replies(engine, asks, out, lambda *_: None) == sum(lengths)
    longest = Sampling(0.0, max(lengths), ignore_eos=True)
    whole = engine.generate(prompts, longest)
    assert engine.generate(prompts, longest, at_once=2) == whole
    rows = read_rows([out])
    assert [row.ids[:3] for row in rows] != prompts
    replies = {row.ids[:3]: row.ids[3:] for row in rows}
    for ids, length, reply in zip(prompts, lengths, whole, strict=True):
        assert replies[ids] == reply.token_ids[:length]
