"""The draft-parity gate: the trainer's head and the engine's compute the same.

Rows are replayed through vLLM's own head module, in the engine, with its cache and
its attention kernel; every tensor on the way is recorded. The trainer's module is
given the same inputs, unrolled as in training, and compared tensor by tensor in the
order in which they are computed, so that the first one that differs names the fault:

    taps            transformers and vLLM run the target differently, or tap ids mean
                    other layers
    fused           norms in front of `fc`
    step 0          attention, rotary positions, residuals
    step 1 and on   what is fed back, and positions of drafts
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from ..bench.process import WorkerProcess
from ..train.ttt import unroll
from .predict import Predictor, prompt_batch

# Largest difference over the largest value, both in float32.
TOLERANCE = 2e-3


@dataclass(frozen=True)
class Difference:
    """A tensor that differs: its name, by how much, and in which row."""

    name: str
    relative: float
    row: int

    def __str__(self) -> str:
        return (
            f"{self.name} differs by {self.relative:.2g} of its largest value in row "
            f"{self.row} (allowed {TOLERANCE:g})"
        )


def first_difference(
    predictor: Predictor,
    worker: WorkerProcess,
    rows: Sequence[Sequence[int]],
    num_steps: int,
    folder: Path,
) -> Difference | None:
    """Replay `rows` through both and return the first tensor that differs.

    Args:
        predictor: target and head in float32.
        worker: an engine with that head in float32, drafting chains of `num_steps`.
        folder: for the tensors.

    Raises:
        WorkerError: the engine failed.
    """
    for number, ids in enumerate(rows):
        path = folder / f"draft-{number}.safetensors"
        worker.capture_draft(ids, path)
        for name, ours, theirs in pairs(predictor, ids, load_file(path), num_steps):
            relative = _relative_difference(ours, theirs)
            # A NaN fails every comparison, so what is right is asked for.
            if not relative <= TOLERANCE:
                return Difference(name, relative, number)
    return None


@torch.no_grad()
def pairs(
    predictor: Predictor,
    ids: Sequence[int],
    recorded: Mapping[str, torch.Tensor],
    num_steps: int,
) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """(name, ours, the engine's) in the order of computation.

    The trainer's module reads the engine's taps and tokens, so that a difference in
    the target does not hide one in the head.
    """
    head, taps = predictor.head, recorded["taps"]
    own_taps = predictor.target.read(prompt_batch(ids, 1)).taps[0]
    ours, theirs = (t.chunk(len(head.config.tap_ids), -1) for t in (own_taps, taps))
    for tap_id, one, other in zip(head.config.tap_ids, ours, theirs, strict=True):
        yield f"tap {tap_id}", one, other
    yield "fused", head.fuse(taps), recorded["head.fused"]
    for step in _replayed(predictor, ids, recorded, num_steps):
        k, hidden = step
        yield (
            f"step {k}, feedback",
            head.feedback(hidden),
            recorded[f"head.{k}.feedback"],
        )
        yield f"step {k}, logits", head.logits(hidden), recorded[f"head.{k}.logits"]


def _replayed(
    predictor: Predictor,
    ids: Sequence[int],
    recorded: Mapping[str, torch.Tensor],
    num_steps: int,
) -> Iterator[tuple[int, torch.Tensor]]:
    """(step, hidden [1, hidden]) of the draft that starts at the last of `ids`."""
    first = recorded["head.0.token_ids"]
    drafted = [recorded[f"head.{k}.token_ids"] for k in range(1, num_steps)]
    # The last step reads the last draft; what it predicts needs a place in the text.
    following = [int(t) for t in (first, *drafted)] + [0]
    batch = prompt_batch([*ids, *following], len(following))
    taps = F.pad(recorded["taps"], (0, 0, 0, len(following)))[None]
    embeds = F.embedding(batch.ids, predictor.embedding)
    start = len(ids) - 1
    for step in unroll(predictor.head, taps, embeds, batch.span_ids, num_steps):
        yield step.k, step.hidden[step.start == start]


def _relative_difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    if ours.shape != theirs.shape:
        return float("inf")
    largest = theirs.abs().max().clamp(min=1e-6)
    return float((ours - theirs).abs().max() / largest)
