"""Model runners whose drafter is ours and whose greedy batches are matched directly."""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.outputs import SamplerOutput
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from ..tree import chain
from ..verify import match_tree
from .proposer import Eagle3Proposer


class Eagle3Runner(GPUModelRunner):
    """What both runners add; mixed in front of vLLM's own class."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.drafter = Eagle3Proposer(self.vllm_config, self.device, self)

    def _sample(
        self,
        logits: torch.Tensor | None,
        spec_decode_metadata: SpecDecodeMetadata | None,
    ) -> SamplerOutput:
        sampling = self.input_batch.sampling_metadata
        if (
            logits is None
            or spec_decode_metadata is None
            or not _takes_plain_argmax(sampling)
        ):
            return super()._sample(logits, spec_decode_metadata)
        return SamplerOutput(
            sampled_token_ids=_match_drafts(logits, spec_decode_metadata),
            logprobs_tensors=None,
        )


class Eagle3CPUModelRunner(Eagle3Runner, CPUModelRunner):
    pass


class Eagle3GPUModelRunner(Eagle3Runner):
    pass


def _takes_plain_argmax(sampling: SamplingMetadata) -> bool:
    """True when every row's token is the argmax of its raw logits and nothing else."""
    return (
        sampling.all_greedy
        and sampling.no_penalties
        and sampling.max_num_logprobs is None
        and sampling.allowed_token_ids_mask is None
        and not sampling.bad_words_token_ids
        and not sampling.logitsprocs.non_argmax_invariant
        and sampling.thinking_budget_state_holder is None
    )


def _match_drafts(
    logits: torch.Tensor,  # [num_reqs + num_drafts, vocab], root before its drafts
    metadata: SpecDecodeMetadata,
) -> torch.Tensor:
    """Judge all drafts by one argmax; [num_reqs, max_drafts + 1], padded with -1."""
    num_drafts = torch.tensor(metadata.num_draft_tokens, device=logits.device)
    width = metadata.max_spec_len
    columns = torch.arange(width + 1, device=logits.device)
    # Ragged rows to a rectangle: what lies past a request's drafts is never read.
    first_row = metadata.cu_num_sampled_tokens - num_drafts - 1
    rows = (first_row[:, None] + columns).clamp(max=logits.shape[0] - 1)
    target_tokens = logits.argmax(-1)[rows]
    drafts = torch.full_like(target_tokens[:, 1:], -1)
    drafts[columns[1:] <= num_drafts[:, None]] = metadata.draft_token_ids.long()
    tree = chain(drafts, drafts)
    verdict = match_tree(tree.token_ids, tree.parents, num_drafts, target_tokens)
    output = target_tokens.new_full((len(num_drafts), width + 1), -1)
    output[:, : verdict.token_ids.shape[1]] = verdict.token_ids
    return output.to(torch.int32)
