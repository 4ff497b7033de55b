"""The small test engines: their settings, one at a time, and a batch through one."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock


@dataclass(frozen=True)
class Run:
    """Replies of one batch with what speculation did meanwhile.

    Attributes:
        token_ids: per prompt.
        gaps: per prompt and token the log-probability gap between the two most likely
            tokens; empty unless the run asked for logprobs=2.
        drafted, accepted: draft tokens; both 0 without speculation.
    """

    token_ids: list[list[int]]
    gaps: list[list[float]]
    drafted: int
    accepted: int


def llm_settings(
    target: str,
    head: str | None = None,
    *,
    num_speculative_tokens: int = 3,
    draft_sample_method: str | None = "greedy",
    speculation: Mapping[str, Any] | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """Arguments of vllm.LLM for folders of a fixture target and head.

    Args:
        draft_sample_method: None leaves the choice to the package.
        speculation: more keys of `speculative_config`.
    """
    arguments: dict[str, Any] = {
        "model": target,
        "dtype": "float32",
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "max_model_len": 512,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 2048,
        "block_size": 32,
        "enable_prefix_caching": False,
        "disable_log_stats": False,
        "seed": 0,
        **settings,
    }
    if head is not None:
        # As long a chain as asked for, where a test does not say otherwise.
        arguments.setdefault("additional_config", {"vllm_eagle3": {"shape": "chain"}})
        arguments["speculative_config"] = {
            "method": "eagle3",
            "model": head,
            "num_speculative_tokens": num_speculative_tokens,
            **(speculation or {}),
        }
        if draft_sample_method is not None:
            arguments["speculative_config"]["draft_sample_method"] = draft_sample_method
    return arguments


def run(llm: Any, prompts: Sequence[Sequence[int]], params: Any) -> Run:
    before = _spec_counters(llm)
    outputs = llm.generate(
        [{"prompt_token_ids": list(prompt)} for prompt in prompts],
        params,
        use_tqdm=False,
    )
    drafted, accepted = (
        b - a for a, b in zip(before, _spec_counters(llm), strict=True)
    )
    replies = [output.outputs[0] for output in outputs]
    return Run(
        token_ids=[list(reply.token_ids) for reply in replies],
        gaps=[[_gap(step) for step in reply.logprobs or []] for reply in replies],
        drafted=drafted,
        accepted=accepted,
    )


def _gap(step: dict[int, Any]) -> float:
    top = sorted((entry.logprob for entry in step.values()), reverse=True)
    return top[0] - top[1]


def _spec_counters(llm: Any) -> tuple[int, int]:
    values = {metric.name: getattr(metric, "value", 0) for metric in llm.get_metrics()}
    prefix = "vllm:spec_decode_num_"
    return (
        int(values.get(prefix + "draft_tokens", 0)),
        int(values.get(prefix + "accepted_tokens", 0)),
    )


class EngineHandle:
    """One engine of the pool: `run(prompts, params)`, and vLLM's own object as `llm`.

    `params` is one SamplingParams for all prompts or one for each.
    """

    def __init__(self, llm: Any) -> None:
        self.llm = llm

    def run(self, prompts: Sequence[Sequence[int]], params: Any) -> Run:
        return run(self.llm, prompts, params)


class EnginePool:
    """At most one in-process engine, kept as long as the settings stay the same."""

    def __init__(self, models: Callable[[str], Path]) -> None:
        self._models = models
        self._key = ""
        self._handle: EngineHandle | None = None

    def __call__(
        self, target: str | Path, head: str | Path | None = None, **settings: Any
    ) -> EngineHandle:
        """Engine for a target and a head.

        Args:
            target, head: fixture names, or folders as Path; no head means no
                speculation.
            settings: those of `llm_settings`.
        """
        key = repr((target, head, sorted(settings.items())))
        if self._handle is None or key != self._key:
            self.close()
            paths = (self._folder(name) if name else None for name in (target, head))
            from vllm import LLM

            gc.freeze()  # what is there stays, so the collections of a start are short
            self._handle = EngineHandle(LLM(**llm_settings(*paths, **settings)))
            self._key = key
        return self._handle

    def _folder(self, name: str | Path) -> str:
        return str(name if isinstance(name, Path) else self._models(name))

    def close(self) -> None:
        if self._handle is None:
            return
        from vllm.distributed import cleanup_dist_env_and_memory

        with _no_collection():
            self._handle.llm.llm_engine.engine_core.shutdown()
            self._handle = None
            cleanup_dist_env_and_memory()
        gc.unfreeze()
        gc.collect()


@contextmanager
def _no_collection() -> Iterator[None]:
    """vLLM collects garbage four times while an engine ends; once, afterwards, will do.

    With all of vLLM imported each takes as long as starting a tiny engine.
    """
    with mock.patch.object(gc, "collect", lambda *_: 0):
        yield
