"""Equal token ids in fp32, where a near-tie of two tokens may go either way."""

from __future__ import annotations

from collections.abc import Sequence

from tests.engine_run import Run

NEAR_TIE = 1e-4  # log-probability gap below which fp32 may go either way


def differing(plain: Run, replies: Sequence[Sequence[int]]) -> list[int]:
    """Requests whose reply leaves the plain one, all of them at a near-tie.

    The plain run must have asked for logprobs=2. Replies may be longer or shorter than
    the plain ones; what both have is compared.

    Raises:
        AssertionError: a reply differs where there is no near-tie.
    """
    excused = []
    rows = zip(plain.token_ids, plain.gaps, replies, strict=True)
    for row, (want, gaps, got) in enumerate(rows):
        for place, (a, b) in enumerate(zip(want, got, strict=False)):
            if a != b:
                assert gaps[place] < NEAR_TIE, f"request {row}, token {place}: {a}!={b}"
                excused.append(row)
                break
    return excused
