"""The ranks of a tensor-parallel group: one verdict for all, and a check of the rest.

Every rank runs the same step on shards of the same target, so all must draft the same
trees and keep the same tokens. By construction:

* drafts reach the ranks from the scheduler, with their topology (`scheduler`);
* while they grow, each rank sees the same gathered logits, and the noise of sampled
  drafts comes from generators that are seeded alike and used for nothing else;
* the verdict is the first rank's. Sampling without a seed uses torch's own generator,
  which anybody may use, so the ranks need not agree by themselves.

`{"check_ranks": true}` compares hashes before each verdict is shared.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch
from vllm.distributed.parallel_state import get_tp_group
from vllm.v1.outputs import SamplerOutput

from ..verify import PADDING, Verdict


class Group(Protocol):
    """What is used of vLLM's GroupCoordinator."""

    world_size: int
    rank_in_group: int

    def broadcast(self, input_: torch.Tensor, src: int = 0) -> torch.Tensor: ...


# gather(group, digest) -> digests of all ranks
Gather = Callable[[Any, str], list[str]]


def gather_digests(group: Any, digest: str) -> list[str]:
    """Digests of all ranks of a GroupCoordinator, in their order."""
    digests = [""] * group.world_size
    torch.distributed.all_gather_object(digests, digest, group=group.cpu_group)
    return digests


class Ranks:
    """This rank among those that share a target.

    Args:
        checks: compare what the ranks found by themselves; a debugging aid, it costs
            several rounds of messages a step.
    """

    def __init__(
        self, group: Group, checks: bool, gather: Gather = gather_digests
    ) -> None:
        self._group = group
        self._gather = gather
        self._alone = group.world_size == 1
        self._checks = checks and not self._alone

    @property
    def leads(self) -> bool:
        """Whether this rank's verdict is the one that counts."""
        return self._group.rank_in_group == 0

    def settle(self, verdict: Verdict, num_nodes: int) -> Verdict:
        """The first rank's verdict.

        Args:
            verdict: this rank's own; the ranks' widths may differ.
            num_nodes: drafts of the largest tree, the same on all ranks.
        """
        self.compare("verdict", verdict.token_ids, verdict.nodes)
        if self._alone:
            return verdict
        sent = torch.cat(
            [
                _widen(verdict.token_ids, num_nodes + 1),
                _widen(verdict.nodes, num_nodes),
            ],
            dim=1,
        )
        token_ids, nodes = self._group.broadcast(sent).split(
            [num_nodes + 1, num_nodes], dim=1
        )
        longest = int((nodes != PADDING).sum(1).max())
        return Verdict(token_ids[:, : longest + 1], nodes[:, :longest])

    def settle_tokens(self, output: SamplerOutput) -> SamplerOutput:
        """The first rank's tokens, of a step without drafts."""
        self.compare("sampled tokens", output.sampled_token_ids)
        if not self._alone:
            tokens = output.sampled_token_ids.contiguous()
            output.sampled_token_ids = self._group.broadcast(tokens)
        return output

    def compare(self, what: str, *parts: torch.Tensor | np.ndarray) -> None:
        """Check that all ranks hold the same; does nothing unless asked to check.

        Raises:
            RuntimeError: on every rank, naming those that differ from the first.
        """
        if not self._checks:
            return
        digests = self._gather(self._group, _digest(parts))
        others = [rank for rank, d in enumerate(digests) if d != digests[0]]
        if others:
            raise RuntimeError(
                f"check_ranks: {what} of rank {', '.join(map(str, others))} differs "
                f"from rank 0's: {digests[others[0]]} instead of {digests[0]}; want "
                "the same on all ranks: compare the ranks' machines, libraries and "
                "checkpoints"
            )


def ranks_of_target(checks: bool) -> Ranks:
    """The ranks of this process's tensor-parallel group."""
    return Ranks(get_tp_group(), checks)


def _widen(ids: torch.Tensor, width: int) -> torch.Tensor:
    missing = width - ids.shape[1]
    return torch.nn.functional.pad(ids, (0, missing), value=PADDING).contiguous()


def _digest(parts: tuple[torch.Tensor | np.ndarray, ...]) -> str:
    """Short hash of shapes and bytes."""
    found = hashlib.sha256()
    for part in parts:
        if isinstance(part, torch.Tensor):
            part = part.detach().cpu().contiguous().view(torch.uint8).numpy()
        found.update(repr(part.shape).encode())
        found.update(np.ascontiguousarray(part).tobytes())
    return found.hexdigest()[:12]
