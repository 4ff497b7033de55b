"""The scheduler's part: what is drafted, what of it is verified, and its topology.

Drafts come back from the workers with the parents of their nodes and their scores. The
budget chooses among them; what is scheduled goes out with the parents beside it, and
with the plan of what to draft next, the same to every rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.spec_decode.metrics import SpecDecodingStats

from ..budget import DraftBudget
from ..config import read_options
from ..policy import BudgetLimits, DraftPlan, Policy, Verdict
from ..recording import RecordingPolicy
from ..scratch import scratch_branches
from ..step_cost import HeadWork
from ..tree_runs import num_branches
from .draft_sampling import DraftSampling, method_given
from .head_waits import head_may_wait
from .metrics import DraftingStats, StepCounts
from .prefix_hits import PrefixHits
from .request_options import node_limit
from .step_budget import StepBudget, depths_of


@dataclass
class TreeDraftTokenIds(DraftTokenIds):
    """Drafts of a step, nodes in depth-first order, with what the scheduler wants.

    Attributes:
        parents: of each request's nodes; None where all are chains.
        scores: log-probabilities of the nodes' paths; None where they are not known,
            or where nodes may not be left out because of them.
        head: what the head did.
        seconds: of the parts of the step.
    """

    parents: list[list[int]] | None = None
    scores: list[list[float]] | None = None
    head: HeadWork = field(default_factory=HeadWork)
    seconds: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class _Drafted:
    token_ids: list[int]
    parents: list[int]
    scores: list[float]
    sampled: bool = False

    @cached_property
    def branches(self) -> int:
        """Paths but for the first one."""
        return num_branches(np.array(self.parents, dtype=int))

    def subset(self, nodes: Iterable[int]) -> _Drafted:
        """Only these nodes, whose parents are among them; their numbers rise."""
        new_index = {int(node): index for index, node in enumerate(nodes)}
        return _Drafted(
            [self.token_ids[node] for node in new_index],
            [new_index.get(self.parents[node], -1) for node in new_index],
            [self.scores[node] for node in new_index] if self.scores else [],
            self.sampled,
        )

    def first(self, count: int) -> _Drafted:
        """The first nodes, which are a tree as well."""
        if count >= len(self.token_ids):
            return self
        return _Drafted(
            self.token_ids[:count],
            self.parents[:count],
            self.scores[:count],
            self.sampled,
        )

    def best(self, count: int) -> _Drafted:
        """The likeliest nodes, which are a tree as well: no child is likelier than its
        parent, which stands before it. The first ones where nothing is scored, and of
        those that were drawn, which no cut may look at."""
        if self.sampled or not self.scores or count >= len(self.scores):
            return self.first(count)
        likeliest = sorted(range(len(self.scores)), key=lambda node: -self.scores[node])
        return self.subset(sorted(likeliest[:count]))

    def accepted(self, emitted: Sequence[int]) -> list[int]:
        """Nodes on the path of the tokens that were emitted."""
        path, here = [], -1
        for token in emitted:
            children = (
                node
                for node, parent in enumerate(self.parents)
                if parent == here and self.token_ids[node] == token
            )
            here = next(children, -2)
            if here < 0:
                break
            path.append(here)
        return path


class Eagle3Scheduler(Scheduler):
    """vLLM's scheduler, with a budget; it keeps trees small enough for everybody."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        options = read_options(self.vllm_config.additional_config)
        shape = options.tree_shape(self.num_spec_tokens)
        assert shape is not None, "only engines that draft use this scheduler"
        max_num_seqs = self.scheduler_config.max_num_seqs
        self.scratch_branches = (
            scratch_branches(shape, max_num_seqs) if shape.top_k > 1 else 0
        )
        self.budget: StepBudget | None = None
        if options.shape == "tree":
            # Trees grow in scratch blocks, never behind the request's own tokens.
            self.num_lookahead_tokens = 0
        elif options.shape == "auto":
            limits = BudgetLimits.below(shape, head_may_wait(self.vllm_config))
            policy: Policy = DraftBudget(limits)
            if options.record is not None:
                policy = RecordingPolicy(limits, Path(options.record))
            self.budget = StepBudget(policy)
            self.num_lookahead_tokens = limits.chain.depth
        if options.shape != "chain":
            # A full table turns off the padding of resumed requests with empty drafts,
            # which is meant for graphs of one shape and costs rows here.
            self.dynamic_sd_lookup = [self.num_spec_tokens] * (max_num_seqs + 1)
        self.prefix_hits = PrefixHits(self)
        self.counts = StepCounts()
        self._most_nodes: dict[str, int] = {}  # of each request, as it asked
        self._sampling = DraftSampling(
            method_given(self.vllm_config.speculative_config)
        )
        self._may_sample: set[str] = set()  # requests that may take sampled drafts
        self._drafted: dict[str, _Drafted] = {}  # waits for its step
        self._scheduled: dict[str, _Drafted] = {}  # in the step that runs

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        if self.budget is not None:
            self.budget.next_step(self.requests.__contains__)
        output = super().schedule(*args, **kwargs)
        output.tree_parents = {}
        self._scheduled = {}
        self.counts.plain_steps += int(not output.scheduled_spec_decode_tokens)
        for req_id, token_ids in output.scheduled_spec_decode_tokens.items():
            drafted = self._drafted.pop(req_id, None)
            # Other drafts than those that came with a topology are chains.
            if drafted and drafted.token_ids[: len(token_ids)] == token_ids:
                drafted = drafted.first(len(token_ids))
                self._scheduled[req_id] = drafted
                output.tree_parents[req_id] = drafted.parents
        if self.budget is not None and output.num_scheduled_tokens:
            output.draft_plan = self._plan(self.budget, output)
        return output

    def _get_local_prefix_cache_hit(
        self, request: Request
    ) -> tuple[KVCacheBlocks, int, int, bool]:
        blocks, num_tokens, *others = super()._get_local_prefix_cache_hit(request)
        return *self.prefix_hits.lengthen(request, blocks, num_tokens), *others

    def make_stats(
        self,
        spec_decoding_stats: SpecDecodingStats | None = None,
        *args: Any,
        **kw: Any,
    ) -> SchedulerStats | None:
        stats = super().make_stats(spec_decoding_stats, *args, **kw)
        if stats is not None:
            if self.budget is not None:
                self.counts.confidence_error = self.budget.policy.confidence_error()
            stats.spec_decoding_stats = DraftingStats.beside(
                stats.spec_decoding_stats, self.num_spec_tokens, self.counts
            )
            self.counts = StepCounts()
        return stats

    def update_draft_token_ids(self, draft_token_ids: DraftTokenIds) -> None:
        if isinstance(draft_token_ids, TreeDraftTokenIds):
            draft_token_ids = self._take_trees(draft_token_ids)
        super().update_draft_token_ids(draft_token_ids)

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> Any:
        self._learn(model_runner_output)
        return super().update_from_output(scheduler_output, model_runner_output)

    def add_request(self, request: Request) -> None:
        limit = node_limit(request.sampling_params, self.num_spec_tokens)
        self._most_nodes[request.request_id] = limit
        if self._sampling.suits(request.sampling_params):
            self._may_sample.add(request.request_id)
        super().add_request(request)

    def _free_request(self, request: Request, *args: Any, **kwargs: Any) -> Any:
        self._most_nodes.pop(request.request_id, None)
        self._may_sample.discard(request.request_id)
        if self.budget is not None:
            self.budget.policy.forget(request.request_id)
        return super()._free_request(request, *args, **kwargs)

    def _plan(self, budget: StepBudget, output: SchedulerOutput) -> DraftPlan:
        """Decide what the workers draft after this step, and say so in `output`."""
        scheduled = output.num_scheduled_tokens
        drafts = output.scheduled_spec_decode_tokens
        rows = output.total_num_scheduled_tokens
        prompt_rows = rows - len(scheduled) - sum(map(len, drafts.values()))
        branches = sum(drafted.branches for drafted in self._scheduled.values())
        plan = budget.plan(
            scheduled.keys(),
            rows,
            branches,
            self._context(scheduled),
            prompt_rows,
            may_sample=self._may_sample.issuperset(scheduled),
        )
        nodes = 0 if plan.shape is None else plan.shape.num_nodes
        output.num_spec_tokens_to_schedule = nodes
        self.counts.planned_nodes += nodes
        self.counts.plans[plan.kind] += 1
        return plan

    def _context(self, req_ids: Any) -> int:
        return sum(self.requests[req_id].num_computed_tokens for req_id in req_ids)

    def _learn(self, output: ModelRunnerOutput) -> None:
        """Count which nodes were accepted, and tell the budget."""
        verdicts = []
        for req_id, drafted in self._scheduled.items():
            index = output.req_id_to_index.get(req_id)
            emitted = [] if index is None else output.sampled_token_ids[index]
            if not emitted:
                continue
            # The last token is the target's own.
            path = drafted.accepted(emitted[:-1])
            self.counts.verdict(depths_of(drafted.parents), path)
            if drafted.scores:
                accepted = np.zeros(len(drafted.scores), dtype=bool)
                accepted[path] = True
                verdicts.append(
                    Verdict(
                        req_id,
                        drafted.parents,
                        np.array(drafted.scores),
                        accepted,
                        drafted.sampled,
                    )
                )
        if self.budget is not None:
            self.budget.policy.observe_verdicts(verdicts)

    def _take_trees(self, drafts: TreeDraftTokenIds) -> DraftTokenIds:
        """Remember each topology; keep of the trees what pays and fits."""
        self._note_times(drafts)
        # Trees that a full step left out are still to be verified.
        drafted_now = set(drafts.req_ids)
        self._drafted = {
            req_id: drafted
            for req_id, drafted in self._drafted.items()
            if req_id in self.requests and req_id not in drafted_now
        }
        if not any(drafts.draft_token_ids):
            return drafts
        branches_left = self.scratch_branches - sum(
            drafted.branches for drafted in self._drafted.values()
        )
        kept_tokens = []
        for req_id, kept in self._chosen(drafts):
            if kept.branches > branches_left:
                # One path from the root needs no scratch blocks.
                kept = kept.first(_first_run(np.array(kept.parents, dtype=int)))
                self.counts.fallbacks["scratch blocks are full"] += 1
            branches_left -= kept.branches
            self._drafted[req_id] = kept
            kept_tokens.append(kept.token_ids)
        return DraftTokenIds(drafts.req_ids, kept_tokens)

    def _note_times(self, drafts: TreeDraftTokenIds) -> None:
        for part, seconds in drafts.seconds.items():
            so_far = self.counts.seconds.get(part, 0.0)
            self.counts.seconds[part] = so_far + seconds
        if self.budget is not None:
            self.budget.head_did(drafts.head)

    def _chosen(self, drafts: TreeDraftTokenIds) -> list[tuple[str, _Drafted]]:
        """What the budget wants verified, or as much as has room."""
        sampled = self.budget is not None and self.budget.last_plan.sampled
        trees = [
            (req_id, self._as_path_for_grammars(req_id, tree))
            for req_id, tree in zip(drafts.req_ids, _read(drafts, sampled), strict=True)
        ]
        self.counts.drafted += sum(len(tree.token_ids) for _, tree in trees)
        limits = self._node_limits(drafts.req_ids)
        if self.budget is None or drafts.scores is None or sampled:
            return [(req_id, tree.best(limits[req_id])) for req_id, tree in trees]
        alive = [(r, t) for r, t in trees if t.token_ids and self._takes_drafts(r)]
        nodes = self.budget.choose(
            [req_id for req_id, _ in alive],
            [tree.parents for _, tree in alive],
            [tree.scores for _, tree in alive],
            [limits[req_id] for req_id, _ in alive],
            self._context(req_id for req_id, _ in alive),
        )
        chosen = {
            req_id: tree.subset(kept)
            for (req_id, tree), kept in zip(alive, nodes, strict=True)
        }
        nothing = _Drafted([], [], [])
        return [(req_id, chosen.get(req_id, nothing)) for req_id, _ in trees]

    def _takes_drafts(self, req_id: str) -> bool:
        request = self.requests.get(req_id)
        return request is not None and not request.is_prefill_chunk

    def _node_limits(self, req_ids: list[str]) -> dict[str, int]:
        """Most nodes of each request: what has room, and what it asks for."""
        most: int = self.num_spec_tokens
        room, limits = self._node_limit(len(req_ids)), {}
        for req_id in req_ids:
            asked = self._most_nodes.get(req_id, most)
            limits[req_id] = min(asked, room)
            if asked < min(room, most):
                self.counts.fallbacks["asked for by the request"] += 1
        if room < most:
            self.counts.fallbacks["token budget of the step"] += len(req_ids)
        return limits

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

    def _as_path_for_grammars(self, req_id: str, tree: _Drafted) -> _Drafted:
        """A grammar is followed along one path only."""
        request = self.requests.get(req_id)
        if request is None or not request.use_structured_output:
            return tree
        path = tree.first(_first_run(np.array(tree.parents, dtype=int)))
        if len(path.token_ids) < len(tree.token_ids):
            self.counts.fallbacks["one path for a grammar"] += 1
        return path


def _read(drafts: TreeDraftTokenIds, sampled: bool) -> list[_Drafted]:
    """Drafts by request; without parents they are chains."""
    token_ids = drafts.draft_token_ids
    parents = drafts.parents or [list(range(-1, len(t) - 1)) for t in token_ids]
    scores: Sequence[list[float]] = drafts.scores or [[] for _ in token_ids]
    return [
        _Drafted(*each, sampled)
        for each in zip(token_ids, parents, scores, strict=True)
    ]


def _first_run(parents: np.ndarray) -> int:
    """Nodes in front that form one path from the root."""
    chain = parents == np.arange(-1, len(parents) - 1)
    return int(np.append(chain, False).argmin())
