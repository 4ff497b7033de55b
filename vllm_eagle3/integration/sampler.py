"""Verification of drafts inside vLLM by sample-and-match (see `verify`).

Batches that are greedy and unprocessed take one argmax over all rows. Everything else
walks the trees level by level with vLLM's own Sampler on one row a request, in batch
order, so that every processor and random generator sees what it would see in a run
without speculation: one row a request, the true history, one draw an emitted token,
and `update_state` between two tokens. That is why min-p, logit bias, and processors of
the user's are right here, which vLLM refuses beside its own rejection sampler.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.sample.logits_processor import (
    LogitBiasLogitsProcessor,
    MinTokensLogitsProcessor,
)
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

from ..argmax import argmax
from ..tree import ROOT
from ..verify import PADDING, Verdict, match_tree


@dataclass(frozen=True)
class Drafts:
    """The drafts of a step as padded trees, beside the rows of their logits.

    Attributes:
        token_ids, parents: [num_reqs, num_nodes]; padding nodes are never reached.
        num_nodes: [num_reqs].
        rows: [num_reqs, num_nodes + 1], row of the logits of the root and each node.
    """

    token_ids: torch.Tensor
    parents: torch.Tensor
    num_nodes: torch.Tensor
    rows: torch.Tensor


def read_drafts(
    metadata: SpecDecodeMetadata, trees: dict[int, torch.Tensor], num_rows: int
) -> Drafts:
    """Make a rectangle of a step's drafts.

    Args:
        trees: request -> parents of its nodes; the others are chains.
        num_rows: rows of logits.
    """
    device = metadata.draft_token_ids.device
    num_nodes = torch.tensor(metadata.num_draft_tokens, device=device)
    columns = torch.arange(metadata.max_spec_len + 1, device=device)
    first_row = metadata.cu_num_sampled_tokens - num_nodes - 1
    # Rows behind a request's own are never read, they only must exist.
    rows = (first_row[:, None] + columns).clamp(max=num_rows - 1)
    in_use = columns[1:] <= num_nodes[:, None]
    token_ids = torch.full_like(rows[:, 1:], PADDING, dtype=torch.int64)
    token_ids[in_use] = metadata.draft_token_ids.long()
    parents = (columns[1:] - 2).expand_as(token_ids).clone()
    for request, tree in trees.items():
        parents[request, : len(tree)] = tree.to(device)
    return Drafts(token_ids, parents, num_nodes, rows)


def takes_plain_argmax(sampling: SamplingMetadata) -> bool:
    """True when every row's token is the argmax of its raw logits and nothing else."""
    return (
        sampling.all_greedy
        and sampling.no_penalties
        and sampling.max_num_logprobs is None
        and not sampling.logprob_token_ids
        and sampling.allowed_token_ids_mask is None
        and not sampling.bad_words_token_ids
        and not any(map(_active, sampling.logitsprocs.non_argmax_invariant))
        and not _limits_thinking(sampling)
    )


def _active(processor: Any) -> bool:
    """Whether a processor may change a row; vLLM's own say for whom they are on."""
    match processor:
        case MinTokensLogitsProcessor():
            return bool(processor.min_toks)
        case LogitBiasLogitsProcessor():
            return bool(processor.biases)
        case _:
            return True


def _limits_thinking(sampling: SamplingMetadata) -> bool:
    holder = sampling.thinking_budget_state_holder
    return holder is not None and holder.has_tracked_requests()


def match_by_argmax(logits: torch.Tensor, drafts: Drafts) -> Verdict:
    """Judge a greedy batch with one argmax over all rows."""
    target_tokens = argmax(logits)[drafts.rows]
    return match_tree(drafts.token_ids, drafts.parents, drafts.num_nodes, target_tokens)


def match_by_sampling(
    logits: torch.Tensor,  # [num_rows, vocab]
    drafts: Drafts,
    sampler: Any,
    sampling: SamplingMetadata,
    histories: list[list[int]],
) -> tuple[Verdict, LogprobsTensors | None]:
    """Walk every tree with the target's own samples.

    Args:
        histories: each request's tokens so far; the very lists that processors hold.
            They grow along the walk and are cut back at its end.

    Returns:
        The verdict, and log-probabilities as [num_reqs * width] rows if asked for.
    """
    num_reqs, width = drafts.token_ids.shape
    reqs = torch.arange(num_reqs, device=logits.device)
    in_use = torch.arange(width, device=logits.device) < drafts.num_nodes[:, None]
    here = torch.full((num_reqs,), ROOT, device=logits.device)
    alive = torch.ones(num_reqs, dtype=torch.bool, device=logits.device)
    emitted: list[torch.Tensor] = []
    accepted: list[torch.Tensor] = []
    logprobs: list[LogprobsTensors] = []
    with _growing(histories[:num_reqs]) as grow:
        for _ in range(width + 1):
            output = sampler(
                logits=logits[drafts.rows[reqs, here + 1]],
                sampling_metadata=_for_the_living(sampling, alive),
            )
            token = output.sampled_token_ids[:, 0].long()
            emitted.append(torch.where(alive, token, PADDING))
            if output.logprobs_tensors is not None:
                logprobs.append(output.logprobs_tensors)
            child = in_use & (drafts.parents == here[:, None])
            child &= drafts.token_ids == token[:, None]
            alive = alive & child.any(1)
            if not bool(alive.any()):
                break
            here = torch.where(alive, child.int().argmax(1), here)
            accepted.append(torch.where(alive, here, PADDING))
            grow(token, alive)
            for processor in sampling.logitsprocs.all:
                processor.update_state(None)
    empty = drafts.token_ids.new_empty(num_reqs, 0)
    nodes = torch.stack(accepted, 1) if accepted else empty
    return Verdict(torch.stack(emitted, 1), nodes), _join(logprobs)


@contextmanager
def _growing(
    histories: list[list[int]],
) -> Iterator[Callable[[torch.Tensor, torch.Tensor], None]]:
    """Give a function that appends the tokens of living requests; undo it at the end.

    A request that has stopped keeps the history of its last draw: its row is still
    sampled from, and what a processor makes of it must stay the same.
    """
    lengths = [len(history) for history in histories]

    def grow(token_ids: torch.Tensor, alive: torch.Tensor) -> None:
        for row in alive.nonzero()[:, 0].tolist():
            histories[row].append(int(token_ids[row]))

    try:
        yield grow
    finally:
        for history, length in zip(histories, lengths, strict=True):
            del history[length:]


def _for_the_living(
    sampling: SamplingMetadata, alive: torch.Tensor
) -> SamplingMetadata:
    """The same parameters; a request that has stopped must not use its generator."""
    living = alive.tolist()
    generators = {r: g for r, g in sampling.generators.items() if living[r]}
    # Drafts are no part of a history here, and rows are one a request.
    return replace(sampling, generators=generators, spec_token_ids=None)


def _join(levels: list[LogprobsTensors]) -> LogprobsTensors | None:
    """Levels of [num_reqs] rows to rows in the order of the output tokens."""
    if not levels:
        return None
    ids, values, ranks = (
        torch.stack([getattr(level, name) for level in levels], 1).flatten(0, 1)
        for name in ("logprob_token_ids", "logprobs", "selected_token_ranks")
    )
    return LogprobsTensors(ids, values, ranks)


def as_output(
    verdict: Verdict, logprobs: LogprobsTensors | None = None
) -> SamplerOutput:
    """In the form vLLM expects: int32 [num_reqs, width], padded with -1."""
    return SamplerOutput(verdict.token_ids.to(torch.int32), logprobs)
