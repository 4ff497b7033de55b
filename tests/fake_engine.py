"""An engine without a model, for tests of what drives engines.

The reply to a prompt is a function of its last token. What else it does is said in
the head's path: `crash` ends the process, `refuse` raises; `wrong` and `near` change
the fourth token of prompts of odd length, `near` to one that `off` holds nearly as
likely as its own; `short` ends replies early.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from vllm_eagle3.acceptance import DraftCounts
from vllm_eagle3.engine import EngineSpec, Generation, Sampling, StepTimes

NAME = "tests.fake_engine:FakeEngine"
ODD_PLACE = 3


class FakeEngine:
    def __init__(self, spec: EngineSpec) -> None:
        print("this goes to the log, not to the parent")
        self.behaviour = Path(spec.head or "").name
        self.num_drafts = spec.num_speculative_tokens or 0
        self.counts = DraftCounts()
        self.times_steps = spec.mode.step_times
        if self.behaviour == "refuse":
            raise ValueError("head: made for another target")

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        samplings: Sequence[Sampling],
        at_once: int | None = None,
    ) -> list[Generation]:
        if self.behaviour == "crash":
            print("about to crash", file=sys.stderr, flush=True)
            os._exit(7)
        return [self._generate(*each) for each in zip(prompts, samplings, strict=True)]

    def _generate(self, ids: Sequence[int], sampling: Sampling) -> Generation:
        tokens = [ids[-1] + 1 + i for i in range(sampling.max_tokens)]
        if self.behaviour in ("wrong", "near") and len(ids) % 2:
            tokens[ODD_PLACE] = 1000 if self.behaviour == "near" else 2000
        if self.behaviour == "short":
            tokens = tokens[:-1]
        if self.num_drafts:
            # Of two drafts one is accepted whole and one not at all.
            accepted = (1,) * self.num_drafts
            self.counts += DraftCounts(
                2, 2 * self.num_drafts, self.num_drafts, accepted
            )
        top_logprobs = None
        if sampling.top_logprobs:
            top_logprobs = tuple({token: -0.7, 1000: -0.75} for token in tokens)
        return Generation(tuple(tokens), top_logprobs)

    def metrics(self) -> DraftCounts:
        return self.counts

    def step_times(self) -> StepTimes:
        steps = self.counts.drafts if self.times_steps else 0
        return StepTimes(steps, 0.002 * steps, 0.02 * steps, 0.0, 0.001 * steps)

    def close(self) -> None:
        print("closed")
