"""The scheduler's part in trees: their topology travels with their tokens.

Drafts come back from the workers with the parents of their nodes. What is scheduled of
them (a prefix, so still a tree) goes out with the parents beside it, the same to every
rank.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import DraftTokenIds

from ..config import read_options
from ..tree_runs import num_branches
from .scratch import scratch_branches


@dataclass
class TreeDraftTokenIds(DraftTokenIds):
    """Drafts of a step with the parents of their nodes, in depth-first order."""

    parents: list[list[int]] = field(default_factory=list)


@dataclass(frozen=True)
class _Drafted:
    token_ids: list[int]
    parents: list[int]


class Eagle3Scheduler(Scheduler):
    """vLLM's scheduler; it keeps trees small enough for everybody to be served."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        shape = read_options(self.vllm_config.additional_config).tree_shape(
            self.num_spec_tokens
        )
        assert shape is not None, "only engines with trees use this scheduler"
        self.scratch_branches = scratch_branches(
            shape, self.scheduler_config.max_num_seqs
        )
        # Trees grow in scratch blocks, never behind the request's own tokens.
        self.num_lookahead_tokens = 0
        # A full table turns off the padding of resumed requests with empty drafts,
        # which is meant for graphs of one shape and costs rows here.
        max_num_seqs = self.scheduler_config.max_num_seqs
        self.dynamic_sd_lookup = [self.num_spec_tokens] * (max_num_seqs + 1)
        self._drafted: dict[str, _Drafted] = {}

    def update_draft_token_ids(self, draft_token_ids: DraftTokenIds) -> None:
        if isinstance(draft_token_ids, TreeDraftTokenIds):
            draft_token_ids = self._take_trees(draft_token_ids)
        super().update_draft_token_ids(draft_token_ids)

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        output = super().schedule(*args, **kwargs)
        output.tree_parents = {}
        for req_id, token_ids in output.scheduled_spec_decode_tokens.items():
            drafted = self._drafted.pop(req_id, None)
            # Other drafts than those that came with a topology are chains.
            if drafted and drafted.token_ids[: len(token_ids)] == token_ids:
                output.tree_parents[req_id] = drafted.parents[: len(token_ids)]
        return output

    def _take_trees(self, drafts: TreeDraftTokenIds) -> DraftTokenIds:
        """Remember each topology; cut trees to what fits."""
        self._drafted = {r: d for r, d in self._drafted.items() if r in self.requests}
        limit = self._node_limit(len(drafts.req_ids))
        # Trees that a full step left out are still to be verified.
        waiting = self._drafted.keys() - set(drafts.req_ids)
        branches_left = self.scratch_branches - sum(
            num_branches(np.array(self._drafted[r].parents)) for r in waiting
        )
        kept_tokens = []
        for req_id, token_ids, parents in zip(
            drafts.req_ids, drafts.draft_token_ids, drafts.parents, strict=True
        ):
            tree = np.array(parents[:limit])
            if self._needs_chain(req_id) or num_branches(tree) > branches_left:
                tree = tree[: _first_run(tree)]
            branches_left -= num_branches(tree)
            kept = _Drafted(token_ids[: len(tree)], tree.tolist())
            self._drafted[req_id] = kept
            kept_tokens.append(kept.token_ids)
        return DraftTokenIds(drafts.req_ids, kept_tokens)

    def _node_limit(self, num_reqs: int) -> int:
        """Nodes per request such that every root is verified and prefills get a share.

        Trees are scheduled first come, first served; without a limit the first ones
        would take the whole token budget.
        """
        budget = self.max_num_scheduled_tokens
        if self.waiting or len(self.running) > num_reqs:
            budget -= budget // 4
        running = max(len(self.running), num_reqs, 1)
        return max(0, budget // running - 1)

    def _needs_chain(self, req_id: str) -> bool:
        """A grammar is followed along one path only."""
        request = self.requests.get(req_id)
        return request is not None and request.use_structured_output


def _first_run(parents: np.ndarray) -> int:
    """Nodes in front that form one path from the root."""
    chain = parents == np.arange(-1, len(parents) - 1)
    return int(np.append(chain, False).argmin())
