"""Model runners that verify trees.

One step of a request with a tree, on top of vLLM's:

    _prepare_inputs           rows get the positions of their depths
    forward                   attention sees causal runs (run_attention)
    _sample                   the walk down the tree; accepted KV moves into place
    propose_draft_token_ids   accepted rows move to the front, as if from a chain
    take_draft_token_ids      new trees go to the scheduler with their parents

On a CPU drafts are grown when they are taken, not when they are proposed: the step's
tokens have gone to their readers by then.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from vllm.config import get_layers_from_vllm_config
from vllm.model_executor.layers.attention import Attention
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import DraftTokenIds, SamplerOutput
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from ..config import read_options
from ..policy import DraftPlan
from ..scratch import require_room, scratch_blocks, scratch_branches
from ..step_cost import HeadWork
from ..tree_runs import batch_trees, blocks_per_branch, num_branches
from ..verify import Verdict
from .block_copies import BlockCopies
from .capture import Capture
from .draft_sampling import random_stream
from .drafts import Drafts, read_drafts
from .drawn_drafts import DrawnBatch, drawn_batch
from .head_backlog import HeadBacklog
from .head_waits import head_may_wait
from .proposer import Eagle3Proposer
from .ranks import ranks_of_target
from .run_attention import RunAttention
from .sampler import (
    SampledWalk,
    argmax_of_roots,
    as_output,
    match_by_argmax,
    takes_plain_argmax,
)
from .scheduler import TreeDraftTokenIds
from .scratch import add_blocks
from .step_timer import StepTimer
from .target_law import TargetLaw

logger = logging.getLogger("vllm.vllm_eagle3")


class Eagle3Runner(GPUModelRunner):
    """What both runners add; mixed in front of vLLM's own class."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.drafter = Eagle3Proposer(self.vllm_config, self.device, self)
        options = read_options(self.vllm_config.additional_config)
        shape = options.tree_shape(self.num_spec_tokens)
        self.ranks = ranks_of_target(options.check_ranks)
        self.tree_shape = shape if shape is not None and shape.top_k > 1 else None
        self.tree_attention: RunAttention | None = None
        # request -> parents of its drafts in this step
        self.trees: dict[int, np.ndarray] = {}
        self._verdict: Verdict | None = None
        self._target_law = TargetLaw(self.sampler)
        self._verify_noise = random_stream(
            self.model_config.seed,
            "verification",
            self.device,
            self.parallel_config.data_parallel_index,
        )
        self.backlog = HeadBacklog(self.drafter)
        self._head_may_wait = head_may_wait(self.vllm_config)
        self.timer = StepTimer(self.device)
        # Nobody takes the times of steps whose drafts stay with the workers.
        self.timer.is_on = not self.use_async_scheduling
        self._block_copies: BlockCopies | None = None
        self._drafts_when_taken = self._can_draft_when_taken()
        self._draft_later: Callable[[], None] | None = None
        # Who records states (see `capture`), if anyone does.
        self.capture: Capture | None = None

    def _can_draft_when_taken(self) -> bool:
        """Whether drafts are taken after every step, and a device is not kept waiting.

        A KV connector is told that the step has ended once its tokens are there.
        """
        return (
            self.device.type == "cpu"
            and not self.use_async_scheduling
            and self.parallel_config.pipeline_parallel_size == 1
            and self.vllm_config.kv_transfer_config is None
        )

    def initialize_kv_cache(
        self, kv_cache_config: KVCacheConfig, *args: Any, **kwargs: Any
    ) -> None:
        super().initialize_kv_cache(kv_cache_config, *args, **kwargs)
        if self.tree_shape is not None:
            self._prepare_trees()

    def initialize_kv_cache_tensors(
        self, kv_cache_config: KVCacheConfig, *args: Any, **kwargs: Any
    ) -> dict[str, torch.Tensor]:
        if self.tree_shape is not None:
            kv_cache_config = add_blocks(kv_cache_config, self._num_scratch_blocks())
        return super().initialize_kv_cache_tensors(kv_cache_config, *args, **kwargs)

    def without_scratch(self, available: int) -> int:
        """Bytes that are left for the KV cache when trees have their scratch blocks.

        Raises:
            ValueError: too few for the cache of one request.
        """
        if self.tree_shape is None:
            return available
        specs = list(self.get_kv_cache_spec().values())
        scratch = self._num_scratch_blocks() * sum(s.page_size_bytes for s in specs)
        longest = sum(s.max_memory_usage_bytes(self.vllm_config) for s in specs)
        require_room(available, scratch, longest)
        return available - scratch

    def _num_scratch_blocks(self) -> int:
        assert self.tree_shape is not None
        return scratch_blocks(
            self.tree_shape, self.max_num_reqs, self.cache_config.block_size
        )

    def _prepare_trees(self) -> None:
        groups = self.kv_cache_config.kv_cache_groups
        if len(groups) != 1:
            raise ValueError(
                f"shape: got 'tree' for a target with {len(groups)} groups of KV "
                "caches, want one; leave out --no-disable-hybrid-kv-cache-manager or "
                'use "shape": "chain"'
            )
        shape, block_size = self.tree_shape, self.cache_config.block_size
        assert shape is not None
        first = self.kv_cache_config.num_blocks
        scratch = first + np.arange(self._num_scratch_blocks()).reshape(
            scratch_branches(shape, self.max_num_reqs),
            blocks_per_branch(shape.depth + 1, block_size),
        )
        layers = get_layers_from_vllm_config(self.vllm_config, Attention)
        drafting = self.drafter.draft_layer_names
        self.drafter.prepare_trees(
            shape, [layers[name] for name in sorted(drafting)], block_size, scratch
        )
        self.tree_attention = RunAttention(
            [g.get_metadata_builder() for g in self.attn_groups[0]],
            [layer for name, layer in layers.items() if name not in drafting],
            block_size,
            scratch,
            self.device,
        )

    def execute_model(self, *args: Any, **kwargs: Any) -> Any:
        with self.timer.part("verify"):
            return super().execute_model(*args, **kwargs)

    def _update_states(self, scheduler_output: Any) -> Any:
        self._draft_what_waits()
        self.drafter.work = HeadWork()
        copies = scheduler_output.kv_cache_block_copies
        if not self.cache_config.enable_prefix_caching:
            preempted = scheduler_output.preempted_req_ids or set()
            self.backlog.drop(scheduler_output.finished_req_ids | preempted)
        # Requests that leave the batch take their rows' places with them.
        leaving = self.backlog.req_ids - scheduler_output.num_scheduled_tokens.keys()
        if leaving or copies:
            self.backlog.catch_up(self.input_batch)
        if copies and (self.tree_shape is not None or self.device.type == "cpu"):
            # vLLM's own copies know nothing of scratch blocks, and are slow on a CPU.
            self._copy_blocks(copies)
            scheduler_output.kv_cache_block_copies = None
        return super()._update_states(scheduler_output)

    def _copy_blocks(self, copies: list[Any]) -> None:
        source, target = torch.tensor(copies, device=self.device).T
        if self._block_copies is None:
            self._block_copies = BlockCopies(self.kv_caches)
        self._block_copies.copy(source, target)

    def _prepare_inputs(self, scheduler_output: Any, num_scheduled_tokens: Any) -> Any:
        prepared = super()._prepare_inputs(scheduler_output, num_scheduled_tokens)
        index = self.input_batch.req_id_to_index
        parents = getattr(scheduler_output, "tree_parents", {})
        self.trees = {index[r]: np.array(tree) for r, tree in parents.items()}
        if self.tree_attention is not None:
            self._place_trees()
        return prepared

    def _place_trees(self) -> None:
        """Give rows the positions of their depths, and attention its runs."""
        assert self.tree_attention is not None
        branched = {r: tree for r, tree in self.trees.items() if num_branches(tree)}
        if not branched:
            self.tree_attention.leave()
            return
        num_reqs = self.input_batch.num_reqs
        batch = batch_trees(
            self.query_start_loc.np[: num_reqs + 1].astype(int),
            self.input_batch.num_computed_tokens_cpu[:num_reqs].astype(int),
            branched,
        )
        table = self.input_batch.block_table[0].block_table.np[:num_reqs].astype(int)
        self.tree_attention.enter(batch, table)
        positions = np.repeat(batch.contexts, np.diff(batch.starts)) + batch.depths
        self.positions[: len(positions)] = torch.from_numpy(positions)

    def _sample(
        self,
        logits: torch.Tensor | None,
        spec_decode_metadata: SpecDecodeMetadata | None,
    ) -> SamplerOutput:
        with self.timer.part("verify"):
            output = self._judge(logits, spec_decode_metadata)
        if self._verdict is not None:
            with self.timer.part("commit"):
                self._commit(self._verdict)
        return output

    def _judge(
        self,
        logits: torch.Tensor | None,
        spec_decode_metadata: SpecDecodeMetadata | None,
    ) -> SamplerOutput:
        self._verdict = None
        if (thinking := self.input_batch.thinking_budget_state_holder) is not None:
            # The walk samples one row a request, as without speculation.
            thinking.in_spec_mode = False
        if logits is None or spec_decode_metadata is None:
            output = super()._sample(logits, spec_decode_metadata)
            return self.ranks.settle_tokens(output)
        self.input_batch.update_async_output_token_ids()
        sampling = self.input_batch.sampling_metadata
        if not spec_decode_metadata.max_spec_len and takes_plain_argmax(sampling):
            return self.ranks.settle_tokens(argmax_of_roots(logits))
        trees = {r: torch.from_numpy(tree) for r, tree in self.trees.items()}
        drafts = read_drafts(spec_decode_metadata, trees, logits.shape[0])
        self.ranks.compare("trees", drafts.token_ids, drafts.parents)
        logprobs = None
        if takes_plain_argmax(sampling):
            verdict = match_by_argmax(logits, drafts)
        else:
            verdict, logprobs = SampledWalk(
                logits,
                drafts,
                self.sampler,
                sampling,
                self._target_law,
                self._take_drawn(drafts),
            ).verdict(self.input_batch.req_output_token_ids)
        self._verdict = self.ranks.settle(verdict, drafts.token_ids.shape[1])
        # Log-probabilities belong to the leader's own walk.
        return as_output(self._verdict, logprobs if self.ranks.leads else None)

    def _take_drawn(self, drafts: Drafts) -> DrawnBatch | None:
        """The laws of the sampled drafts of this step."""
        kept = [self.drafter.drawn.pop(r, None) for r in self.input_batch.req_ids]
        to_target_ids = self.drafter.to_target_ids
        return drawn_batch(drafts, kept, to_target_ids, self._verify_noise)

    def reload_weights(self, *args: Any, **kwargs: Any) -> None:
        super().reload_weights(*args, **kwargs)
        logger.warning(
            "vllm_eagle3: the target's weights were replaced, and the draft head still "
            "follows the old ones: the text is right, but fewer drafts may be "
            "accepted. Train the head further for the new weights (warm_start) and "
            "start the engine with it."
        )

    def _commit(self, verdict: Verdict) -> None:
        attention = self.tree_attention
        if attention is None or attention.batch is None:
            return
        # The last accepted node of each request; the root where nothing was.
        last = verdict.nodes.max(1).values if verdict.nodes.numel() else None
        starts = attention.batch.starts
        attention.commit(
            {
                r: int(starts[r]) + (0 if last is None else int(last[r]) + 1)
                for r, tree in self.trees.items()
                if num_branches(tree)
            }
        )

    def propose_draft_token_ids(self, scheduler_output: Any, *others: Any) -> Any:
        def propose() -> Any:
            with self.timer.part("draft"):
                return self._propose(scheduler_output, *others)

        if not self._drafts_when_taken:
            return propose()

        def propose_and_keep() -> None:
            self._draft_token_ids = propose()
            self._copy_draft_token_ids_to_cpu(scheduler_output)

        self._draft_later = propose_and_keep
        return []

    def _draft_what_waits(self) -> None:
        if self._draft_later is not None:
            draft, self._draft_later = self._draft_later, None
            draft()

    def _propose(
        self,
        scheduler_output: Any,
        sampled_token_ids: Any,
        sampling_metadata: Any,
        hidden_states: torch.Tensor,
        sample_hidden_states: torch.Tensor,
        aux_hidden_states: list[torch.Tensor] | None,
        spec_decode_metadata: SpecDecodeMetadata | None,
        common_attn_metadata: Any,
        *others: Any,
    ) -> Any:
        if self.capture is not None and aux_hidden_states is not None:
            num_reqs = self.input_batch.num_reqs
            self.capture.add(
                self.input_batch.req_ids,
                self.query_start_loc.np[: num_reqs + 1],
                hidden_states,
                aux_hidden_states,
            )
        if self.tree_attention is not None and self.tree_attention.batch is not None:
            aux_hidden_states = self._straighten(aux_hidden_states)
            self.tree_attention.leave()
        plan = getattr(scheduler_output, "draft_plan", None)
        if plan is not None:
            self.drafter.follow(plan)
            if self._head_can_wait(plan, spec_decode_metadata):
                return self._leave_to_head_later(
                    sampled_token_ids, aux_hidden_states, common_attn_metadata
                )
            self.backlog.catch_up(self.input_batch)
        drafts = super().propose_draft_token_ids(
            scheduler_output,
            sampled_token_ids,
            sampling_metadata,
            hidden_states,
            sample_hidden_states,
            aux_hidden_states,
            spec_decode_metadata,
            common_attn_metadata,
            *others,
        )
        self.ranks.compare("drafts", drafts, np.array(self.drafter.last_parents or []))
        return drafts

    def _head_can_wait(
        self, plan: DraftPlan, judged: SpecDecodeMetadata | None
    ) -> bool:
        """Whether this step neither drafts nor has rows of refused drafts."""
        return (
            self._head_may_wait
            and plan.shape is None
            and (judged is None or not judged.max_spec_len)
            and not self.backlog.is_full
        )

    def _leave_to_head_later(
        self,
        sampled_token_ids: torch.Tensor,  # [num_reqs, 1]
        aux_hidden_states: list[torch.Tensor] | None,
        common_attn_metadata: Any,
    ) -> torch.Tensor:
        assert aux_hidden_states is not None
        self.drafter.last_parents = self.drafter.last_scores = None
        starts = self.query_start_loc.np[: self.input_batch.num_reqs + 1]
        self.backlog.keep(
            self.input_batch.req_ids,
            starts,
            self._tokens_behind(starts, sampled_token_ids),
            self.positions,
            aux_hidden_states,
            common_attn_metadata,
        )
        return sampled_token_ids.new_empty((len(sampled_token_ids), 0)).long()

    def _tokens_behind(
        self,
        starts: np.ndarray,  # [num_reqs + 1]
        sampled_token_ids: torch.Tensor,  # [num_reqs, 1]
    ) -> torch.Tensor:
        """The token that follows each row of a step without drafts, [rows]."""
        rows, num_reqs = int(starts[-1]), len(sampled_token_ids)
        if rows == num_reqs and not self.discard_request_mask.np[:num_reqs].any():
            return sampled_token_ids[:, 0]
        # Of a prompt that goes on this is its next token, not what was sampled.
        behind_last, _ = self.drafter.prepare_next_token_ids_padded(
            sampled_token_ids,
            self.requests,
            self.input_batch,
            self.discard_request_mask.gpu,
        )
        behind = self.input_ids.gpu[:rows].roll(-1)
        behind[torch.from_numpy(starts[1:] - 1).long().to(self.device)] = behind_last
        return behind

    def _straighten(
        self, aux_hidden_states: list[torch.Tensor] | None
    ) -> list[torch.Tensor] | None:
        """Move accepted rows behind their root, as they lie after a chain."""
        assert self.tree_attention is not None and self._verdict is not None
        batch = self.tree_attention.batch
        assert batch is not None and aux_hidden_states is not None
        request, depth = (self._verdict.nodes >= 0).nonzero(as_tuple=True)
        starts = torch.from_numpy(batch.starts).to(request.device)[request]
        source = starts + 1 + self._verdict.nodes[request, depth]
        target = starts + 1 + depth
        straight = []
        for hidden in aux_hidden_states:
            hidden = hidden.clone()
            hidden[target] = hidden[source]
            straight.append(hidden)
        self.input_ids.gpu[target] = self.input_ids.gpu[source]
        lengths = np.diff(batch.starts)
        offsets = np.arange(batch.starts[-1]) - np.repeat(batch.starts[:-1], lengths)
        linear = np.repeat(batch.contexts, lengths) + offsets
        self.positions[: len(linear)] = torch.from_numpy(linear)
        return straight

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        self._draft_what_waits()
        drafts, drafter = super().take_draft_token_ids(), self.drafter
        if drafts is None:
            return None
        return TreeDraftTokenIds(
            drafts.req_ids,
            drafts.draft_token_ids,
            drafter.last_parents,
            drafter.last_scores,
            replace(drafter.work, waiting=self.backlog.num_rows),
            self.timer.take(),
        )

    def _input_fits_in_drafter(self, common_attn_metadata: Any) -> bool:
        """Always: growth past the limit of one request harms nobody else."""
        return common_attn_metadata is not None


class Eagle3CPUModelRunner(Eagle3Runner, CPUModelRunner):
    pass


class Eagle3GPUModelRunner(Eagle3Runner):
    pass
