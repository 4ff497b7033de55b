"""Predicted acceptance of heads on the held-out conversations, all and by kind.

    python recipes/smollm2/judge.py smollm2 [HEAD ...]

Teacher-forced on the target's own text; no engine runs.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from vllm_eagle3.embedded import resolve_head, resolve_target
from vllm_eagle3.head_io import read_head
from vllm_eagle3.train.data import read_rows
from vllm_eagle3.train.evaluate import PredictedAcceptance, predict_acceptance
from vllm_eagle3.train.features import TargetFeatures

DRAFT_TOKENS = 5


def main() -> None:
    target = resolve_target("smollm2")
    rows = read_rows([Path(__file__).with_name("held_out.jsonl.gz")])
    for name in sys.argv[1:] or ["smollm2"]:
        loaded = read_head(resolve_head(name), target, torch.float32)
        features = TargetFeatures(target, loaded.config.tap_ids, loaded.vocab)
        predicted = predict_acceptance(
            loaded.head, features, loaded.vocab, rows, DRAFT_TOKENS, 1024
        )
        print(name, _line(predicted))
        for kind, part in predicted.by_kind().items():
            print(f"  {kind}: {_line(part)}")


def _line(predicted: PredictedAcceptance) -> str:
    low, high = predicted.greedy.length_interval()
    return f"{predicted.acceptance_length:.3f} ({low:.2f} to {high:.2f})"


if __name__ == "__main__":
    main()
