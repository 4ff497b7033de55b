"""Targets of other families: a head is trained for each, and its trees are served."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine_run import EnginePool, Run
from tests.models.families import FAMILIES, VOCAB, WINDOW, write_family
from tests.near_ties import differing
from tests.tree_engine import counted_commits, tree_settings
from vllm_eagle3.train.config import TrainConfig
from vllm_eagle3.train.trainer import Trainer

pytest.importorskip("vllm")
pytestmark = pytest.mark.engine

REPLY = 24
SETTINGS = {
    "gemma2": {"model_impl": "transformers"},
}


def _prompts() -> list[list[int]]:
    """Some longer than a sliding window, some shorter."""
    generator = torch.Generator().manual_seed(6)
    lengths = (5, 9, WINDOW, 2 * WINDOW + 3, 47)
    return [
        torch.randint(3, VOCAB, (n,), generator=generator).tolist() for n in lengths
    ]


@torch.no_grad()
def _plain_run(model: Any) -> Run:
    """Greedy replies of transformers; vLLM changes its classes later."""
    replies, gaps = [], []
    for prompt in _prompts():
        out = model.generate(
            torch.tensor([prompt]),
            max_new_tokens=REPLY,
            min_new_tokens=REPLY,
            do_sample=False,
            return_dict_in_generate=True,
            output_logits=True,
        )
        replies.append(out.sequences[0, len(prompt) :].tolist())
        best = torch.cat(out.logits).log_softmax(-1).topk(2).values
        gaps.append((best[:, 0] - best[:, 1]).tolist())
    return Run(replies, gaps, 0, 0)


def _train(replies: list[list[int]], target: Path, out: Path) -> Path:
    """A head that has seen the target's own replies."""
    rows = out / "rows.jsonl"
    out.mkdir()
    with rows.open("w") as file:
        for prompt, reply in zip(_prompts() * 2, replies * 2, strict=True):
            spans = [[len(prompt), len(prompt + reply), 0.0]]
            row = {"kind": "x", "ids": prompt + reply, "spans": spans}
            file.write(json.dumps(row) + "\n")
    config = TrainConfig.model_validate(
        {
            "target": str(target),
            "rows": [str(rows)],
            "out": str(out / "run"),
            "draft_vocab_size": VOCAB,
            "num_steps": 3,
            "epochs": 30.0,
            "learning_rate": 5e-3,
            "tokens_per_batch": 512,
            "held_out_rows": 1,
            "evaluate_every": 100,
        }
    )
    Trainer(config, lambda record: None).train()
    return out / "run" / "head"


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(name, marks=() if name == "llama3" else pytest.mark.slow)
        for name in FAMILIES
    ],
)
def test_target_is_trained_for_and_served(
    family: str, engine: EnginePool, tmp_path: Path
) -> None:
    from vllm import SamplingParams

    model = write_family(family, tmp_path / "target")
    plain = _plain_run(model)
    head = _train(plain.token_ids, tmp_path / "target", tmp_path / "train")
    handle = engine(
        tmp_path / "target",
        head,
        max_model_len=256,
        max_num_seqs=8,
        max_num_batched_tokens=256,
        **tree_settings(4, 3, 8),
        **SETTINGS.get(family, {}),
    )
    greedy = SamplingParams(
        temperature=0, max_tokens=REPLY, ignore_eos=True, detokenize=False
    )
    with counted_commits(handle) as commits:
        run = handle.run(_prompts(), greedy)
    assert not differing(plain, run.token_ids)
    assert commits.trees > 0
    assert run.accepted > len(_prompts()) * REPLY / 4
