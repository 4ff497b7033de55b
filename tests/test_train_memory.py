"""Memory of a training step grows linearly with the length of a row."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.test_train_ttt import HIDDEN, make_head
from vllm_eagle3.train.ttt import unroll


class LargestTensor(TorchDispatchMode):
    """Remembers the largest tensor that any operation returned."""

    size = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(tensor, torch.Tensor):
                # A view of an expanded tensor owns no more than its storage.
                own = tensor.untyped_storage().nbytes() // tensor.element_size()
                self.size = max(self.size, min(tensor.numel(), own))
        return out


def largest_tensor(tokens: int) -> int:
    head = make_head().float()
    taps, embeds = torch.randn(1, tokens, 3 * HIDDEN), torch.randn(1, tokens, HIDDEN)
    span_ids = torch.ones(1, tokens, dtype=torch.int64)
    span_ids[:, : tokens // 4] = 0
    with LargestTensor() as largest:
        steps = list(unroll(head, taps, embeds, span_ids, 3))
        sum(step.hidden.sum() for step in steps).backward()
    assert len(steps) == 3
    return largest.size


def test_no_tensor_grows_with_the_square_of_the_length() -> None:
    short, long = largest_tensor(1024), largest_tensor(4096)
    # Scores are [heads, block, tokens]; one of [heads, tokens, tokens] would be 16x.
    assert short > 4 * 1024
    assert long <= 4.1 * short


_STEP = """
import resource, sys, torch
from vllm_eagle3 import embedded
from vllm_eagle3.train.config import validate
from vllm_eagle3.train.data import Row, collate
from vllm_eagle3.train.start import RunData, read_target_config, start_run
from vllm_eagle3.train.step import TrainingStep

config = validate({"target": str(embedded.target_path("smollm2")), "rows": ["-"],
                   "out": "-"}, "config")
ids = torch.randint(0, 49152, (2048,)).tolist()
row = Row("x", tuple(ids), ((64, 2048, 0.0),))
data = RunData([row], [row], {}, torch.arange(49152).flip(0))
start = start_run(config, read_target_config(config), data)
module = TrainingStep(start.head, start.vocab, config)
optimizer = torch.optim.AdamW(start.head.parameters(), fused=True)
for _ in range(2):
    batch = collate([row])
    module(batch, start.features(batch)).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print("peak", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6)
"""


@pytest.mark.slow
def test_embedded_target_trains_at_length_2048_in_less_than_6_gb() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _STEP], capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stderr
    peak = float(done.stdout.split("peak")[1])
    print(f"peak at length 2048: {peak:.2f} GB")
    assert peak < 6
