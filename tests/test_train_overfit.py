"""Twenty rows learnt by heart: what is predicted, and what the engine then accepts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models.shapes import BYTE_OFFSET
from tests.train_runs import config, write_rows
from vllm_eagle3.train.trainer import Best, Trainer

pytestmark = pytest.mark.slow
Models = Callable[[str], Path]
DRAFTS = 5


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(20)
    ids = torch.randint(BYTE_OFFSET, 512, (20, 8), generator=generator)
    return ids.tolist()


@pytest.fixture(scope="module")
def overfitted(
    models: Models, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Best]:
    """(folder of the head, what is predicted on the rows themselves)."""
    folder = tmp_path_factory.mktemp("overfit")
    # Four copies of each row: the held-out ones repeat those that are trained on.
    rows = write_rows(models, folder / "rows.jsonl", prompts(), repeats=4)
    run = config(
        models,
        rows,
        folder / "out",
        draft_vocab_size=512,
        num_steps=DRAFTS,
        draft_tokens=DRAFTS,
        epochs=60.0,
        learning_rate=4e-3,
        held_out_rows=20,
        tokens_per_batch=1024,
        evaluate_every=1000,
        precision="fp32",
    )
    best = Trainer(run, lambda _: None).train()
    return folder / "out/head", best


def test_rows_learnt_by_heart_are_predicted_to_be_accepted(
    overfitted: tuple[Path, Best],
) -> None:
    _, best = overfitted
    low, high = best.summary["interval"]
    assert low <= best.acceptance_length <= high
    # Of 6; replies of 24 tokens end in the middle of a draft.
    assert best.acceptance_length > 4.9
    assert all(alpha > 0.85 for alpha in best.n_alpha)


@pytest.mark.engine
def test_rows_learnt_by_heart_are_accepted_by_the_engine(
    engine: Any, overfitted: tuple[Path, Best]
) -> None:
    from vllm import SamplingParams

    head, _ = overfitted
    params = SamplingParams(
        temperature=0, max_tokens=22, ignore_eos=True, detokenize=False
    )
    found = engine("f1", head, num_speculative_tokens=DRAFTS).run(prompts(), params)
    steps = found.drafted / DRAFTS
    assert steps > 0
    length = 1 + found.accepted / steps
    print(f"measured acceptance length: {length:.2f}")
    assert length > 4.9
