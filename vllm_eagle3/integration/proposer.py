"""The drafter inside vLLM: vLLM's first pass of the head, then our growth.

The first pass runs the head on every new token with the target's true features and
fills its KV cache; it is vLLM's own. Each further level is one pass over the frontier
with as little around it as possible: draft logits stay in the draft vocabulary, and
the attention metadata of a level is derived from the first pass's.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn
from vllm.forward_context import set_forward_context
from vllm.lora.layers import BaseLayerWithLoRA
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.spec_decode.eagle import EagleProposer

from ..argmax import argmax
from ..budget import DraftPlan
from ..config import read_options
from ..drafter import HeadOutput, IsEnough, TreeShape, grow
from ..step_cost import HeadWork
from ..tree import DraftTree
from ..tree_runs import depth_first
from .coupled import levels_of
from .growth import ChainGrowth, TreeGrowth
from .head_loading import identity_maps_left_out
from .head_sharding import is_whole, whole_layers


class Eagle3Proposer(EagleProposer):
    """EagleProposer that grows drafts with `drafter.grow`."""

    num_speculative_tokens: int

    def __init__(self, vllm_config: Any, device: torch.device, runner: Any) -> None:
        super().__init__(vllm_config, device, runner)
        self.drafts = read_options(vllm_config.additional_config).shape != "off"
        # What the head said last: (normed hidden, fed-back feature), [tokens, hidden].
        self._output: tuple[torch.Tensor, torch.Tensor] | None = None
        self._first_logits: torch.Tensor | None = None
        self._to_target_ids: torch.Tensor | None = None
        self._tree_shape: TreeShape | None = None  # of this step
        self._has_trees = False
        self._levels = levels_of(vllm_config.parallel_config, self._run_idle_level)
        # Parents of the last proposal's nodes, if those are trees, and their scores if
        # those are known.
        self.last_parents: list[list[int]] | None = None
        self.last_scores: list[list[float]] | None = None
        self.work = HeadWork()
        # What the budget wants drafted; None where the shape never changes.
        self.plan: DraftPlan | None = None

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
        self._tree_shape, self._has_trees = shape, True
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
        stock = self._draws_from_q(sampling_metadata)
        first_drafts = first_pass(
            drafts if stock else min(drafts, 1),
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
        self._levels.begin(0 if stock else self._most_levels(drafts, len(rows)))
        # A single draft needs no growth, but a budget needs its score.
        if stock or drafts <= (1 if self.plan is None else 0):
            self._levels.finish()
            return first_drafts
        # The first pass may have run over refused drafts too; they do not count.
        seq_lens = common_attn_metadata.seq_lens
        if num_rejected_tokens_gpu is not None:
            seq_lens = seq_lens - num_rejected_tokens_gpu
        grown = self._grow(drafts, rows.long(), common_attn_metadata, seq_lens)
        self._levels.finish()
        return grown

    def _most_levels(self, drafts: int, num_reqs: int) -> int:
        """Passes of the head that growth may take."""
        if drafts <= 1:
            return 0
        if self._tree_shape is None:
            return drafts - 1
        parts = -(-num_reqs // self._trees_at_once)
        return parts * (self._tree_shape.depth - 1)

    def _draws_from_q(self, sampling: Any) -> bool:
        """Sampled drafts need all of q, as vLLM's own chain keeps it."""
        return (
            self._enable_probabilistic_draft_probs
            and not sampling.all_greedy
            and not self._has_trees
        )

    def _grow(
        self,
        num_drafts: int,
        rows: torch.Tensor,  # [num_reqs], each request's last confirmed token
        metadata: CommonAttentionMetadata,
        seq_lens: torch.Tensor,  # [num_reqs]
    ) -> torch.Tensor:
        assert self._output is not None and self._first_logits is not None
        root = HeadOutput(self._output[1][rows][:, None], self._first_logits[:, None])
        positions = self.mrope_positions[0] if self.uses_mrope else self.positions
        if self._tree_shape is None:
            growth = ChainGrowth(self, metadata, positions[rows], seq_lens)
            shape = TreeShape.chain(num_drafts)
            return self._keep_chains(
                grow(
                    root,
                    growth.advance,
                    self._to_target_ids,
                    shape,
                    self._enough(),
                )
            )
        return self._keep_trees(
            [
                self._grow_trees(root, metadata, positions[rows], first)
                for first in range(0, len(rows), self._trees_at_once)
            ]
        )

    def _grow_trees(
        self,
        root: HeadOutput,
        metadata: CommonAttentionMetadata,
        positions: torch.Tensor,  # [num_reqs], of the last confirmed tokens
        first: int,
    ) -> DraftTree:
        """Grow the trees of the requests from `first` on, as many as fit."""
        assert self._tree_shape is not None
        part = slice(first, min(first + self._trees_at_once, len(positions)))
        table = metadata.block_table_tensor[part]
        self._tree_growth.begin(
            replace(metadata, block_table_tensor=table), positions[part]
        )
        return grow(
            HeadOutput(root.features[part], root.logits[part]),
            self._tree_growth.advance,
            self._to_target_ids,
            self._tree_shape,
            self._enough(len(table) / len(positions)),
        )

    def _enough(self, share: float = 1.0) -> IsEnough | None:
        """When to stop growing, as the plan has it, for a share of the requests.

        Asking costs a device synchronisation, so only the CPU asks.
        """
        if self.plan is None:
            return None
        asks, min_mass = self.device.type == "cpu", self.plan.min_mass * share
        return lambda scores: asks and float(scores.exp().sum()) < min_mass

    def _keep_chains(self, chains: DraftTree) -> torch.Tensor:
        if self.plan is not None:
            self.last_scores = chains.scores.tolist()
        return chains.token_ids

    def _keep_trees(self, trees: list[DraftTree]) -> torch.Tensor:
        """Put nodes in depth-first order and keep their parents for the scheduler."""
        trees = _equally_wide(trees)
        parents = torch.cat([tree.parents for tree in trees]).cpu().numpy()
        order = depth_first(parents)
        new_index = np.argsort(order, axis=1)
        old = np.take_along_axis(parents, order, axis=1)
        moved = np.take_along_axis(new_index, old.clip(min=0), axis=1)
        self.last_parents = np.where(old >= 0, moved, old).tolist()
        index = torch.from_numpy(order).to(self.device)
        scores = torch.cat([tree.scores for tree in trees])
        self.last_scores = scores.gather(1, index).tolist()
        token_ids = torch.cat([tree.token_ids for tree in trees])
        return token_ids.gather(1, index)

    def _greedy_sample(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Argmax over the draft vocabulary; logits never go to the target's."""
        self._first_logits = self.draft_logits(hidden_states)
        token_ids = argmax(self._first_logits)
        if self._to_target_ids is None:
            return token_ids
        return self._to_target_ids[token_ids]

    def _sample_draft_tokens(
        self, hidden_states: torch.Tensor, sampling_metadata: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if self._draws_from_q(sampling_metadata):
            return super()._sample_draft_tokens(hidden_states, sampling_metadata)
        return self._greedy_sample(hidden_states), None

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
        return fed_back, self.draft_logits(hidden)

    def catch_up(
        self,
        token_ids: torch.Tensor,  # [rows]
        positions: torch.Tensor,  # [rows]
        features: torch.Tensor,  # [rows, taps * hidden], of the target
        metadata: CommonAttentionMetadata,
    ) -> None:
        """Fill the head's KV cache with rows that it was not run on when they came."""
        self.work.passes += 1
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
        self.work.rows += rows
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
