"""Recording what the target and the head compute, inside the worker.

    taps, last       per prompt: what the head reads, and the states after the final
                     norm; taken where the runner hands them to the drafter
    head's calls     of one prompt: inputs and outputs of vLLM's head module at every
                     step of a draft

The worker writes safetensors files, because tensors do not travel between an engine's
processes as they are. Every rank of tensor parallelism holds the same states; the
first one writes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import nn


class Capture:
    """Collects states by request while it is the runner's `capture`."""

    def __init__(self) -> None:
        # request -> parts of its prompt, in order
        self._taps: dict[str, list[torch.Tensor]] = {}
        self._last: dict[str, list[torch.Tensor]] = {}

    def add(
        self,
        req_ids: list[str],
        starts: np.ndarray,  # [num_reqs + 1], where the rows of a request begin
        last: torch.Tensor,  # [num_tokens, hidden]
        taps: list[torch.Tensor],  # num_taps x [num_tokens, hidden]
    ) -> None:
        """Keep what one step computed, on the CPU."""
        for req_id, begin, end in zip(req_ids, starts, starts[1:], strict=False):
            rows = slice(int(begin), int(end))
            fused = torch.cat([tap[rows] for tap in taps], dim=-1)
            # vLLM appends eight random characters to the id that it was given.
            request = req_id.rsplit("-", 1)[0]
            self._taps.setdefault(request, []).append(fused.cpu())
            self._last.setdefault(request, []).append(last[rows].clone().cpu())

    def tensors(self) -> dict[str, torch.Tensor]:
        """`ID.taps` [tokens, num_taps * hidden] and `ID.last` [tokens, hidden]."""
        parts = {f"{request}.taps": taps for request, taps in self._taps.items()}
        parts |= {f"{request}.last": last for request, last in self._last.items()}
        return {name: torch.cat(pieces) for name, pieces in parts.items()}


class HeadCalls:
    """Inputs and outputs of the head at each step of the drafts of one prompt."""

    def __init__(self, drafter: Any) -> None:
        self._drafter = drafter
        self._calls: list[dict[str, torch.Tensor]] = []
        self._hook = drafter.model.register_forward_hook(self._keep, with_kwargs=True)

    def _keep(
        self, _module: nn.Module, _args: Any, inputs: dict[str, Any], output: Any
    ) -> None:
        hidden, feedback = output
        call = {
            "token_ids": inputs["input_ids"],
            "features": inputs["hidden_states"],
            "hidden": hidden,
            "feedback": feedback,
        }
        # The first call holds the whole prompt: its last row is the draft's start.
        self._calls.append({name: t.detach().clone() for name, t in call.items()})

    def tensors(self, num_tokens: int) -> dict[str, torch.Tensor]:
        """`fused` [num_tokens, hidden]; `K.NAME` of the row that drafts, at step K."""
        self._hook.remove()
        found = {"fused": self._calls[0]["features"][:num_tokens]}
        for step, call in enumerate(self._calls):
            row = num_tokens - 1 if step == 0 else 0
            kept = {name: tensor[row : row + 1] for name, tensor in call.items()}
            kept["logits"] = self._drafter.draft_logits(kept["hidden"])
            found |= {f"{step}.{name}": tensor for name, tensor in kept.items()}
        return found


class CapturingWorker:
    """Mixed into our workers; called through `LLM.collective_rpc`."""

    model_runner: Any
    rank: int

    def start_capture(self, with_head: bool) -> None:
        """Record from now on; with the head's calls too, if one prompt is to come."""
        self.model_runner.capture = Capture()
        drafter = self.model_runner.drafter
        self._head_calls = HeadCalls(drafter) if with_head else None

    def write_captured(self, path: str) -> None:
        """Write what was recorded to `path` and stop recording."""
        capture: Capture = self.model_runner.capture
        self.model_runner.capture = None
        tensors = capture.tensors()
        if self._head_calls is not None:
            num_tokens = next(iter(tensors.values())).shape[0]
            with torch.inference_mode():
                calls = self._head_calls.tensors(num_tokens)
            tensors |= {f"head.{name}": tensor.cpu() for name, tensor in calls.items()}
        if self.rank == 0:
            # Clones, because safetensors refuses tensors that share memory.
            save_file({n: t.clone() for n, t in tensors.items()}, path)
