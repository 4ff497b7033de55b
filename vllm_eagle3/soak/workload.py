"""The requests of a soak: a catalogue of every kind that a server meets.

A soak plays the whole catalogue again and again, each round in another order. So every
round is the same work, and what changes from the first to the last is the server.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from random import Random
from typing import Any

MIN_DISTINCT = 20  # requests of a catalogue that has every kind
NUM_PREFIXES = 4  # beginnings that many prompts share, for the prefix cache
PREFIX_TOKENS = 96
LAW_PLACES = 4  # tokens of a sample that is compared with the target's law
LAW_TOP_K = 3
LAW_SAMPLES = 8  # per request
LAW_PROMPTS = 2

SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["x", "y"]}, "ok": {"type": "boolean"}},
    "required": ["kind", "ok"],
    "additionalProperties": False,
}
PATTERN = r"(ab|cd){4}[0-9]{8}"


@dataclass(frozen=True)
class Request:
    """One request.

    Attributes:
        number: its place in the catalogue.
        fields: body of /v1/completions or, with `chat`, of /v1/chat/completions.
        drop_after: the client leaves after so many streamed pieces.
        law: which of the prompts whose law is known; its samples are judged together.
    """

    number: int
    kind: str
    fields: dict[str, Any]
    chat: bool = False
    stream: bool = False
    drop_after: int | None = None
    law: int | None = None


@dataclass(frozen=True)
class Source:
    """What requests are made of.

    Attributes:
        corpus: token ids of running text; prompts are pieces of it.
        context: the server's max_model_len.
        adapters: names of LoRA adapters that are served.
    """

    model: str
    corpus: Sequence[int]
    context: int
    adapters: tuple[str, ...] = ()

    def piece(self, start: int, length: int) -> list[int]:
        """So many tokens of the corpus, which has no end."""
        return list(islice(cycle(self.corpus), start, start + length))

    def prefix(self, number: int) -> list[int]:
        return self.piece(number * PREFIX_TOKENS, PREFIX_TOKENS)

    def law_prompt(self, number: int) -> list[int]:
        return self.piece(7 * number, 24)


@dataclass
class _Draw:
    """Random choices."""

    source: Source
    random: Random

    def prompt(self, shortest: int, longest: int) -> list[int]:
        start = self.random.randrange(len(self.source.corpus))
        return self.source.piece(start, self.random.randint(shortest, longest))

    def prefixed(self) -> list[int]:
        prefix = self.source.prefix(self.random.randrange(NUM_PREFIXES))
        return prefix + self.prompt(4, 40)

    def seed(self) -> int:
        return self.random.randrange(1 << 30)

    def temperature(self) -> float:
        return self.random.choice((0.5, 0.8, 1.0))


def _greedy(draw: _Draw) -> dict[str, Any]:
    return {"prompt": draw.prefixed(), "max_tokens": draw.random.randint(8, 32)}


def _short(draw: _Draw) -> dict[str, Any]:
    return {"prompt": draw.prompt(1, 12), "max_tokens": draw.random.randint(1, 4)}


def _long(draw: _Draw) -> dict[str, Any]:
    return {"prompt": draw.prompt(16, 64), "max_tokens": 96, "ignore_eos": True}


def _seeded(draw: _Draw) -> dict[str, Any]:
    choice = draw.random.choice
    return {
        "prompt": draw.prefixed(),
        "max_tokens": draw.random.randint(8, 32),
        "temperature": draw.temperature(),
        "top_k": choice((0, 5, 20)),
        "top_p": choice((1.0, 0.9, 0.6)),
        "min_p": choice((0.0, 0.05)),
        "seed": draw.seed(),
    }


def _several(draw: _Draw) -> dict[str, Any]:
    return _seeded(draw) | {"n": 3, "max_tokens": 12}


def _penalties(draw: _Draw) -> dict[str, Any]:
    choice = draw.random.choice
    return _greedy(draw) | {
        "presence_penalty": choice((0.0, 0.6, -0.4)),
        "frequency_penalty": choice((0.3, -0.2)),
        "repetition_penalty": choice((1.0, 1.2)),
        "logit_bias": {str(token): 1.5 for token in draw.prompt(3, 3)},
    }


def _stop_strings(draw: _Draw) -> dict[str, Any]:
    stops = draw.random.sample("etaoinsrhld,.", 2)
    return _greedy(draw) | {"stop": stops, "max_tokens": 48}


def _stop_ids(draw: _Draw) -> dict[str, Any]:
    return _greedy(draw) | {
        "stop_token_ids": draw.prompt(8, 8),
        "min_tokens": draw.random.randint(0, 8),
        "max_tokens": 48,
    }


def _pattern(draw: _Draw) -> dict[str, Any]:
    grammar = {"regex": PATTERN}
    return _greedy(draw) | {"structured_outputs": grammar, "max_tokens": 40}


def _json(draw: _Draw) -> dict[str, Any]:
    return _seeded(draw) | {"structured_outputs": {"json": SCHEMA}, "max_tokens": 48}


def _adapter(draw: _Draw) -> dict[str, Any]:
    return _greedy(draw) | {"model": draw.random.choice(draw.source.adapters)}


def _near_limit(draw: _Draw) -> dict[str, Any]:
    room = draw.random.randint(1, 24)
    length = draw.source.context - room
    return {"prompt": draw.prompt(length, length), "max_tokens": room}


def _too_long(draw: _Draw) -> dict[str, Any]:
    length = draw.source.context + draw.random.randint(1, 64)
    return {"prompt": draw.prompt(length, length), "max_tokens": 8}


def _logprobs(draw: _Draw) -> dict[str, Any]:
    return _greedy(draw) | {"logprobs": 3, "max_tokens": 12}


def _chat(draw: _Draw) -> dict[str, Any]:
    topic = draw.random.choice(("the sea", "old maps", "rain", "two sisters"))
    text = f"Tell me about {topic}, number {draw.random.randrange(100)}."
    return {"messages": [{"role": "user", "content": text}], "max_tokens": 24}


def _law(draw: _Draw) -> dict[str, Any]:
    return {
        "n": LAW_SAMPLES,
        "max_tokens": LAW_PLACES,
        "temperature": 1.0,
        "top_k": LAW_TOP_K,
        "ignore_eos": True,
    }


# kind -> (how many of a catalogue's 40, fields)
_KINDS: dict[str, tuple[int, Callable[[_Draw], dict[str, Any]]]] = {
    "greedy": (4, _greedy),
    "streamed": (4, _greedy),
    "dropped": (4, _long),
    "seeded": (4, _seeded),
    "long": (3, _long),
    "short": (2, _short),
    "several choices": (2, _several),
    "penalties": (2, _penalties),
    "stop strings": (2, _stop_strings),
    "stop ids": (1, _stop_ids),
    "pattern": (1, _pattern),
    "json": (1, _json),
    "adapter": (2, _adapter),
    "near the limit": (2, _near_limit),
    "too long": (1, _too_long),
    "log-probabilities": (1, _logprobs),
    "chat": (2, _chat),
    "law": (2, _law),
}
_STREAMED = {"streamed", "dropped", "chat"}


def catalogue(source: Source, size: int, seed: int = 0) -> list[Request]:
    """`size` different requests, of every kind; the same for the same arguments.

    Raises:
        ValueError: too small for one of every kind.
    """
    if size < MIN_DISTINCT:
        raise ValueError(f"size: got {size}, want at least {MIN_DISTINCT}")
    random, laws = Random(seed), cycle(range(LAW_PROMPTS))
    return [
        _request(
            number,
            kind,
            _Draw(source, random),
            law=next(laws) if kind == "law" else None,
        )
        for number, kind in enumerate(
            islice(cycle(_order(bool(source.adapters))), size)
        )
    ]


def _order(with_adapters: bool) -> list[str]:
    """Kinds in turn, one of each first, then those of which there are more."""
    most = max(share for share, _ in _KINDS.values())
    return [
        kind
        for turn in range(most)
        for kind, (share, _) in _KINDS.items()
        if share > turn and (with_adapters or kind != "adapter")
    ]


def _request(number: int, kind: str, draw: _Draw, law: int | None) -> Request:
    fields = _KINDS[kind][1](draw)
    if law is not None:
        fields["prompt"] = draw.source.law_prompt(law)
    return Request(
        number,
        kind,
        {"model": draw.source.model, "temperature": 0.0} | fields,
        chat=kind == "chat",
        stream=kind in _STREAMED,
        drop_after=draw.random.randint(1, 12) if kind == "dropped" else None,
        law=law,
    )
