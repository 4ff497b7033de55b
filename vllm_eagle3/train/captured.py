"""Features that the serving engine computed, in place of a forward of transformers.

The engine runs the target as it will be served, kernels and parallelism included, so a
head learns from exactly the states that it will read. Its worker records them (see
`integration.capture`); a batch is captured, trained on and dropped.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import load_file
from torch.nn.utils.rnn import pad_sequence

from .data import Batch
from .features import TargetFeatures


class Captures(Protocol):
    """Who computes states; see `engine.Engine.capture`."""

    def capture(self, prompts: Sequence[Sequence[int]], path: Path) -> None: ...


class CapturedFeatures(TargetFeatures):
    """`TargetFeatures` whose states come from an engine.

    Embedding and output layer are still those of transformers: the engine is asked
    for states, not for a law over the whole vocabulary at every place.

    Args:
        engine: has a head with these taps.
        others: as of `TargetFeatures`.
    """

    def __init__(self, engine: Captures, *others: Any) -> None:
        super().__init__(*others)
        self.engine = engine

    def states(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        # Nothing is learnt from a row's last token, and it may have no place left for
        # the new token that an engine must make.
        prompts = [row.ids[:-1] for row in batch.rows]
        with tempfile.TemporaryDirectory(prefix="vllm-eagle3-states-") as folder:
            path = Path(folder) / "states.safetensors"
            self.engine.capture(prompts, path)
            stored = load_file(path)
        taps, last = (
            self._padded([stored[f"{n}.{name}"] for n in range(len(prompts))], batch)
            for name in ("taps", "last")
        )
        return taps, last

    def _padded(self, states: list[torch.Tensor], batch: Batch) -> torch.Tensor:
        """[rows, tokens, ...], zero where nothing was captured."""
        padded = pad_sequence(states, batch_first=True)
        missing = batch.ids.shape[1] - padded.shape[1]
        padded = torch.nn.functional.pad(padded, (0, 0, 0, missing))
        return padded.to(self.device, self.model.dtype)

    def fingerprint(self) -> dict[str, Any]:
        return super().fingerprint() | {"features": "vllm"}
