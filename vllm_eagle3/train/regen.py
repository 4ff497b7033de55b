"""Let the target write: prompts of its own, and replies to given prompts.

A head must predict this target, so it learns from this target's own tokens, taken as
the engine made them (prompt ids and generated ids; nothing is tokenized twice).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from typing import Any

from ..engine import Generation, Sampling, Streams

# Rows are flushed this often; what a kill can cost.
_FLUSH_EVERY = 32
_PLACEHOLDER = "\ufffc"

Progress = Callable[[int, int], None]  # (done, total)


def opening_of_a_user_turn(tokenizer: Any) -> list[int]:
    """Ids of the chat template up to where a user's words would begin.

    Raises:
        ValueError: no chat template, or one that rewrites what the user says.
    """
    if not tokenizer.chat_template:
        raise ValueError("target: its tokenizer has no chat template")
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": _PLACEHOLDER}], tokenize=False
    )
    before, found, _ = text.partition(_PLACEHOLDER)
    if not found:
        raise ValueError("target: its chat template does not keep the user's words")
    return list(tokenizer(before, add_special_tokens=False)["input_ids"])


def write_prompts(
    engine: Streams,
    tokenizer: Any,
    count: int,
    out: Path,
    progress: Progress,
    max_tokens: int = 160,
) -> int:
    """Sample `count` user turns; write those that end and are new. Return how many.

    Given its own template up to the user's turn, a chat model writes what users ask
    it, in its own distribution.
    """
    opening = opening_of_a_user_turn(tokenizer)
    seen: set[str] = set()
    # No seed: with one, every request would write the same.
    request = (opening, Sampling(0.9, max_tokens, top_p=0.95))
    with out.open("w", encoding="utf-8") as lines:
        replies = engine.stream(repeat(request, count))
        for done, (_, reply) in enumerate(replies, 1):
            progress(done, count)
            if len(reply.token_ids) == max_tokens:
                continue  # cut off in the middle of a sentence
            text = tokenizer.decode(reply.token_ids, skip_special_tokens=True).strip()
            if len(text) >= 8 and text not in seen:
                seen.add(text)
                message = {"role": "user", "content": text}
                lines.write(json.dumps({"messages": [message]}) + "\n")
    return len(seen)


@dataclass(frozen=True)
class Ask:
    """A prompt to be answered: its ids, how to sample, and the label of its row."""

    ids: tuple[int, ...]
    sampling: Sampling
    kind: str = "chat"


def write_replies(
    engine: Streams, asks: Sequence[Ask], out: Path, progress: Progress
) -> int:
    """Answer every prompt and append one row each to `out`; return the reply tokens.

    Rows come in the order in which replies end. A run that was stopped goes on where
    it left off: prompts that have a row are not asked again, a torn last line is
    dropped.

    Raises:
        ValueError: `out` holds rows of other prompts.
    """
    left = _unanswered(out, asks)
    written, before = 0, len(asks) - len(left)
    with out.open("a", encoding="utf-8") as lines:
        replies = engine.stream((ask.ids, ask.sampling) for ask in left)
        for done, (number, reply) in enumerate(replies, 1):
            lines.write(json.dumps(reply_row(left[number], reply)) + "\n")
            written += len(reply.token_ids)
            if done % _FLUSH_EVERY == 0:
                lines.flush()
            progress(before + done, len(asks))
    return written


def reply_row(ask: Ask, reply: Generation) -> dict[str, Any]:
    """One training row: all ids, and which of them the target wrote, and how hot."""
    start, end = len(ask.ids), len(ask.ids) + len(reply.token_ids)
    return {
        "kind": ask.kind,
        "ids": [*ask.ids, *reply.token_ids],
        "spans": [[start, end, ask.sampling.temperature]] if end > start else [],
    }


def _unanswered(out: Path, asks: Sequence[Ask]) -> list[Ask]:
    """Drop a torn last line of `out`; return the asks that have no row in it."""
    if not out.is_file():
        return list(asks)
    text = out.read_text(encoding="utf-8")
    whole = text[: text.rfind("\n") + 1]
    # A prompt may be asked more than once, so its rows are counted.
    answered = Counter(_prompt_of(json.loads(line)) for line in whole.splitlines())
    left = []
    for ask in asks:
        if answered[ask.ids]:
            answered[ask.ids] -= 1
        else:
            left.append(ask)
    if others := answered.total():
        raise ValueError(
            f"{out}: {others} rows are of other prompts; choose another file, "
            "or delete it to start over"
        )
    if len(whole) < len(text):
        out.write_text(whole, encoding="utf-8")
    return left


def _prompt_of(row: dict[str, Any]) -> tuple[int, ...]:
    spans = row["spans"]
    return tuple(row["ids"][: spans[0][0]] if spans else row["ids"])
