"""Let the target write: prompts of its own, and replies to given prompts.

A head must predict this target, so it learns from this target's own tokens, taken as
the engine made them (prompt ids and generated ids; nothing is tokenized twice).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..engine import Engine, Sampling

# A batch larger than the engine's own keeps it full while stragglers finish.
BATCH = 256
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
    engine: Engine,
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
    with out.open("w", encoding="utf-8") as lines:
        for begin in range(0, count, BATCH):
            number = min(BATCH, count - begin)
            # No seed: with one, every request of the batch would write the same.
            sampling = Sampling(0.9, max_tokens, top_p=0.95)
            for reply in engine.generate([opening] * number, sampling):
                if len(reply.token_ids) == max_tokens:
                    continue  # cut off in the middle of a sentence
                text = tokenizer.decode(reply.token_ids, skip_special_tokens=True)
                text = text.strip()
                if len(text) >= 8 and text not in seen:
                    seen.add(text)
                    message = {"role": "user", "content": text}
                    lines.write(json.dumps({"messages": [message]}) + "\n")
            progress(begin + number, count)
    return len(seen)


def write_replies(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    kind: str,
    out: Path,
    progress: Progress,
) -> int:
    """Answer every prompt and append one row each to `out`; return the reply tokens.

    Rows are in the order of the prompts, so a run that was stopped goes on where it
    left off: whole rows are kept, a torn last line is dropped.

    Raises:
        ValueError: `out` holds rows of other prompts.
    """
    done = _keep_whole_rows(out, prompts)
    written = 0
    with out.open("a", encoding="utf-8") as lines:
        for begin in range(done, len(prompts), BATCH):
            batch = prompts[begin : begin + BATCH]
            for ids, reply in zip(batch, engine.generate(batch, sampling), strict=True):
                span = [len(ids), len(ids) + len(reply.token_ids), sampling.temperature]
                row = {
                    "kind": kind,
                    "ids": [*ids, *reply.token_ids],
                    "spans": [span] if reply.token_ids else [],
                }
                lines.write(json.dumps(row) + "\n")
                written += len(reply.token_ids)
            lines.flush()
            progress(begin + len(batch), len(prompts))
    return written


def _keep_whole_rows(out: Path, prompts: Sequence[Sequence[int]]) -> int:
    """Drop a torn last line of `out`; return how many prompts it has answered."""
    if not out.is_file():
        return 0
    text = out.read_text(encoding="utf-8")
    whole = text[: text.rfind("\n") + 1]
    lines = whole.splitlines()
    for number, line in enumerate(lines):
        ids = json.loads(line)["ids"]
        if number >= len(prompts) or ids[: len(prompts[number])] != list(
            prompts[number]
        ):
            raise ValueError(
                f"{out}:{number + 1}: a row of other prompts; choose another file, "
                "or delete it to start over"
            )
    if len(whole) < len(text):
        out.write_text(whole, encoding="utf-8")
    return len(lines)
