"""The teacher-parity gate: does the trainer see the target that will be served?

A head learns from logits that transformers computes and is judged by logits that vLLM
computes. A final norm of another kind, a soft cap or a scale left out, a target that
one of the two runs differently: all of these only show as poor acceptance much later.
So log-probabilities of some replies are compared before the first step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ..engine import EngineMode, EngineSpec
from .data import Row, collate
from .features import TargetFeatures

# An engine's log-probability of each id but the first (see `Engine.score`).
Score = Callable[[EngineSpec, Sequence[Sequence[int]]], list[list[float]]]
# Mean difference, in nats. Rounding in bfloat16 makes about 0.02 on replies of a
# small target; a final norm left out makes several.
TOLERANCE_NATS = 0.1


@dataclass(frozen=True)
class Parity:
    """Differences over reply tokens, in nats; `worst_at` is (row, index in its ids)."""

    mean: float
    worst: float
    worst_at: tuple[int, int]
    num_tokens: int


def compare_with_engine(
    target: TargetFeatures, rows: Sequence[Row], scores: Sequence[Sequence[float]]
) -> Parity:
    """Compare what training reads of `target` with an engine's log-probabilities.

    Args:
        scores: per row the engine's log-probability of each id but the first.
    """
    gaps: list[torch.Tensor] = []
    places: list[tuple[int, int]] = []
    for number, (row, row_scores) in enumerate(zip(rows, scores, strict=True)):
        batch = collate([row])
        readings = target.read(batch)
        (supervised,) = (batch.span_ids[0] > 0).nonzero(as_tuple=True)
        logits = target.output_layer(readings.last)
        ids = batch.ids[0, supervised].to(logits.device)
        ours = logits.gather(1, ids[:, None])[:, 0] - readings.mass
        theirs = torch.tensor(row_scores)[supervised - 1]
        gaps.append((ours.cpu() - theirs).abs())
        places += [(number, index) for index in supervised.tolist()]
    gap = torch.cat(gaps)
    worst = int(gap.argmax())
    return Parity(gap.mean().item(), gap[worst].item(), places[worst], len(gap))


def teacher_parity_gate(
    score: Score, report: Callable[[str], None]
) -> Callable[[TargetFeatures, Sequence[Row]], None]:
    """A gate for `Trainer`; `score` is asked for the rows' log-probabilities."""

    def gate(target: TargetFeatures, rows: Sequence[Row]) -> None:
        if not rows:
            return
        spec = EngineSpec(
            target.target_dir,
            dtype=str(target.model.dtype).removeprefix("torch."),
            max_model_len=max(len(row.ids) for row in rows) + 1,
            mode=EngineMode(enforce_eager=True),
        )
        scores = score(spec, [row.ids for row in rows])
        parity = compare_with_engine(target, rows, scores)
        require_parity(parity, rows)
        report(
            f"target as in the engine: {parity.num_tokens} reply tokens differ by "
            f"{parity.mean:.3f} nats on average"
        )

    return gate


def require_parity(parity: Parity, rows: Sequence[Row]) -> None:
    """Refuse to train on a target that is not the engine's.

    Raises:
        ValueError: with the difference, the worst place and what may be wrong.
    """
    # A NaN fails every comparison, so what is right is asked for.
    if parity.mean <= TOLERANCE_NATS:
        return
    row, index = parity.worst_at
    raise ValueError(
        f"parity_rows: the target's logits, rebuilt from the states that the head is "
        f"trained on, differ from the engine's log-probabilities by {parity.mean:.3g} "
        f"nats on average over {parity.num_tokens} reply tokens of {len(rows)} rows "
        f"(want at most {TOLERANCE_NATS}); worst {parity.worst:.3g} at index {index} "
        f"of {rows[row].where or 'row ' + str(row)}. transformers and vLLM run this "
        "target differently: compare their versions and the target's config.json, or "
        "set parity_rows to 0 to train all the same"
    )
