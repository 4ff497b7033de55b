"""The drafter inside vLLM: vLLM's first pass of the head, then our growth.

The first pass runs the head on every new token with the target's true features and
fills its KV cache; it is vLLM's own. Each further level is one pass over the frontier
with as little around it as possible: draft logits stay in the draft vocabulary, and
the attention metadata of a level is derived from the first pass's.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn
from vllm.forward_context import set_forward_context
from vllm.lora.layers import BaseLayerWithLoRA
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.spec_decode.eagle import EagleProposer

from ..config import read_options
from ..drafter import Advance, HeadOutput, IsEnough, TreeShape, grow
from ..policy import DraftPlan
from ..sampled_drafter import (
    SampledTree,
    exponential_noise,
    grow_sampled,
    sampled_shape,
)
from ..step_cost import HeadWork
from ..tree import DraftTree
from ..tree_runs import depth_first
from .coupled import levels_of
from .draft_sampling import DraftSampling, method_given, random_stream
from .drawn_drafts import DrawnDrafts
from .growth import ChainGrowth, TreeGrowth
from .head_loading import identity_maps_left_out
from .head_sharding import is_whole, whole_layers


@dataclass(frozen=True)
class Roots:
    """Where drafts begin: each request's last confirmed token.

    Attributes:
        output: of the head there, one row each.
        positions: [num_reqs].
        seq_lens: [num_reqs], with that token.
        metadata: of attention; its block table has a row for each request.
        requests: [num_reqs] -> row of the batch.
    """

    output: HeadOutput
    positions: torch.Tensor
    seq_lens: torch.Tensor
    metadata: CommonAttentionMetadata
    requests: list[int]

    def part(self, rows: list[int]) -> Roots:
        """Those of some of the requests."""
        if rows == self.requests:
            return self
        at = torch.tensor(rows, device=self.positions.device)
        table = self.metadata.block_table_tensor
        return Roots(
            HeadOutput(self.output.features[at], self.output.logits[at]),
            self.positions[at],
            self.seq_lens[at],
            replace(self.metadata, block_table_tensor=table[at]),
            rows,
        )


class Eagle3Proposer(EagleProposer):
    """EagleProposer that grows drafts with `drafter.grow`."""

    num_speculative_tokens: int

    def __init__(self, vllm_config: Any, device: torch.device, runner: Any) -> None:
        super().__init__(vllm_config, device, runner)
        self.runner = runner
        self.drafts = read_options(vllm_config.additional_config).shape != "off"
        # What the head said last: (normed hidden, fed-back feature), [tokens, hidden].
        self._output: tuple[torch.Tensor, torch.Tensor] | None = None
        self._first_logits: torch.Tensor | None = None
        self._to_target_ids: torch.Tensor | None = None
        self._tree_shape: TreeShape | None = None  # of this step
        self._levels = levels_of(vllm_config.parallel_config, self._run_idle_level)
        # Parents of the last proposal's nodes, if those are trees, and their scores if
        # those are known.
        self.last_parents: list[list[int]] | None = None
        self.last_scores: list[list[float]] | None = None
        self.work = HeadWork()
        model = vllm_config.model_config
        self._has_plain_positions = not (self.uses_mrope or model.uses_mrope)
        # What the budget wants drafted; None where the shape never changes.
        self.plan: DraftPlan | None = None
        # Ours keeps all of q where it is needed; vLLM's own way is not used.
        self._enable_probabilistic_draft_probs = False
        self._sampling = DraftSampling(method_given(vllm_config.speculative_config))
        seed = vllm_config.model_config.seed
        replica = vllm_config.parallel_config.data_parallel_index
        self._draft_noise = random_stream(seed, "drafting", device, replica)
        # request -> its sampled drafts that wait for verification
        self.drawn: dict[str, DrawnDrafts] = {}

    @property
    def to_target_ids(self) -> torch.Tensor | None:
        """Draft id -> target id, [draft_vocab]; None when they are equal."""
        return self._to_target_ids

    @property
    def draft_layer_names(self) -> set[str]:
        """Names of the head's attention layers."""
        return self._draft_attn_layer_names

    def load_model(self, target_model: nn.Module) -> None:
        with identity_maps_left_out():
            super().load_model(target_model)
        # Adapters map the rows of a target's step; the head's levels have others.
        embedding = self.model.model.embed_tokens
        if isinstance(embedding, BaseLayerWithLoRA):
            self.model.model.embed_tokens = embedding.base_layer
        self.model.register_forward_hook(self._keep_output)
        d2t = getattr(self.model, "draft_id_to_target_id", None)
        if d2t is not None:
            drafts = torch.arange(d2t.shape[0], device=d2t.device)
            self._to_target_ids = drafts + d2t

    def _get_model(self) -> nn.Module:
        with whole_layers() if is_whole(self.speculative_config) else nullcontext():
            return super()._get_model()

    def prepare_trees(
        self, shape: TreeShape, layers: list[Any], block_size: int, scratch: np.ndarray
    ) -> None:
        """Grow trees of this shape from now on, with scratch blocks for their KV."""
        self._tree_shape = shape
        self._tree_growth = TreeGrowth(self, layers, block_size, scratch)
        # A level must fit the scratch blocks and, with one end more, `arange`.
        rows = min(self._tree_growth.max_rows, self.max_num_tokens - 1)
        self._trees_at_once = rows // shape.top_k

    def follow(self, plan: DraftPlan) -> None:
        """Draft by this plan from now on."""
        self.plan = plan
        is_tree = plan.shape is not None and plan.shape.top_k > 1
        self._tree_shape = plan.shape if is_tree else None

    def propose(
        self,
        num_speculative_tokens: int,
        target_token_ids: torch.Tensor,
        target_positions: torch.Tensor,
        target_hidden_states: torch.Tensor,
        next_token_ids: torch.Tensor,
        token_indices_to_sample: torch.Tensor | None,
        common_attn_metadata: CommonAttentionMetadata,
        sampling_metadata: Any,
        mm_embed_inputs: Any = None,
        num_rejected_tokens_gpu: torch.Tensor | None = None,
        slot_mappings: Any = None,
    ) -> torch.Tensor:
        """Draft for every request, [num_reqs, num_drafts]; see vLLM's method."""
        first_pass = super().propose
        self.last_parents = self.last_scores = None
        self.work.passes += 1
        self.work.rows += target_token_ids.shape[0]
        rows = token_indices_to_sample
        if rows is None:
            rows = common_attn_metadata.query_start_loc[1:] - 1
        drafts = num_speculative_tokens if self.drafts else 0
        none = first_pass(
            min(drafts, 1),
            target_token_ids,
            target_positions,
            target_hidden_states,
            next_token_ids,
            rows,
            common_attn_metadata,
            sampling_metadata,
            mm_embed_inputs,
            num_rejected_tokens_gpu,
            slot_mappings,
        )
        if not drafts:
            self._levels.begin(0)
            self._levels.finish()
            return none
        # The first pass may have run over refused drafts too; they do not count.
        seq_lens = common_attn_metadata.seq_lens
        if num_rejected_tokens_gpu is not None:
            seq_lens = seq_lens - num_rejected_tokens_gpu
        roots = self._roots(rows.long(), common_attn_metadata, seq_lens)
        return self._grow(drafts, roots, sampling_metadata)

    def _roots(
        self,
        rows: torch.Tensor,  # [num_reqs], each request's last confirmed token
        metadata: CommonAttentionMetadata,
        seq_lens: torch.Tensor,  # [num_reqs]
    ) -> Roots:
        assert self._output is not None and self._first_logits is not None
        positions = self.mrope_positions[0] if self.uses_mrope else self.positions
        features = self._output[1][rows][:, None]
        num_reqs = len(rows)  # batches may be padded
        return Roots(
            HeadOutput(features, self._first_logits[:, None]),
            positions[rows],
            seq_lens[:num_reqs],
            replace(
                metadata, block_table_tensor=metadata.block_table_tensor[:num_reqs]
            ),
            list(range(num_reqs)),
        )

    def _grow(self, num_drafts: int, roots: Roots, sampling: Any) -> torch.Tensor:
        """Draft for every request, [num_reqs, num_nodes]: ranked or sampled."""
        shape = self._tree_shape or TreeShape.chain(num_drafts)
        sampled = self._sampled_requests(sampling)
        ranked = [request for request in roots.requests if request not in sampled]
        ranked_parts, sampled_parts = self._parts(ranked), self._parts(sorted(sampled))
        num_parts = len(ranked_parts) + len(sampled_parts)
        self._levels.begin(num_parts * (shape.depth - 1))
        trees = [
            grow(
                part.output,
                self._advance(part, shape.depth),
                self._to_target_ids,
                shape,
                self._enough(len(part.requests) / len(roots.requests)),
            )
            for part in map(roots.part, ranked_parts)
        ]
        drawn = [
            self._draw(part, shape, sampling.temperature)
            for part in map(roots.part, sampled_parts)
        ]
        self._levels.finish()
        trees = _equally_wide([*trees, *(each.tree for each in drawn)])
        parts = [*ranked_parts, *sampled_parts]
        token_ids, order = self._send(parts, trees)
        for requests, each in zip(sampled_parts, drawn, strict=True):
            self._keep(requests, token_ids, each.q, order[requests[0]])
        return token_ids

    def _sampled_requests(self, sampling: Any) -> set[int]:
        """Rows of the batch that take sampled drafts; what was kept for it is gone."""
        requests, req_ids = self.runner.requests, self.runner.input_batch.req_ids
        self.drawn = {r: d for r, d in self.drawn.items() if r in requests}
        for req_id in req_ids:
            self.drawn.pop(req_id, None)
        # A budget cuts ranked drafts by their scores, and so would look at what was
        # drawn; those it plans to sample it leaves whole.
        if sampling.all_greedy or (self.plan is not None and not self.plan.sampled):
            return set()
        params = [requests[req_id].sampling_params for req_id in req_ids]
        return {row for row, each in enumerate(params) if self._sampling.suits(each)}

    def _parts(self, requests: list[int]) -> list[list[int]]:
        """Some requests, as many at a time as growth has room for."""
        at_once = self._trees_at_once if self._tree_shape else max(len(requests), 1)
        return [requests[n : n + at_once] for n in range(0, len(requests), at_once)]

    def _advance(self, roots: Roots, depth: int) -> Advance:
        if self._tree_shape is None:
            return ChainGrowth(
                self, roots.metadata, roots.positions, roots.seq_lens, depth
            ).advance
        self._tree_growth.begin(roots.metadata, roots.positions, self._tree_shape)
        return self._tree_growth.advance

    def _draw(
        self,
        roots: Roots,
        limits: TreeShape,
        temperature: torch.Tensor,  # [batch]
    ) -> SampledTree:
        shape = sampled_shape(limits)
        num_reqs, vocab = len(roots.requests), roots.output.logits.shape[-1]
        noise = exponential_noise(
            (num_reqs, shape.num_parents, vocab), self._draft_noise, self.device
        )
        return grow_sampled(
            roots.output,
            self._advance(roots, limits.depth),
            self._to_target_ids,
            shape,
            temperature[roots.requests],
            noise,
        )

    def _enough(self, share: float) -> IsEnough | None:
        """When to stop growing, as the plan has it, for a share of the requests.

        Asking costs a device synchronisation, so only the CPU asks.
        """
        plan, asks = self.plan, self.device.type == "cpu"
        if plan is None:
            return None
        return lambda level, scores: (
            asks and plan.may_end(level, float(scores.exp().sum()) / share)
        )

    def _send(
        self, parts: list[list[int]], trees: list[DraftTree]
    ) -> tuple[torch.Tensor, np.ndarray]:
        """Nodes in the order they are sent: (token ids, old index of each node).

        Both are [num_reqs, num_nodes], requests as in the batch. Trees are sent depth
        first, and their parents and scores are kept for the scheduler.
        """
        place = np.argsort(np.concatenate(parts))
        at = torch.from_numpy(place).to(self.device)
        token_ids, scores = (
            torch.cat([getattr(tree, name) for tree in trees])[at]
            for name in ("token_ids", "scores")
        )
        if self._tree_shape is None:
            if self.plan is not None:
                self.last_scores = scores.tolist()
            return token_ids, np.tile(np.arange(trees[0].num_nodes), (len(place), 1))
        parents = torch.cat([tree.parents for tree in trees]).cpu().numpy()[place]
        order = depth_first(parents)
        new_index = np.argsort(order, axis=1)
        old = np.take_along_axis(parents, order, axis=1)
        moved = np.take_along_axis(new_index, old.clip(min=0), axis=1)
        self.last_parents = np.where(old >= 0, moved, old).tolist()
        index = torch.from_numpy(order).to(self.device)
        self.last_scores = scores.gather(1, index).tolist()
        return token_ids.gather(1, index), order

    def _keep(
        self,
        requests: list[int],
        token_ids: torch.Tensor,  # [batch, num_nodes]
        q: torch.Tensor,  # [num_reqs, rows, draft_vocab]
        order: np.ndarray,  # [num_nodes], of the nodes that q belongs to
    ) -> None:
        """Keep the laws of sampled drafts until these are verified."""
        # Leaves have no children to judge, so any row will do for them.
        row = np.concatenate([[0], order + 1]).clip(max=q.shape[1] - 1)
        row_of_q = torch.from_numpy(row).to(self.device)
        for request, law in zip(requests, q, strict=True):
            req_id = self.runner.input_batch.req_ids[request]
            self.drawn[req_id] = DrawnDrafts(token_ids[request], law, row_of_q)

    def _sample_draft_tokens(
        self, hidden_states: torch.Tensor, sampling_metadata: Any
    ) -> tuple[torch.Tensor, None]:
        """Keep the logits of vLLM's first pass for growth, which drafts."""
        self._first_logits = self.draft_logits(hidden_states)
        rows = self._first_logits.shape[0]
        return torch.zeros(rows, dtype=torch.int64, device=self.device), None

    def draft_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[rows, hidden] -> [rows, draft_vocab]."""
        return self.model.logits_processor(self.model.lm_head, hidden_states)

    def run_level(
        self,
        token_ids: torch.Tensor,  # [rows]
        positions: torch.Tensor,  # [rows]
        features: torch.Tensor,  # [rows, hidden]
        metadata: CommonAttentionMetadata,
        level: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One pass of the head over single rows, writing their KV as it goes.

        Returns:
            (features to feed back [rows, hidden], draft logits [rows, draft_vocab])
        """
        self._levels.count()
        hidden, fed_back = self._run(token_ids, positions, features, metadata, level)
        self.work.levels += 1
        self.work.rows += token_ids.shape[0]
        return fed_back, self.draft_logits(hidden)

    def catch_up(
        self,
        token_ids: torch.Tensor,  # [rows]
        positions: torch.Tensor,  # [rows]
        features: torch.Tensor,  # [rows, taps * hidden], of the target
        metadata: CommonAttentionMetadata,
    ) -> None:
        """Fill the head's KV cache with rows that it was not run on when they came."""
        self.work.caught_up += token_ids.shape[0]
        self._run(
            token_ids, positions, self.model.combine_hidden_states(features), metadata
        )

    def _run(
        self,
        token_ids: torch.Tensor,  # [rows]
        positions: torch.Tensor,  # [rows]
        features: torch.Tensor,  # [rows, hidden]
        metadata: CommonAttentionMetadata,
        level: int = 0,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """A pass of the head: (normed hidden, feature to feed back), [rows, hidden]."""
        rows = token_ids.shape[0]
        graph_mode, padded_rows, rows_across_dp = (
            self._determine_batch_execution_and_padding(rows)
        )
        _, layers = self.build_per_group_and_layer_attn_metadata(metadata, level)
        self.input_ids[:rows] = token_ids
        self._set_positions(rows, positions)
        self.hidden_states[:rows] = features
        inputs, _ = self.build_model_inputs_first_pass(rows, padded_rows, None)
        with set_forward_context(
            layers,
            self.vllm_config,
            num_tokens=padded_rows,
            num_tokens_across_dp=rows_across_dp,
            cudagraph_runtime_mode=graph_mode,
            slot_mapping=self._get_slot_mapping(padded_rows, metadata.slot_mapping),
        ):
            hidden, fed_back = self.model(**inputs)
        return hidden[:rows], fed_back[:rows]

    def _set_positions(self, num_tokens: int, positions: torch.Tensor) -> None:
        # vLLM's works out anew what kind of positions the target has, in every pass of
        # the head, which takes longer than all copies of its inputs.
        if self._has_plain_positions:
            self.positions[:num_tokens] = positions
        else:
            super()._set_positions(num_tokens, positions)

    def dummy_run(self, *args: Any, **kwargs: Any) -> None:
        """One pass at profile size, and the levels of engines that are not idle."""
        self._dummy_pass(*args, **kwargs)
        self._levels.begin(0)
        self._levels.finish()

    def _run_idle_level(self) -> None:
        self._dummy_pass(num_tokens=1)

    def _dummy_pass(self, *args: Any, **kwargs: Any) -> None:
        drafts = self.num_speculative_tokens
        self.num_speculative_tokens = 1
        try:
            super().dummy_run(*args, **kwargs)
        finally:
            self.num_speculative_tokens = drafts

    def _keep_output(self, _module: nn.Module, _inputs: Any, output: Any) -> None:
        self._output = output


def _equally_wide(trees: list[DraftTree]) -> list[DraftTree]:
    """The first nodes of each, as many as all have: parts may stop growing apart."""
    width = min(tree.num_nodes for tree in trees)
    return [
        DraftTree(t.token_ids[:, :width], t.parents[:, :width], t.scores[:, :width])
        for t in trees
    ]
