"""Is the text the same? Token ids of a speculative run against the plain run.

At temperature 0 speculation must not change a token. In 16-bit arithmetic the same
numbers summed in another order may swap the plain run's two best tokens where they
are close; such a first difference is a near-tie, and all after it follows from it.
Anything else is an error, and in float32 every difference is one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vllm_eagle3.engine import Generation

# In nats. Logits of 16 and more are 0.125 apart in bfloat16, and each of two tokens
# may be rounded the other way.
NEAR_TIE_NATS = 0.25
SIXTEEN_BIT = ("bfloat16", "float16")


@dataclass(frozen=True)
class Difference:
    """The first place where two runs of a request part.

    `plain` and `other` are the tokens there, None past the end of a reply; `gap` is
    how much likelier the plain run held its own token, in nats, None where the other
    token was not among its two best.
    """

    request: int
    position: int
    plain: int | None
    other: int | None
    gap: float | None = None


def first_differences(
    plain: Sequence[Sequence[int]], other: Sequence[Sequence[int]]
) -> list[Difference]:
    """One entry per request whose token ids differ; both runs hold the same ones."""
    differences = []
    for index, (a, b) in enumerate(zip(plain, other, strict=True)):
        if tuple(a) != tuple(b):
            shared = min(len(a), len(b))
            pairs = zip(a, b, strict=False)
            places = (i for i, (x, y) in enumerate(pairs) if x != y)
            at = next(places, shared)
            differences.append(
                Difference(
                    index,
                    at,
                    a[at] if at < len(a) else None,
                    b[at] if at < len(b) else None,
                )
            )
    return differences


def plain_gap(difference: Difference, plain: Generation) -> float | None:
    """The `gap` of a difference, from the plain run with two log-probabilities."""
    places = plain.top_logprobs
    if places is None or difference.position >= len(places):
        return None
    best = places[difference.position]
    if difference.plain not in best or difference.other not in best:
        return None
    return best[difference.plain] - best[difference.other]


def is_near_tie(difference: Difference, dtype: str) -> bool:
    """True if rounding explains the difference; see the module."""
    if dtype not in SIXTEEN_BIT or difference.gap is None:
        return False
    return abs(difference.gap) <= NEAR_TIE_NATS
