"""Where the time of a step goes, for the benchmark; nothing is timed by default.

    verify   the target's pass over all rows, and the judgement
    commit   accepted branches move into place, in cache and features
    draft    the head's passes, with the growth of drafts
    rest     scheduling, and all else that a step does

Methods of one engine's objects are wrapped, not classes, so other engines of the
process and vLLM itself stay as they are. A part that runs inside another counts for
itself alone. Steps that take in new requests are left out: they are prefills.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from vllm import LLM
from vllm.platforms import current_platform

from ..engine import StepTimes

_PARTS = (
    ("execute_model", "verify"),
    ("_sample", "verify"),
    ("_commit", "commit"),
    ("_straighten", "commit"),
    ("propose_draft_token_ids", "draft"),
    ("take_draft_token_ids", "draft"),
)


class StepStopwatch:
    """Times every step of `llm` from now on.

    Raises:
        ValueError: an engine in another process, or on a device that runs behind.
    """

    def __init__(self, llm: LLM) -> None:
        core = getattr(llm.llm_engine.engine_core, "engine_core", None)
        if core is None or not current_platform.is_cpu():
            raise ValueError(
                "step_times: got an engine of another process or another device; only "
                "the steps of an in-process engine on a CPU can be timed from outside"
            )
        self.total = StepTimes()
        self._step: defaultdict[str, float] = defaultdict(float)
        self._is_prefill = False
        self._nested = [0.0]  # seconds in parts inside the current part, per level
        # Drafts may be made after a step, when they are taken.
        core.step_fn = self._beginning(self._timed(core.step_fn, "rest"))
        core.post_step = self._counted(self._timed(core.post_step, "rest"))
        runner = core.model_executor.driver_worker.worker.model_runner
        runner.execute_model = self._noticing_prefills(runner.execute_model)
        for name, part in _PARTS:
            if hasattr(runner, name):
                setattr(runner, name, self._timed(getattr(runner, name), part))

    def _timed(self, method: Callable[..., Any], part: str) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            self._nested.append(0.0)
            began = time.perf_counter()
            try:
                return method(*args, **kwargs)
            finally:
                seconds = time.perf_counter() - began
                self._step[part] += seconds - self._nested.pop()
                self._nested[-1] += seconds

        return timed

    def _noticing_prefills(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def noticing(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
            self._is_prefill = bool(scheduler_output.scheduled_new_reqs)
            return method(scheduler_output, *args, **kwargs)

        return noticing

    def _beginning(self, step: Callable[..., Any]) -> Callable[..., Any]:
        def beginning(*args: Any, **kwargs: Any) -> Any:
            self._step.clear()
            return step(*args, **kwargs)

        return beginning

    def _counted(self, post_step: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            result = post_step(*args, **kwargs)
            if not self._is_prefill and self._step["verify"]:
                self.total += StepTimes(steps=1, **self._step)
            return result

        return counted
