"""Verification of drafts inside vLLM (see `verify` and `rejection`).

Batches that are greedy and unprocessed take one argmax over all rows. Everything else
walks the trees level by level with vLLM's own Sampler on one row a request, in batch
order, so that every processor and random generator sees what it would see in a run
without speculation: one row a request, the true history, one draw an emitted token,
and `update_state` between two tokens. That is why min-p, logit bias, and processors of
the user's are right here, which vLLM refuses beside its own rejection sampler. Requests
with sampled drafts are judged by the law that the sampler draws from there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.sample.logits_processor import (
    LogitBiasLogitsProcessor,
    MinTokensLogitsProcessor,
)
from vllm.v1.sample.metadata import SamplingMetadata

from ..argmax import argmax
from ..verify import Verdict, match_tree, matching_child, walk, without_padding
from .drafts import Drafts
from .drawn_drafts import DrawnBatch
from .target_law import TargetLaw


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


def argmax_of_roots(logits: torch.Tensor) -> SamplerOutput:
    """A greedy step without drafts: [num_reqs, vocab] -> one token each."""
    return SamplerOutput(argmax(logits)[:, None].to(torch.int32), None)


class SampledWalk:
    """What the target says, with its own sampler, at the nodes that walks come to.

    Args:
        logits: [num_rows, vocab].
        drawn: requests whose drafts were sampled; the others are matched.
    """

    def __init__(
        self,
        logits: torch.Tensor,
        drafts: Drafts,
        sampler: Any,
        sampling: SamplingMetadata,
        law: TargetLaw,
        drawn: DrawnBatch | None,
    ) -> None:
        self.logits, self.drafts = logits, drafts
        self.sampler, self.sampling = sampler, sampling
        self.law, self.drawn = law, drawn
        self.parents = without_padding(drafts.parents, drafts.num_nodes)
        self._token: torch.Tensor | None = None  # said at the nodes above
        self._logprobs: list[LogprobsTensors] = []

    def verdict(
        self, histories: list[list[int]]
    ) -> tuple[Verdict, LogprobsTensors | None]:
        """Walk every tree.

        Args:
            histories: each request's tokens so far; the very lists that processors
                hold. They grow along the walk and are cut back at its end.

        Returns:
            The verdict, and log-probabilities as [num_reqs * width] rows if asked for.
        """
        num_reqs, width = self.drafts.token_ids.shape
        with _growing(histories[:num_reqs]) as self._grow:
            verdict = walk(self._say, num_reqs, width, self.logits.device)
        return verdict, _join(self._logprobs)

    def _say(
        self, here: torch.Tensor, alive: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self._go_on(alive)
        rows = self.drafts.rows.gather(1, here[:, None] + 1)[:, 0]
        with self.law.of(self.drawn.requests if self.drawn else None):
            output = self.sampler(
                logits=self.logits[rows],
                sampling_metadata=_for_the_living(self.sampling, alive),
            )
        if output.logprobs_tensors is not None:
            self._logprobs.append(output.logprobs_tensors)
        token = output.sampled_token_ids[:, 0].long()
        siblings = self.parents == here[:, None]
        child = matching_child(self.drafts.token_ids, siblings, token)
        if self.drawn is not None:
            at, right = self.drawn.requests, self.drawn.came_back
            judged_token, judged_child = self.drawn.judge(here[at], self.law.p)
            token[at] = torch.where(right, judged_token, token[at])
            child[at] = torch.where(right, judged_child, child[at])
        self._token = token
        return token, child

    def _go_on(self, alive: torch.Tensor) -> None:
        """Let processors see the tokens that the living have accepted."""
        if self._token is None:
            return
        self._grow(self._token, alive)
        for processor in self.sampling.logitsprocs.all:
            processor.update_state(None)


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
