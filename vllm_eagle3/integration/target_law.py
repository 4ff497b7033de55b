"""The law a request's next token has, caught where vLLM's sampler draws from it.

There every logits processor, the temperature and min-p have been applied, each to the
row of its own request. What is left, top-k and top-p, is applied here, once, and the
sampler goes on with the result; requests that are not asked about draw as ever.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p
from vllm.v1.sample.sampler import Sampler


class TargetLaw:
    """The last law of some rows: `with law.of(rows): sampler(...)`, then `law.p`.

    Attributes:
        p: [num_rows, vocab], probabilities.
    """

    p: torch.Tensor

    def __init__(self, sampler: Sampler) -> None:
        self._rows: torch.Tensor | None = None
        sampler.topk_topp_sampler.register_forward_pre_hook(self._catch)

    @contextmanager
    def of(self, rows: torch.Tensor | None) -> Iterator[None]:
        """Catch the law of these rows of the sampler's batch meanwhile, if any."""
        self._rows = rows
        try:
            yield
        finally:
            self._rows = None

    def _catch(
        self, _module: Any, arguments: tuple[Any, ...]
    ) -> tuple[Any, ...] | None:
        if self._rows is None:
            return None
        logits, generators, top_k, top_p = arguments
        logits = apply_top_k_top_p(logits, top_k, top_p)
        self.p = logits[self._rows].softmax(-1)
        return logits, generators, None, None
