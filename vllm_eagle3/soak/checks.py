"""What must hold when a soak is over: nothing wrong, leaked, grown or decayed."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from vllm_eagle3.acceptance import (
    DraftCounts,
    acceptance_length,
    acceptance_length_error,
)
from vllm_eagle3.soak import law
from vllm_eagle3.soak.judge import Verdict
from vllm_eagle3.soak.meter import Counters

MEMORY_GROWTH = 0.02
NOISE_ERRORS = 4.0  # standard errors that first and last may lie apart
HIT_RATE_LOSS = 0.05


@dataclass
class Round:
    """The catalogue once.

    Attributes:
        verdicts: of each answer, with its request's number and kind.
        samples: of each prompt whose law is known.
        kv_left: share of KV blocks that was taken when all requests had ended.
        memory: bytes of the server's processes, read every second.
    """

    seconds: float = 0.0
    verdicts: list[tuple[int, str, Verdict]] = field(default_factory=list)
    samples: dict[int, list[tuple[int, ...]]] = field(default_factory=dict)
    counters: Counters = field(default_factory=Counters)
    kv_left: float = 0.0
    memory: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Check:
    """One thing that must hold: what was found, in words with figures."""

    name: str
    ok: bool
    found: str


def thirds(rounds: Sequence[Round]) -> tuple[Sequence[Round], ...]:
    """First, second and last third; the last has what does not divide."""
    size = len(rounds) // 3
    return rounds[:size], rounds[size : 2 * size], rounds[2 * size :]


def check_all(
    rounds: Sequence[Round], laws: Mapping[int, law.Law], is_alive: bool
) -> list[Check]:
    """Every check, whether it holds or not."""
    server = Check("server", is_alive, "alive" if is_alive else "ended by itself")
    if len(rounds) < 3:
        found = f"{len(rounds)}, want at least 3 to compare; give more minutes"
        return [server, answers_are_right(rounds), Check("rounds", False, found)]
    return [
        server,
        answers_are_right(rounds),
        *(law_holds(rounds, number, each) for number, each in sorted(laws.items())),
        no_block_leaks(rounds),
        memory_is_steady(rounds),
        drafts_are_accepted(rounds),
        acceptance_is_steady(rounds),
        cache_hits_are_steady(rounds),
    ]


def answers_are_right(rounds: Sequence[Round]) -> Check:
    verdicts = [entry for each in rounds for entry in each.verdicts]
    wrong = Counter(kind for _, kind, verdict in verdicts if verdict.wrong)
    ties = sum(verdict.near_tie for _, _, verdict in verdicts)
    found = f"{wrong.total()} of {len(verdicts)} wrong, {ties} near ties"
    if wrong:
        found += f" ({', '.join(f'{n} {kind}' for kind, n in wrong.items())})"
    return Check("answers", bool(verdicts) and not wrong, found)


def law_holds(rounds: Sequence[Round], number: int, exact: law.Law) -> Check:
    """Chi-squared of the joint samples."""
    samples = [s for each in rounds for s in each.samples.get(number, [])]
    found = law.p_value(samples, exact)
    return Check(
        f"law of prompt {number}",
        bool(samples) and found >= law.LEAST_P,
        f"p = {found:.2g} of chi-squared, {len(samples)} samples",
    )


def no_block_leaks(rounds: Sequence[Round]) -> Check:
    most = max(each.kv_left for each in rounds)
    return Check("KV blocks", most == 0, f"{most:.2%} taken when idle, at most")


def memory_is_steady(rounds: Sequence[Round]) -> Check:
    """Median of the last third against the second; the first one warms up."""
    _, *memory = (
        [m for each in third for m in each.memory] for third in thirds(rounds)
    )
    if not all(memory):
        return Check("memory", False, "the server was not read in a third")
    second, last = (statistics.median(third) for third in memory)
    growth = last / second - 1
    found = f"{last / 2**20:.0f} MiB in the last third, {growth:+.2%} from the second"
    return Check("memory", growth <= MEMORY_GROWTH, found)


def drafts_are_accepted(rounds: Sequence[Round]) -> Check:
    counts = _counts(rounds)
    found = f"{counts.accepted_tokens} of {counts.draft_tokens} draft tokens accepted"
    return Check("speculation", counts.accepted_tokens > 0, found)


def acceptance_is_steady(rounds: Sequence[Round]) -> Check:
    first, _, last = (_counts(third) for third in thirds(rounds))
    lengths = acceptance_length(first), acceptance_length(last)
    errors = acceptance_length_error(first), acceptance_length_error(last)
    if None in lengths or None in errors:
        return Check("acceptance", False, "nothing was drafted in a third")
    apart = lengths[1] - lengths[0]  # type: ignore[operator]
    noise = math.hypot(*errors)  # type: ignore[arg-type]
    found = f"{lengths[0]:.3f} at first, {lengths[1]:.3f} at last, noise {noise:.3f}"
    return Check("acceptance", abs(apart) <= NOISE_ERRORS * noise, found)


def cache_hits_are_steady(rounds: Sequence[Round]) -> Check:
    """The last third against the second; the first one fills the cache.

    Which blocks are still there depends on who ran beside whom, so small rounds differ;
    what they differ by inside the two thirds is the noise.
    """
    _, *compared = thirds(rounds)
    second, last = (
        sum((each.counters for each in third), Counters()).hit_rate
        for third in compared
    )
    noise = _error_of_difference(
        [[each.counters.hit_rate for each in third] for third in compared]
    )
    found = (
        f"{last:.1%} of prompt tokens in the last third, {second:.1%} in the second,"
        f" noise {noise:.1%}"
    )
    allowed = max(HIT_RATE_LOSS * second, NOISE_ERRORS * noise)
    return Check("prefix cache", last >= second - allowed, found)


def _error_of_difference(groups: Sequence[Sequence[float]]) -> float:
    """Standard error of the difference of two means, by the spread in both groups."""
    freedom = sum(len(group) - 1 for group in groups)
    if not freedom:
        return 0.0
    squares = sum(statistics.pvariance(group) * len(group) for group in groups)
    return math.sqrt(squares / freedom * sum(1 / len(group) for group in groups))


def _counts(rounds: Sequence[Round]) -> DraftCounts:
    return sum((each.counters.drafts for each in rounds), DraftCounts())
