"""The methods a benchmark compares, and how their names are read.

off            stock vLLM without speculation
chain:K        stock vLLM, EAGLE-3 chain of K draft tokens
ours:auto      this package, shape chosen by it
ours:chain:K   this package, chain of K draft tokens
ours:tree:N    this package, trees of N nodes; ours:tree:N:TOP_K:DEPTH shapes them
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm_eagle3.config import AUTO_CHAIN, KEY, MAX_SPECULATIVE_TOKENS, read_options

MAX_CHAIN = 16
KNOWN_METHODS = (
    f"off, chain:K, ours:auto, ours:chain:K (K in 1..{MAX_CHAIN}), "
    f"ours:tree:N[:TOP_K:DEPTH] (N in 1..{MAX_SPECULATIVE_TOKENS})"
)


@dataclass(frozen=True)
class Method:
    """One way to decode; `is_ours` False means stock vLLM with this package off."""

    name: str
    is_ours: bool = False
    num_speculative_tokens: int = 0
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def speculates(self) -> bool:
        return self.num_speculative_tokens > 0


def parse_methods(text: str | Sequence[str]) -> tuple[Method, ...]:
    """Read a comma-separated list of methods.

    Raises:
        ValueError: an unknown or repeated method, or K out of range.
    """
    names = text.split(",") if isinstance(text, str) else text
    methods = tuple(parse_method(name.strip()) for name in names if name.strip())
    if not methods:
        raise ValueError(f"methods: got none, want some of {KNOWN_METHODS}")
    repeated = {m.name for m in methods if methods.count(m) > 1}
    if repeated:
        raise ValueError(f"methods: {', '.join(sorted(repeated))} is named twice")
    return methods


def parse_method(name: str) -> Method:
    """Read one method; see `parse_methods`."""
    match name.split(":"):
        case ["off"]:
            return Method(name)
        case ["chain", length]:
            return Method(name, num_speculative_tokens=_chain_length(name, length))
        case ["ours", "auto"]:
            return _ours(name, "auto", AUTO_CHAIN)
        case ["ours", "chain", length]:
            return _ours(name, "chain", _chain_length(name, length))
        case ["ours", "tree", *numbers] if _are_numbers(numbers, 1, 3):
            return _tree(name, [int(number) for number in numbers])
    raise ValueError(f"methods: got {name!r}, want some of {KNOWN_METHODS}")


def _ours(name: str, shape: str, num_tokens: int) -> Method:
    return Method(name, True, num_tokens, {"shape": shape})


def _are_numbers(texts: list[str], *counts: int) -> bool:
    return len(texts) in counts and all(t.isascii() and t.isdigit() for t in texts)


def _tree(name: str, numbers: list[int]) -> Method:
    options: dict[str, Any] = {"shape": "tree"}
    if len(numbers) == 3:
        options |= {"top_k": numbers[1], "depth": numbers[2]}
    try:
        read_options({KEY: options}).tree_shape(numbers[0])
    except ValueError as error:
        raise ValueError(f"methods: got {name!r}; {error}") from error
    return Method(name, True, numbers[0], options)


def _chain_length(name: str, text: str) -> int:
    if not (text.isascii() and text.isdigit() and 1 <= int(text) <= MAX_CHAIN):
        raise ValueError(
            f"methods: got {name!r}, want a chain length in 1..{MAX_CHAIN}, "
            "for example chain:3"
        )
    return int(text)
