"""Replies as users see them: token ids, text, why they ended, and probabilities."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple


class Reply(NamedTuple):
    """A reply as users see it: of every choice, and of the first one's probabilities.

    `choices` holds token ids, text, why it ended, and how many logprobs there are.
    """

    choices: list[tuple[list[int], str, Any, Any, int]]
    logprobs: list[dict[int, float]]
    prompt_logprobs: list[dict[int, float]]

    @property
    def token_ids(self) -> list[list[int]]:
        return [choice[0] for choice in self.choices]


def replies(llm: Any, prompts: Sequence[Sequence[int]], params: Any) -> list[Reply]:
    """One batch through vllm.LLM."""
    outputs = llm.generate(
        [{"prompt_token_ids": list(prompt)} for prompt in prompts],
        params,
        use_tqdm=False,
    )
    return [
        Reply(
            [
                (
                    list(choice.token_ids),
                    choice.text,
                    choice.finish_reason,
                    choice.stop_reason,
                    len(choice.logprobs or []),
                )
                for choice in output.outputs
            ],
            _values(output.outputs[0].logprobs),
            _values(output.prompt_logprobs),
        )
        for output in outputs
    ]


def _values(steps: Any) -> list[dict[int, float]]:
    return [
        {token: entry.logprob for token, entry in step.items()}
        for step in steps or []
        if step is not None
    ]


def text_of(token_ids: Sequence[int]) -> str:
    """The fixture tokenizer has one token a byte, printable ones from id 3."""
    assert all(3 <= token < 97 for token in token_ids)
    return "".join(chr(token + 30) for token in token_ids)
