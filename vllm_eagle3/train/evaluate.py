"""Predicted acceptance: what serving will accept, from teacher-forced unrolls.

Every start of a text gets the drafts that serving would make there. Serving does not
visit every start, though: after `a` accepted tokens it goes on `a + 1` tokens later,
so it spends more of its steps in stretches that are hard to draft, and a mean over all
starts promises too much. The steps are therefore walked as serving takes them:

    text          x x x x x x x x          accepted at each start   2 0 1 0 3 ...
    steps start   ^     ^ ^   ^            1st step accepts 2, the next 0, then 1, ...

For sampled drafts acceptance is a chance, so is the way, and all counts are expected
values. No counter of an engine is read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from ..draft_head import Eagle3DraftHead
from ..vocab import DraftVocab
from .data import Batch, Row, collate, make_batches
from .features import Features
from .ttt import DraftStep, unroll

_CHUNK = 512  # positions whose logits are alive at one time
_RESAMPLES = 1000
Interval = tuple[float, float]


@dataclass(frozen=True)
class Walk:
    """One text as serving would draft it; counts are expected values.

    steps: drafts made; reached: [depth], of these, drafts accepted beyond that depth.
    """

    steps: float
    reached: tuple[float, ...]


@dataclass(frozen=True)
class RowAcceptance:
    """The walks of one row (all its replies), for greedy and for sampled drafts."""

    kind: str
    greedy: Walk
    sampled: Walk


class WalkStatistics:
    """Figures of several walks; intervals are bootstrapped over rows."""

    def __init__(self, walks: Sequence[Walk]) -> None:
        # [rows, 1 + depths]: steps, then drafts accepted beyond each depth
        self._counts = torch.tensor(
            [[w.steps, *w.reached] for w in walks], dtype=torch.double
        )

    @property
    def steps(self) -> float:
        return self._counts[:, 0].sum().item()

    @property
    def acceptance_length(self) -> float:
        """Expected tokens per target pass, 1 + accepted / drafts."""
        return _lengths(self._counts.sum(0)).item()

    @property
    def n_alpha(self) -> tuple[float, ...]:
        """Share accepted at each depth, of those accepted at all before (fig. 7)."""
        return tuple(_conditional(self._counts.sum(0)).tolist())

    @property
    def cumulative(self) -> tuple[float, ...]:
        """Share of all drafts accepted beyond each depth, as vLLM's counters say it."""
        counts = self._counts.sum(0)
        return tuple((counts[1:] / counts[0].clamp(min=1e-9)).tolist())

    def length_interval(self, confidence: float = 0.95) -> Interval:
        low, high = _quantiles(_lengths(self._resampled), confidence)
        return float(low), float(high)

    def n_alpha_intervals(self, confidence: float = 0.95) -> tuple[Interval, ...]:
        low, high = _quantiles(_conditional(self._resampled), confidence)
        return tuple(zip(low.tolist(), high.tolist(), strict=True))

    @cached_property
    def _resampled(self) -> torch.Tensor:
        """Counts of sets of rows drawn with replacement, [resamples, 1 + depths]."""
        rows = len(self._counts)
        generator = torch.Generator().manual_seed(0)
        chosen = torch.randint(rows, (_RESAMPLES, rows), generator=generator)
        return self._counts[chosen].sum(1)


@dataclass(frozen=True)
class PredictedAcceptance:
    """Acceptance of chains of one length, row by row.

    Greedy drafts are judged against the target's argmax at each place of the text:
    exact for text that the target wrote greedily. Sampled drafts are judged by
    sum min(p, q) at temperature 1. A token outside the draft vocabulary is refused.
    """

    rows: tuple[RowAcceptance, ...]

    @cached_property
    def greedy(self) -> WalkStatistics:
        return WalkStatistics([row.greedy for row in self.rows])

    @cached_property
    def sampled(self) -> WalkStatistics:
        return WalkStatistics([row.sampled for row in self.rows])

    @property
    def acceptance_length(self) -> float:
        return self.greedy.acceptance_length

    @property
    def n_alpha(self) -> tuple[float, ...]:
        return self.greedy.n_alpha

    def by_kind(self) -> dict[str, PredictedAcceptance]:
        """The same per domain."""
        kinds = sorted({row.kind for row in self.rows})
        return {
            kind: PredictedAcceptance(tuple(r for r in self.rows if r.kind == kind))
            for kind in kinds
        }

    def summary(self) -> dict[str, Any]:
        """For logs and provenance."""
        return {
            "acceptance_length": self.acceptance_length,
            "interval": list(self.greedy.length_interval()),
            "n_alpha": list(self.n_alpha),
            "n_alpha_intervals": [list(i) for i in self.greedy.n_alpha_intervals()],
            "cumulative": list(self.greedy.cumulative),
            "sampled_acceptance_length": self.sampled.acceptance_length,
            "sampled_interval": list(self.sampled.length_interval()),
            "sampled_n_alpha": list(self.sampled.n_alpha),
        }


@torch.no_grad()
def predict_acceptance(
    head: Eagle3DraftHead,
    target: Callable[[Batch], Features],
    vocab: DraftVocab,
    rows: Sequence[Row],
    num_steps: int,
    tokens_per_batch: int,
    precision: str = "bf16",
) -> PredictedAcceptance:
    """Judge chains of `num_steps` drafts of `head` along `rows`."""
    judged: list[RowAcceptance] = []
    for group in make_batches(rows, tokens_per_batch, seed=0):
        batch = collate(group)
        with autocast(batch.ids.device.type, precision):
            judged += _judge_batch(head, batch, target(batch), vocab, num_steps)
    return PredictedAcceptance(tuple(judged))


def autocast(device: str, precision: str) -> AbstractContextManager[Any]:
    """Products in bfloat16 with fp32 master weights, or everything as it is."""
    if precision == "bf16":
        return torch.autocast(device, torch.bfloat16)
    return nullcontext()


def _judge_batch(
    head: Eagle3DraftHead,
    batch: Batch,
    features: Features,
    vocab: DraftVocab,
    num_steps: int,
) -> list[RowAcceptance]:
    # Chance of acceptance of draft k made at start i; 0 where the text has ended.
    greedy = torch.zeros(*batch.span_ids.shape, num_steps)
    sampled = torch.zeros_like(greedy)
    is_start = torch.zeros_like(batch.span_ids, dtype=torch.bool)
    dtype = next(head.parameters()).dtype
    taps, embeds = features.taps.to(dtype), features.embeds.to(dtype)
    for step in unroll(head, taps, embeds, batch.span_ids, num_steps):
        hits, alphas = _judge_step(head, step, features, vocab)
        row, start = step.row.cpu(), step.start.cpu()
        greedy[row, start, step.k] = hits
        sampled[row, start, step.k] = alphas
        if step.k == 0:
            is_start[row, start] = True
    return [
        RowAcceptance(
            batch.rows[r].kind,
            _walk_replies(greedy[r], is_start[r]),
            _walk_replies(sampled[r], is_start[r]),
        )
        for r in range(len(batch.rows))
    ]


def _judge_step(
    head: Eagle3DraftHead, step: DraftStep, features: Features, vocab: DraftVocab
) -> tuple[torch.Tensor, torch.Tensor]:
    """Per position: is the best token the target's, and sum min(p, q)."""
    rows = features.law_row[step.row, step.predicted]
    hits, alphas = [], []
    for hidden, row in zip(step.hidden.split(_CHUNK), rows.split(_CHUNK), strict=True):
        logits = head.logits(hidden)
        drafts = vocab.to_target_ids[logits.argmax(-1).cpu()]
        hits.append((drafts == features.best[row].cpu()).float())
        overlap = torch.minimum(logits.float().softmax(-1), features.law[row].float())
        alphas.append(overlap.sum(-1).clamp(max=1.0).cpu())
    return torch.cat(hits), torch.cat(alphas)


def _walk_replies(accept: torch.Tensor, is_start: torch.Tensor) -> Walk:
    """Walk each stretch of starts of one row; accept: [tokens, depths]."""
    (places,) = is_start.nonzero(as_tuple=True)
    breaks = (places[1:] != places[:-1] + 1).nonzero(as_tuple=True)[0] + 1
    parts = places.tensor_split(breaks.tolist()) if len(places) else ()
    walks = [walk(accept[part].tolist()) for part in parts]
    reached = zip(*(w.reached for w in walks), strict=True)
    depths = tuple(sum(r) for r in reached) if walks else (0.0,) * accept.shape[-1]
    return Walk(sum(w.steps for w in walks), depths)


def walk(accept: Sequence[Sequence[float]]) -> Walk:
    """Serve one reply: the expected number of steps, and how deep they reach.

    Args:
        accept: accept[i][k] is the chance that draft k made at the reply's i-th start
            is accepted, given that the drafts before it were; 0 past its end.
    """
    depths = len(accept[0])
    visits = [1.0] + [0.0] * (len(accept) + depths)
    reached = [0.0] * depths
    for i, chances in enumerate(accept):
        alive = visits[i]
        for k, chance in enumerate(chances):
            # Refused at depth k: k tokens accepted and one of the target's own.
            visits[i + 1 + k] += alive * (1 - chance)
            alive *= chance
            reached[k] += alive
        visits[i + 1 + depths] += alive
    return Walk(sum(visits[: len(accept)]), tuple(reached))


def _lengths(counts: torch.Tensor) -> torch.Tensor:
    """[..., 1 + depths] -> acceptance length [...]."""
    return 1 + counts[..., 1:].sum(-1) / counts[..., 0].clamp(min=1e-9)


def _conditional(counts: torch.Tensor) -> torch.Tensor:
    """[..., 1 + depths] -> n-alpha [..., depths]."""
    return counts[..., 1:] / counts[..., :-1].clamp(min=1e-9)


def _quantiles(
    values: torch.Tensor, confidence: float
) -> tuple[torch.Tensor, torch.Tensor]:
    tail = (1 - confidence) / 2
    low, high = torch.quantile(values, values.new_tensor([tail, 1 - tail]), dim=0)
    return low, high
