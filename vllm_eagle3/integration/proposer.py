"""The drafter inside vLLM: vLLM's first pass of the head, then our growth.

The first pass runs the head on every new token with the target's true features and
fills its KV cache; it is vLLM's own. Each further level is one pass over the frontier
with as little around it as possible: draft logits stay in the draft vocabulary, and
the attention metadata of a level is derived from the first pass's.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn
from vllm.forward_context import set_forward_context
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.spec_decode.eagle import EagleProposer
from vllm.v1.spec_decode.utils import PADDING_SLOT_ID

from ..config import read_options
from ..drafter import HeadOutput, TreeShape, grow


class Eagle3Proposer(EagleProposer):
    """EagleProposer that grows drafts with `drafter.grow`."""

    def __init__(self, vllm_config: Any, device: torch.device, runner: Any) -> None:
        super().__init__(vllm_config, device, runner)
        self.drafts = read_options(vllm_config.additional_config).shape != "off"
        # What the head said last: (normed hidden, fed-back feature), [tokens, hidden].
        self._output: tuple[torch.Tensor, torch.Tensor] | None = None
        self._first_logits: torch.Tensor | None = None
        self._to_target_ids: torch.Tensor | None = None

    def load_model(self, target_model: nn.Module) -> None:
        super().load_model(target_model)
        self.model.register_forward_hook(self._keep_output)
        d2t = getattr(self.model, "draft_id_to_target_id", None)
        if d2t is not None:
            drafts = torch.arange(d2t.shape[0], device=d2t.device)
            self._to_target_ids = drafts + d2t

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
        first = super().propose
        if token_indices_to_sample is None:
            token_indices_to_sample = common_attn_metadata.query_start_loc[1:] - 1
        sampled = self._enable_probabilistic_draft_probs
        stock = sampled and not sampling_metadata.all_greedy
        drafts = num_speculative_tokens if self.drafts else 0
        first_drafts = first(
            drafts if stock else min(drafts, 1),
            target_token_ids,
            target_positions,
            target_hidden_states,
            next_token_ids,
            token_indices_to_sample,
            common_attn_metadata,
            sampling_metadata,
            mm_embed_inputs,
            num_rejected_tokens_gpu,
            slot_mappings,
        )
        if stock or drafts <= 1:
            return first_drafts
        return self._grow(
            TreeShape.chain(drafts),
            token_indices_to_sample.long(),
            common_attn_metadata,
            num_rejected_tokens_gpu,
        )

    def _grow(
        self,
        shape: TreeShape,
        rows: torch.Tensor,  # [num_reqs], each request's last confirmed token
        metadata: CommonAttentionMetadata,
        num_rejected: torch.Tensor | None,
    ) -> torch.Tensor:
        assert self._output is not None and self._first_logits is not None
        root = HeadOutput(self._output[1][rows][:, None], self._first_logits[:, None])
        level = _Level(self, metadata, self._get_positions_of(rows), num_rejected)
        return grow(root, level.advance, self._to_target_ids, shape).token_ids

    def _get_positions_of(self, rows: torch.Tensor) -> torch.Tensor:
        """Positions of rows of the first pass (the first of three under M-RoPE)."""
        positions = self.mrope_positions[0] if self.uses_mrope else self.positions
        return positions[rows]

    def _greedy_sample(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Argmax over the draft vocabulary; logits never go to the target's."""
        self._first_logits = self.draft_logits(hidden_states)
        token_ids = self._first_logits.argmax(-1)
        if self._to_target_ids is None:
            return token_ids
        return self._to_target_ids[token_ids]

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
    ) -> HeadOutput:
        """One pass of the head over one row a request, writing its KV as it goes."""
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
        logits = self.draft_logits(hidden[:rows])
        return HeadOutput(fed_back[:rows, None], logits[:, None])

    def _keep_output(self, _module: nn.Module, _inputs: Any, output: Any) -> None:
        self._output = output


class _Level:
    """Where the rows of each level of one proposal go: positions, lengths, slots."""

    def __init__(
        self,
        proposer: Eagle3Proposer,
        metadata: CommonAttentionMetadata,
        positions: torch.Tensor,  # [num_reqs], of the last confirmed tokens
        num_rejected: torch.Tensor | None,
    ) -> None:
        num_reqs = positions.shape[0]
        self.proposer = proposer
        self.positions = positions
        # The first pass may have run over refused drafts too; they do not count.
        seq_lens = metadata.seq_lens
        if num_rejected is not None:
            seq_lens = seq_lens - num_rejected
        self.seq_lens = seq_lens
        starts = np.arange(num_reqs + 1, dtype=np.int32)
        self.metadata = replace(
            metadata,
            num_actual_tokens=num_reqs,
            max_query_len=1,
            query_start_loc=proposer.arange[: num_reqs + 1],
            query_start_loc_cpu=torch.from_numpy(starts),
        )

    def _upper_bound(self, level: int) -> torch.Tensor | None:
        bound = self.metadata.seq_lens_cpu_upper_bound
        return None if bound is None else bound + level

    def advance(
        self,
        level: int,
        token_ids: torch.Tensor,  # [num_reqs, 1]
        features: torch.Tensor,  # [num_reqs, 1, hidden]
        lineage: torch.Tensor,
    ) -> HeadOutput:
        """An `Advance` for chains: every row follows the one before it."""
        proposer, limit = self.proposer, self.proposer.max_model_len
        positions = self.positions + level
        inside = positions < limit
        # A draft past the limit is never scheduled; its row only must do no harm.
        positions = torch.where(inside, positions, 0)
        seq_lens = torch.where(inside, self.seq_lens + level, 1)
        block = positions // proposer.block_size
        block_ids = self.metadata.block_table_tensor.gather(1, block[:, None].long())
        slots = block_ids[:, 0] * proposer.block_size + positions % proposer.block_size
        metadata = replace(
            self.metadata,
            seq_lens=seq_lens.to(self.metadata.seq_lens.dtype),
            max_seq_len=min(self.metadata.max_seq_len + level, limit),
            slot_mapping=torch.where(inside, slots, PADDING_SLOT_ID),
            seq_lens_cpu_upper_bound=self._upper_bound(level),
        )
        return proposer.run_level(
            token_ids[:, 0], positions, features[:, 0], metadata, level
        )
