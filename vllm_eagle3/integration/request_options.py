"""Options of one request: `SamplingParams.extra_args["vllm_eagle3"]`."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError

from ..config import KEY, read_request_options

# Field of a SpeculativeConfig: the engine's scheduler follows these options.
_FIELD = "takes_request_options"


def mark(speculative_config: Any, takes_options: bool) -> None:
    """Say of an engine whether its requests may have options; the mark is pickled."""
    setattr(speculative_config, _FIELD, takes_options)


def install() -> None:
    """Check the options of every request where it comes in; call once per process."""
    stock = SamplingParams.verify

    @functools.wraps(stock)
    def verify(
        self: SamplingParams,
        model_config: Any,
        speculative_config: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        stock(self, model_config, speculative_config, *args, **kwargs)
        if KEY in (self.extra_args or {}):
            _check(self.extra_args, getattr(speculative_config, _FIELD, False))

    SamplingParams.verify = verify


def _check(extra_args: Mapping[str, Any] | None, takes_options: bool) -> None:
    """Refuse options as vLLM refuses parameters: servers answer 400, not 500."""
    try:
        read_request_options(extra_args)
    except ValueError as error:
        raise VLLMValidationError(str(error), parameter="extra_args") from error
    if not takes_options:
        raise VLLMValidationError(
            f'extra_args["{KEY}"]: this engine does not draft by request; '
            'start it with shape "auto" or "tree", or leave the option out',
            parameter="extra_args",
        )


def node_limit(sampling_params: Any, most: int) -> int:
    """Most nodes that a request may have verified in a step."""
    if sampling_params is None:
        return most
    limit = read_request_options(sampling_params.extra_args).node_limit
    return most if limit is None else min(limit, most)
