"""Sampling parameters that vLLM refuses beside speculation and our verifier gets right.

vLLM's rejection sampler judges all drafts of a request at once, on rows that are no
longer one a request, so min-p, logit bias and processors of the user's would be skipped
there, and vLLM refuses them. Our verifier draws the target's own tokens one after
another, with every processor (see `sampler`), so engines that it serves lift this.
Importing this module imports nothing of vLLM.
"""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

# Field of a SpeculativeConfig: drafts are judged by samples of the target.
_FIELD = "verifies_by_sampling"


def mark(spec: Any) -> None:
    """Say of an engine's SpeculativeConfig that its drafts are judged by our verifier.

    The mark is pickled with the configuration, to the processes that read it.
    """
    setattr(spec, _FIELD, True)


def always() -> bool:
    """Both platforms refuse."""
    return True


def refused() -> bool:
    """True while vLLM refuses min-p however drafts are judged."""
    from vllm import SamplingParams
    from vllm.exceptions import VLLMValidationError

    try:
        SamplingParams(min_p=0.5)._validate_spec_decode(
            SimpleNamespace(**{_FIELD: True})
        )
    except (ValueError, VLLMValidationError):  # the latter is none of the former
        return True
    return False


def lift() -> None:
    """Let requests have these parameters, and let the processors be loaded."""
    from vllm import SamplingParams
    from vllm.v1.sample import logits_processor

    SamplingParams._validate_spec_decode = _validating(
        SamplingParams._validate_spec_decode
    )
    lifted = _building(logits_processor.build_logitsprocs)
    logits_processor.build_logitsprocs = lifted
    # The runner's module has a name of its own for it, if it was imported before.
    runner: Any = sys.modules.get("vllm.v1.worker.gpu_model_runner")
    if runner is not None:
        runner.build_logitsprocs = lifted


def _validating(stock: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(stock)
    def validate_spec_decode(self: Any, speculative_config: Any) -> None:
        if not getattr(speculative_config, _FIELD, False):
            stock(self, speculative_config)

    return validate_spec_decode


def _building(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def build_logitsprocs(vllm_config: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(vllm_config.speculative_config, _FIELD, False):
            vllm_config = copy.copy(vllm_config)
            vllm_config.speculative_config = None
        return stock(vllm_config, *args, **kwargs)

    return build_logitsprocs
