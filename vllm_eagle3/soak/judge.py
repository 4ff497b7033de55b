"""Is an answer the one that the target gives without speculation?"""

from __future__ import annotations

from dataclasses import dataclass

from vllm_eagle3.soak.client import Answer, Choice
from vllm_eagle3.soak.workload import Request

# In float32 another batch rounds differently, by far less than this.
NEAR_TIE_NATS = 1e-4
LOGPROB_TOLERANCE = 1e-3


@dataclass(frozen=True)
class Verdict:
    """`wrong` says what is wrong, empty if nothing is.

    A near tie is a first difference where the target's two likeliest tokens were as
    good as equal; what follows it cannot be compared.
    """

    wrong: str = ""
    near_tie: bool = False


def judge(request: Request, expected: Answer, answer: Answer) -> Verdict:
    """Compare an answer with the one without speculation.

    Args:
        expected: whole, also where the client drops the request; at temperature 0 with
            two log-probabilities a token, which tell near ties.
    """
    if answer.status != expected.status:
        return Verdict(
            f"status {answer.status}, want {expected.status}; {answer.error}"
        )
    if request.law is not None:
        return Verdict(_law_fault(expected, answer))
    dropped = request.drop_after is not None
    if dropped and not answer.num_tokens:
        return Verdict("no token before the client left")
    if not dropped and answer.choices.keys() != expected.choices.keys():
        return Verdict(f"choices {set(answer.choices)}, want {set(expected.choices)}")
    near_tie = False
    for index, choice in answer.choices.items():
        want = expected.choices[index]
        if _is_near_tie(choice, want):
            near_tie = True
        elif fault := _fault(choice, want, request, dropped):
            return Verdict(f"choice {index}: {fault}")
    if not dropped and not near_tie and _miscounted(answer, expected):
        return Verdict(
            f"{answer.completion_tokens} completion tokens counted, want "
            f"{expected.completion_tokens}"
        )
    return Verdict(near_tie=near_tie)


def _law_fault(expected: Answer, answer: Answer) -> str:
    lengths = [len(choice.token_ids) for choice in answer.choices.values()]
    wanted = [len(choice.token_ids) for choice in expected.choices.values()]
    return "" if lengths == wanted else f"samples of {lengths} tokens, want {wanted}"


def _is_near_tie(choice: Choice, want: Choice) -> bool:
    place = _first_difference(choice.token_ids, want.token_ids)
    if place is None or place >= min(len(choice.token_ids), len(want.top_logprobs)):
        return False
    top = sorted(want.top_logprobs[place].values(), reverse=True)
    return len(top) > 1 and top[0] - top[1] < NEAR_TIE_NATS


def _first_difference(ids: list[int], want: list[int]) -> int | None:
    """First place where two replies differ; the end of the shorter one counts."""
    if ids == want:
        return None
    pairs = enumerate(zip(ids, want, strict=False))
    shorter = min(len(ids), len(want))
    return next((place for place, (a, b) in pairs if a != b), shorter)


def _fault(choice: Choice, want: Choice, request: Request, dropped: bool) -> str:
    place = _first_difference(choice.token_ids, want.token_ids)
    if dropped:
        if place is not None and place < len(choice.token_ids):
            return _id_fault(choice, want, place)
        return "" if want.text.startswith(choice.text) else _text_fault(choice, want)
    # An accepted run may end behind a stop string: the text ends at it, the ids and
    # their count need not (vLLM's own rule, upstream pull request 47616).
    runs_on = isinstance(want.stop_reason, str) and place == len(want.token_ids)
    if place is not None and not runs_on:
        return _id_fault(choice, want, place)
    if choice.text != want.text:
        return _text_fault(choice, want)
    if choice.finish_reason != want.finish_reason:
        return f"finish_reason {choice.finish_reason}, want {want.finish_reason}"
    if choice.stop_reason != want.stop_reason:
        return f"stop_reason {choice.stop_reason!r}, want {want.stop_reason!r}"
    if "logprobs" in request.fields:
        return _logprob_fault(choice, want)
    return ""


def _id_fault(choice: Choice, want: Choice, place: int) -> str:
    near = slice(max(0, place - 2), place + 3)
    return f"token {place}: ...{choice.token_ids[near]}, want {want.token_ids[near]}"


def _text_fault(choice: Choice, want: Choice) -> str:
    return f"text {choice.text!r}, want {want.text!r}"


def _logprob_fault(choice: Choice, want: Choice) -> str:
    for place, top in enumerate(want.top_logprobs):
        got = choice.top_logprobs[place] if place < len(choice.top_logprobs) else {}
        for token in top.keys() & got.keys():
            if abs(top[token] - got[token]) > LOGPROB_TOLERANCE:
                return f"log-probability {got[token]} at token {place}, want {top}"
        if not top.keys() & got.keys():
            return f"log-probabilities of {set(got)} at token {place}, want {set(top)}"
    return ""


def _miscounted(answer: Answer, expected: Answer) -> bool:
    ended_by_string = any(
        isinstance(choice.stop_reason, str) for choice in expected.choices.values()
    )
    return not ended_by_string and (
        answer.completion_tokens != expected.completion_tokens
    )
