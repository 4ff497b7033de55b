"""Ranked or sampled drafts: vLLM's `draft_sample_method`, and what it is by default.

vLLM's field is "greedy" when nobody said anything. Here that would lose speed above
temperature 0, so what the user said is remembered beside it.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
from vllm.engine.arg_utils import EngineArgs

from ..config import SAMPLED_FROM_TEMPERATURE

_FIELD = "draft_sample_method"
# Attribute of a SpeculativeConfig, which travels with it to the workers.
_GIVEN = "vllm_eagle3_draft_sample_method"


def install() -> None:
    """Remember whether users chose a method; call once per process."""
    create = EngineArgs.create_speculative_config

    @functools.wraps(create)
    def create_speculative_config(self: EngineArgs, *args: Any, **kwargs: Any) -> Any:
        spec = create(self, *args, **kwargs)
        if spec is not None and self.speculative_config is not None:
            setattr(spec, _GIVEN, self.speculative_config.get(_FIELD))
        return spec

    EngineArgs.create_speculative_config = create_speculative_config


def method_given(spec: Any) -> str | None:
    """The `draft_sample_method` that the user chose for this SpeculativeConfig."""
    return getattr(spec, _GIVEN, None)


def random_stream(
    seed: int, purpose: str, device: torch.device, replica: int = 0
) -> torch.Generator:
    """A generator of its own for drafting or for verification.

    It is the same on every rank, and never the target's. Data-parallel replicas have
    one each, or requests that meet in the same step would share their luck.
    """
    entropy = [seed, replica, *purpose.encode()]
    state = np.random.SeedSequence(entropy).generate_state(1, np.uint64)
    return torch.Generator(device).manual_seed(int(state[0] >> 1))


class DraftSampling:
    """Which requests take sampled drafts.

    Those with a seed do not, so that their text is that of the run without speculation.
    Nor do those whose drafts a grammar may cut short, for a cut must not look at what
    was drawn; nor those that ask for log-probabilities.

    Args:
        method: vLLM's `draft_sample_method`; None means what accepts more.
    """

    def __init__(self, method: str | None) -> None:
        lowest = {"greedy": float("inf"), "probabilistic": 0.0}
        self.lowest_temperature = lowest.get(method or "", SAMPLED_FROM_TEMPERATURE)

    def suits(self, params: Any) -> bool:
        """Whether a request with these SamplingParams takes sampled drafts."""
        return (
            params is not None
            and params.temperature > 0
            and params.temperature >= self.lowest_temperature
            and params.seed is None
            and params.structured_outputs is None
            and params.logprobs is None
            and params.logprob_token_ids is None
        )
