"""The options users give as `--additional-config '{"vllm_eagle3": {...}}'`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from .drafter import TreeShape
from .validation import explain

KEY = "vllm_eagle3"
MAX_SPECULATIVE_TOKENS = 64
# Until the size follows the load, `auto` is a chain that rarely costs more than it
# brings.
AUTO_CHAIN = 3
# vLLM's own chain drafts one token a pass; past this length it costs more than it
# brings, so a fallback never drafts more.
MAX_FALLBACK_CHAIN = 5
DEFAULT_DEPTH = 6


class Eagle3Options(BaseModel):
    """Options of the package; unknown keys are refused.

    Attributes:
        shape: `auto` (a chain of at most 3 for now), `chain` (num_speculative_tokens
            long), `tree` (num_speculative_tokens nodes) or `off` (no drafts; the head
            still follows, ready to draft).
        top_k: children of a node, and nodes run per level, of a tree.
        depth: levels of a tree; by default 6, or the budget if that is smaller.
        check_ranks: compare what the ranks of a target draft and judge; for debugging.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    shape: Literal["auto", "chain", "tree", "off"] = "auto"
    top_k: int = Field(default=4, ge=1, le=32)
    depth: int | None = Field(default=None, ge=1, le=16)
    check_ranks: bool = False

    def tree_shape(self, num_speculative_tokens: int) -> TreeShape | None:
        """The shape to grow under that budget, or None when nothing is drafted.

        Raises:
            ValueError: budget out of range, or smaller than the depth asked for.
        """
        budget = num_speculative_tokens
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
        if self.shape == "auto":
            return TreeShape.chain(min(AUTO_CHAIN, budget))
        if self.shape == "chain":
            return TreeShape.chain(budget)
        depth = self.depth or min(DEFAULT_DEPTH, budget)
        return TreeShape(num_nodes=budget, top_k=self.top_k, depth=depth)


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
