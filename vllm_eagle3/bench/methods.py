"""The methods a benchmark compares, and how their names are read.

off                stock vLLM without speculation
chain:K            stock vLLM, EAGLE-3 chain of K draft tokens from the head
METHOD:MODEL[:K]   stock vLLM, another of its methods with that method's own model:
                   draft_model, eagle, eagle3, dflash, dspark, medusa, mlp_speculator
METHOD[:K]         one that needs no model: ngram, ngram_gpu, suffix, mtp
ours:auto[:N]      this package, shape chosen by it, N nodes at most
ours:chain:K       this package, chain of K draft tokens
ours:tree:N        this package, trees of N nodes; ours:tree:N:TOP_K:DEPTH shapes them
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm_eagle3.config import AUTO_NODES, KEY, MAX_SPECULATIVE_TOKENS, read_options

MAX_CHAIN = 16
# vLLM's names. Where K is not given, the second group takes it from the model.
NEED_NO_MODEL = ("ngram", "ngram_gpu", "suffix", "mtp")
NEED_A_MODEL = (
    *("draft_model", "eagle", "eagle3", "dflash", "dspark"),
    *("medusa", "mlp_speculator"),
)
_KNOW_THEIR_LENGTH = ("suffix", "mtp", "dflash", "dspark", "medusa", "mlp_speculator")
_USUAL_LENGTH = 3
# Stock vLLM that every run is held against: no speculation, the chain that pays at
# larger batches and the one that is usual.
CONTROLS = ("off", "chain:1", "chain:3")
KNOWN_METHODS = (
    f"off, chain:K, ours:auto[:N], ours:chain:K (K in 1..{MAX_CHAIN}), "
    f"ours:tree:N[:TOP_K:DEPTH] (N in 1..{MAX_SPECULATIVE_TOKENS}), "
    f"{'[:K], '.join(NEED_NO_MODEL)}[:K], METHOD:MODEL[:K] with METHOD one of "
    f"{', '.join(NEED_A_MODEL)}"
)


@dataclass(frozen=True)
class Method:
    """One way to decode; `is_ours` False means stock vLLM with this package off.

    Attributes:
        num_speculative_tokens: most drafts a step; None leaves it to the method.
        stock: vLLM's name of the method.
        model: the method's own model; None means the head, if the method has one.
        options: of this package.
    """

    name: str
    is_ours: bool = False
    num_speculative_tokens: int | None = 0
    stock: str = "eagle3"
    model: str | None = None
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def speculates(self) -> bool:
        return self.num_speculative_tokens != 0

    @property
    def uses_head(self) -> bool:
        """Whether it drafts with the head that all such methods share."""
        return self.speculates and self.stock == "eagle3" and self.model is None


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


def with_controls(methods: tuple[Method, ...], has_head: bool) -> tuple[Method, ...]:
    """`methods` after the controls they lack; chains only if none is named already."""
    names = [method.name for method in methods]
    lacking = [] if "off" in names else ["off"]
    if has_head and not any(name.startswith("chain:") for name in names):
        lacking += [name for name in CONTROLS if name != "off"]
    return (*map(parse_method, lacking), *methods)


def parse_method(name: str) -> Method:
    """Read one method; see `parse_methods`."""
    match name.split(":"):
        case ["off"]:
            return Method(name)
        case ["chain", length]:
            return Method(name, num_speculative_tokens=_chain_length(name, length))
        case ["ours", "auto", *numbers] if _are_numbers(numbers, 0, 1):
            return _auto(name, numbers)
        case ["ours", "chain", length]:
            return _ours(name, "chain", _chain_length(name, length))
        case ["ours", "tree", *numbers] if _are_numbers(numbers, 1, 3):
            return _tree(name, [int(number) for number in numbers])
        case [stock, *rest] if stock in NEED_NO_MODEL and len(rest) <= 1:
            return _stock(name, stock, None, rest)
        case [stock, model, *rest] if stock in NEED_A_MODEL and model:
            return _stock(name, stock, *_model_and_length([model, *rest]))
        case [stock, *_] if stock in NEED_A_MODEL:
            raise ValueError(
                f"methods: got {name!r}, want its model too, as in {stock}:FOLDER:3"
            )
    raise ValueError(f"methods: got {name!r}, want some of {KNOWN_METHODS}")


def _stock(name: str, stock: str, model: str | None, length: list[str]) -> Method:
    num_tokens: int | None = None if stock in _KNOW_THEIR_LENGTH else _USUAL_LENGTH
    if length:
        num_tokens = _chain_length(name, length[0])
    return Method(name, False, num_tokens, stock, model)


def _model_and_length(parts: list[str]) -> tuple[str, list[str]]:
    """A path may hold colons itself; a number behind the last one is K."""
    if len(parts) > 1 and parts[-1].isascii() and parts[-1].isdigit():
        return ":".join(parts[:-1]), parts[-1:]
    return ":".join(parts), []


def _ours(name: str, shape: str, num_tokens: int) -> Method:
    return Method(name, True, num_tokens, options={"shape": shape})


def _auto(name: str, numbers: list[str]) -> Method:
    most = int(numbers[0]) if numbers else AUTO_NODES
    if not 1 <= most <= MAX_SPECULATIVE_TOKENS:
        raise ValueError(
            f"methods: got {name!r}, want 1..{MAX_SPECULATIVE_TOKENS} nodes at most"
        )
    return _ours(name, "auto", most)


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
    return Method(name, True, numbers[0], options=options)


def _chain_length(name: str, text: str) -> int:
    if not (text.isascii() and text.isdigit() and 1 <= int(text) <= MAX_CHAIN):
        raise ValueError(
            f"methods: got {name!r}, want a chain length in 1..{MAX_CHAIN}, "
            "for example chain:3"
        )
    return int(text)
