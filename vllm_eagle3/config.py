"""The options users give as `--additional-config '{"vllm_eagle3": {...}}'`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from .drafter import TreeShape
from .validation import explain

KEY = "vllm_eagle3"
MAX_SPECULATIVE_TOKENS = 64
# What `auto` chooses between: chains up to this length, and trees where the budget
# holds so many nodes (a smaller tree accepts no more than a chain).
AUTO_CHAIN = 5
AUTO_TREE_NODES = 8
# Nodes where nobody says how many.
AUTO_NODES = 16
# Its chain where an engine cannot have a budget.
AUTO_CHAIN_WITHOUT_BUDGET = 3
# vLLM's own chain drafts one token a pass; past this length it costs more than it
# brings, so a fallback never drafts more.
MAX_FALLBACK_CHAIN = 5
DEFAULT_DEPTH = 6
DEFAULT_TOP_K = 4
# Of fixed trees with so many nodes, which accept 7 to 10% more with it; a budget's tree
# stays narrow, where each level costs less.
WIDE_TOP_K, WIDE_NODES = 8, 16
# From this temperature on sampled drafts are accepted more often than ranked ones.
SAMPLED_FROM_TEMPERATURE = 0.6


class Eagle3Options(BaseModel):
    """Options of the package; unknown keys are refused.

    Attributes:
        shape: `auto` (what pays, step by step: a chain of at most 5, a tree of at most
            num_speculative_tokens nodes, or nothing), `chain` (num_speculative_tokens
            long), `tree` (num_speculative_tokens nodes) or `off` (no drafts; the head
            still follows, ready to draft).
        top_k: children of a node, and nodes run per level, of a tree; by default 4,
            and 8 for fixed trees of 16 nodes or more.
        depth: levels of a tree; by default 6, or the budget if that is smaller.
        check_ranks: compare what the ranks of a target draft and judge; for debugging.
        record: folder for records of steps and drafts, which the simulator reads. The
            engine then drafts by every kind of plan in turn; needs shape `auto`.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    shape: Literal["auto", "chain", "tree", "off"] = "auto"
    top_k: int | None = Field(default=None, ge=1, le=32)
    depth: int | None = Field(default=None, ge=1, le=16)
    check_ranks: bool = False
    record: str | None = None

    def tree_shape(self, num_speculative_tokens: int) -> TreeShape | None:
        """The (largest) shape to grow under that budget, or None for no drafts.

        Raises:
            ValueError: budget out of range, or smaller than the depth asked for.
        """
        budget = num_speculative_tokens
        if self.record is not None and self.shape != "auto":
            raise ValueError(
                f'record: got shape {self.shape!r}, want "auto", which records every '
                "kind of plan; leave one of them out"
            )
        if not 1 <= budget <= MAX_SPECULATIVE_TOKENS:
            raise ValueError(
                f"num_speculative_tokens: got {budget}, "
                f"want 1..{MAX_SPECULATIVE_TOKENS}"
            )
        if self.depth is not None and self.depth > budget:
            raise ValueError(
                f"depth: got {self.depth} with num_speculative_tokens {budget}; a tree "
                "of that depth has at least as many nodes; lower one or raise the other"
            )
        if self.shape == "off":
            return None
        if self.shape == "auto" and (self.top_k == 1 or budget < AUTO_TREE_NODES):
            return TreeShape.chain(min(AUTO_CHAIN, budget))
        if self.shape == "chain":
            return TreeShape.chain(budget)
        depth = self.depth or min(DEFAULT_DEPTH, budget)
        wide = self.shape == "tree" and budget >= WIDE_NODES
        top_k = self.top_k or (WIDE_TOP_K if wide else DEFAULT_TOP_K)
        return TreeShape(num_nodes=budget, top_k=top_k, depth=depth)


def read_options(additional_config: Mapping[str, Any] | None) -> Eagle3Options:
    """Validate the package's part of `additional_config`.

    Raises:
        ValueError: naming each bad key or value and what is known.
    """
    given = (additional_config or {}).get(KEY, {})
    if isinstance(given, Eagle3Options):
        return given
    if not isinstance(given, Mapping):
        raise ValueError(
            f'additional_config["{KEY}"]: got {given!r}, want an object such as '
            '{"shape": "chain"}'
        )
    try:
        return Eagle3Options.model_validate(dict(given))
    except ValidationError as error:
        raise ValueError(
            f'additional_config["{KEY}"]: {explain(error, Eagle3Options)}'
        ) from error


class RequestOptions(BaseModel):
    """Options of one request, as `extra_args={"vllm_eagle3": {...}}`.

    Through the OpenAI interface, whose `vllm_xargs` hold no objects, as a JSON string.

    Attributes:
        off: nothing is drafted for this request.
        max_nodes: most nodes that are verified for it in a step.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    off: bool = False
    max_nodes: int | None = Field(default=None, ge=0)

    @property
    def node_limit(self) -> int | None:
        """Most nodes in a step; None where the request sets no limit."""
        return 0 if self.off else self.max_nodes


def read_request_options(extra_args: Mapping[str, Any] | None) -> RequestOptions:
    """Validate the package's part of a request's `extra_args`.

    Raises:
        ValueError: naming each bad key or value and what is known.
    """
    given = (extra_args or {}).get(KEY, {})
    if isinstance(given, str):
        with suppress(json.JSONDecodeError):
            given = json.loads(given)
    if not isinstance(given, Mapping):
        raise ValueError(
            f'extra_args["{KEY}"]: got {given!r}, want an object such as '
            '{"off": true} or {"max_nodes": 3}'
        )
    try:
        return RequestOptions.model_validate(dict(given))
    except ValidationError as error:
        raise ValueError(
            f'extra_args["{KEY}"]: {explain(error, RequestOptions)}'
        ) from error
