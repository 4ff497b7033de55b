"""What users plug into an engine: logits processors, and a reasoning parser.

Requests choose a processor by `SamplingParams.extra_args`.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from vllm.reasoning import ReasoningParserManager
from vllm.reasoning.basic_parsers import BaseThinkingReasoningParser
from vllm.v1.sample.logits_processor import (
    AdapterLogitsProcessor,
    BatchUpdate,
    LogitsProcessor,
)
from vllm.v1.sample.logits_processor.builtin import process_dict_updates


class NoRecent(AdapterLogitsProcessor):
    """extra_args {"recent": n}: none of the last n tokens again, nor an even id."""

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: Any) -> Any:
        window = (params.extra_args or {}).get("recent")
        if window is None:
            return None

        def bar(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
            logits[::2] = -math.inf
            logits[output_ids[-window:]] = -math.inf
            return logits

        return bar


class Phases(LogitsProcessor):
    """extra_args {"phases": n}: low and high ids take turns, n tokens each.

    What it does to a row was settled in `update_state`, as vLLM's own min-tokens does.
    """

    def __init__(self, vllm_config: Any, device: torch.device, pinned: bool) -> None:
        self.requests: dict[int, tuple[int, list[int]]] = {}
        self.high: dict[int, bool] = {}

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        process_dict_updates(
            self.requests,
            batch_update,
            lambda params, _, output_ids: (
                (params.extra_args["phases"], output_ids)
                if "phases" in (params.extra_args or {})
                else None
            ),
        )
        self.high = {
            row: bool(len(output_ids) // length % 2)
            for row, (length, output_ids) in self.requests.items()
        }

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        half = logits.shape[1] // 2
        for row, high in self.high.items():
            logits[row, slice(0, half) if high else slice(half, None)] = -math.inf
        return logits


@ReasoningParserManager.register_module("marks")
class Marks(BaseThinkingReasoningParser):
    """A thought stands between ! and the next double quote."""

    start_token = "!"
    end_token = '"'
