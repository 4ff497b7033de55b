"""VllmEngine: the `Engine` protocol over `vllm.LLM`.

Process-wide settings (threads, preloaded libraries, in-process or not) must be in the
environment before Python starts; `vllm_eagle3.bench.launch` writes them.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from itertools import count, islice
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from vllm import LLM, SamplingParams
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.v1.metrics.reader import Counter, Metric, Vector

from vllm_eagle3.acceptance import DraftCounts
from vllm_eagle3.engine import EngineSpec, Generation, Sampling, StepTimes, one_each
from vllm_eagle3.integration.step_times import StepStopwatch

# On a CPU vLLM would take 92% of all memory, and refuse where others use some of it.
_CPU_KV_CACHE_GIB = 4


class VllmEngine:
    """A vLLM engine started from an `EngineSpec`.

    On a CPU its KV cache is `VLLM_CPU_KVCACHE_SPACE` GiB, or a few if that is not set.
    """

    def __init__(self, spec: EngineSpec) -> None:
        self.spec = spec
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", str(_CPU_KV_CACHE_GIB))
        self.llm = LLM(**_llm_arguments(spec))
        self._stopwatch = StepStopwatch(self.llm) if spec.mode.step_times else None

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling | Sequence[Sampling],
        at_once: int | None = None,
    ) -> list[Generation]:
        samplings = one_each(sampling, len(prompts))
        if at_once is not None and at_once < len(prompts):
            requests = zip(prompts, samplings, strict=True)
            ended = dict(self._stream(requests, at_once))
            return [ended[number] for number in range(len(prompts))]
        outputs = self.llm.generate(
            [{"prompt_token_ids": list(ids)} for ids in prompts],
            [_sampling_params(each) for each in samplings],
            use_tqdm=False,
        )
        return [_generation(output.outputs[0]) for output in outputs]

    def stream(
        self, requests: Iterable[tuple[Sequence[int], Sampling]]
    ) -> Iterator[tuple[int, Generation]]:
        return self._stream(requests, self.spec.max_num_seqs)

    def _stream(
        self, requests: Iterable[tuple[Sequence[int], Sampling]], at_once: int
    ) -> Iterator[tuple[int, Generation]]:
        waiting, numbers = iter(requests), count()
        running: dict[str, int] = {}
        while True:
            for ids, sampling in islice(waiting, at_once - len(running)):
                prompt: Any = {"prompt_token_ids": list(ids)}
                (name,) = self.llm.enqueue(
                    [prompt], _sampling_params(sampling), use_tqdm=False
                )
                # The queue's name is the output's and a suffix of vLLM's own.
                running[name.split("-")[0]] = next(numbers)
            if not running:
                return
            for output in self.llm.llm_engine.step():
                if output.finished:
                    yield running.pop(output.request_id), _generation(output.outputs[0])

    def score(self, prompts: Sequence[Sequence[int]]) -> list[list[float]]:
        outputs = self.llm.generate(
            [{"prompt_token_ids": list(ids)} for ids in prompts],
            # One new token is the least that vLLM makes.
            SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False),
            use_tqdm=False,
        )
        return [_prompt_scores(output) for output in outputs]

    def capture(self, prompts: Sequence[Sequence[int]], path: Path) -> None:
        outputs = self._record(prompts, path, with_head=False)
        stored = load_file(path)
        numbered = {
            f"{number}.{name}": stored[f"{output.request_id}.{name}"]
            for number, output in enumerate(outputs)
            for name in ("taps", "last")
        }
        save_file(numbered, path)

    def capture_draft(self, prompt: Sequence[int], path: Path) -> None:
        (output,) = self._record([prompt], path, with_head=True)
        prefix = f"{output.request_id}."
        named = {n.removeprefix(prefix): t for n, t in load_file(path).items()}
        save_file(named, path)

    def _record(
        self, prompts: Sequence[Sequence[int]], path: Path, with_head: bool
    ) -> list[RequestOutput]:
        if self.spec.head is None:
            raise ValueError("capture: the engine has no head, whose taps are recorded")
        self.llm.collective_rpc("start_capture", args=(with_head,))
        outputs = self.llm.generate(
            [{"prompt_token_ids": list(ids)} for ids in prompts],
            SamplingParams(temperature=0.0, max_tokens=1, detokenize=False),
            use_tqdm=False,
        )
        self.llm.collective_rpc("write_captured", args=(str(path),))
        return outputs

    def metrics(self) -> DraftCounts:
        return draft_counts(self.llm.get_metrics())

    def step_times(self) -> StepTimes:
        return StepTimes() if self._stopwatch is None else self._stopwatch.total

    def close(self) -> None:
        self.llm.llm_engine.engine_core.shutdown()


def _prompt_scores(output: RequestOutput) -> list[float]:
    assert output.prompt_token_ids is not None and output.prompt_logprobs is not None
    pairs = zip(output.prompt_token_ids, output.prompt_logprobs, strict=True)
    # Nothing comes before the first id, so it has no entry.
    return [entry[token].logprob for token, entry in pairs if entry is not None]


def draft_counts(metrics: Sequence[Metric]) -> DraftCounts:
    """Read vLLM's speculation counters; all zero for an engine without speculation.

    vLLM keeps them per process, so two engines in one process share them.
    """
    counters = {m.name: m.value for m in metrics if isinstance(m, Counter)}
    vectors = {m.name: m.values for m in metrics if isinstance(m, Vector)}
    prefix = "vllm:spec_decode_num_"
    return DraftCounts(
        drafts=int(counters.get(prefix + "drafts", 0)),
        draft_tokens=int(counters.get(prefix + "draft_tokens", 0)),
        accepted_tokens=int(counters.get(prefix + "accepted_tokens", 0)),
        accepted_per_depth=tuple(
            int(v) for v in vectors.get(prefix + "accepted_tokens_per_pos", ())
        ),
    )


def _llm_arguments(spec: EngineSpec) -> dict[str, Any]:
    arguments: dict[str, Any] = {
        "model": spec.target,
        "dtype": spec.dtype,
        "max_model_len": spec.max_model_len,
        "max_num_seqs": spec.max_num_seqs,
        "enforce_eager": spec.mode.enforce_eager,
        "enable_prefix_caching": spec.prefix_caching,
        "disable_log_stats": False,
        "skip_tokenizer_init": not _has_tokenizer(spec.target),
    }
    if spec.mode.block_size is not None:
        arguments["block_size"] = spec.mode.block_size
    if spec.mode.gpu_memory_utilization is not None:
        arguments["gpu_memory_utilization"] = spec.mode.gpu_memory_utilization
    if spec.num_speculative_tokens != 0:
        arguments["speculative_config"] = _speculative_config(spec)
    if spec.options:
        arguments["additional_config"] = {"vllm_eagle3": dict(spec.options)}
    return arguments


def _speculative_config(spec: EngineSpec) -> dict[str, Any]:
    config = {
        "method": spec.method,
        "model": spec.head,
        "num_speculative_tokens": spec.num_speculative_tokens,
    }
    return {key: value for key, value in config.items() if value is not None}


def _has_tokenizer(target: str) -> bool:
    """Prompts are token ids, so a target without a tokenizer is served as well."""
    names = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")
    return any((Path(target) / name).is_file() for name in names)


def _sampling_params(sampling: Sampling) -> SamplingParams:
    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        max_tokens=sampling.max_tokens,
        seed=sampling.seed,
        ignore_eos=sampling.ignore_eos,
        logprobs=sampling.top_logprobs,
        # The caller works with ids, and text would cost every method the same.
        detokenize=False,
    )


def _generation(output: CompletionOutput) -> Generation:
    top_logprobs = None
    if output.logprobs is not None:
        top_logprobs = tuple(
            {token: entry.logprob for token, entry in place.items()}
            for place in output.logprobs
        )
    return Generation(tuple(output.token_ids), top_logprobs)
