"""Engine: the little that training and benchmarks need of a serving engine.

The only implementation is `vllm_eagle3.integration.engine.VllmEngine`; the command
line hands it to those who need one, so that neither imports vLLM.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from vllm_eagle3.acceptance import DraftCounts

# Where the only implementation is, for whoever starts engines in other processes.
ENGINE = "vllm_eagle3.integration.engine:VllmEngine"


@dataclass(frozen=True)
class Sampling:
    """How to sample; temperature 0 is greedy.

    `top_logprobs` asks for that many of the largest log-probabilities per new token.
    """

    temperature: float = 0.0
    max_tokens: int = 96
    top_p: float = 1.0
    seed: int | None = None
    ignore_eos: bool = False
    top_logprobs: int | None = None


def one_each(
    sampling: Sampling | Sequence[Sampling], num_prompts: int
) -> Sequence[Sampling]:
    """Of every prompt, where one may be given for all."""
    return [sampling] * num_prompts if isinstance(sampling, Sampling) else sampling


@dataclass(frozen=True)
class Generation:
    """New tokens of one prompt.

    `top_logprobs` holds one map per new token, token id -> log-probability in nats,
    and always includes the token that was chosen; None when not asked for.
    """

    token_ids: tuple[int, ...]
    top_logprobs: tuple[dict[int, float], ...] | None = None


@dataclass(frozen=True)
class StepTimes:
    """Steps without prefills, and the seconds in each part of them, summed."""

    steps: int = 0
    draft: float = 0.0
    verify: float = 0.0
    commit: float = 0.0
    rest: float = 0.0

    def __add__(self, other: StepTimes) -> StepTimes:
        return StepTimes(*(a + b for a, b in zip(*_values(self, other), strict=True)))

    def __sub__(self, other: StepTimes) -> StepTimes:
        """What happened since `other` was read from the same engine."""
        return StepTimes(*(a - b for a, b in zip(*_values(self, other), strict=True)))


def _values(*times: StepTimes) -> list[tuple[Any, ...]]:
    return [astuple(some) for some in times]


@dataclass(frozen=True)
class EngineMode:
    """How an engine runs, apart from what it computes.

    Args:
        enforce_eager: run the model without torch.compile.
        separate_process: vLLM's engine core in a process of its own.
        block_size: tokens per KV block; None leaves the choice to vLLM.
        block_time_ms: how long idle OpenMP threads spin before they sleep
            (KMP_BLOCKTIME). The default is what vLLM gives its worker processes;
            the library's own 200 would let an idle engine disturb the next one.
        threads: OpenMP threads; None means one per core this process may use.
        preload: load the allocator and OpenMP libraries that vLLM recommends.
        step_times: measure the parts of every step, see `StepTimes`.
        gpu_memory_utilization: part of a GPU's memory; None leaves it to vLLM.
    """

    enforce_eager: bool = False
    separate_process: bool = False
    block_size: int | None = None
    block_time_ms: int = 5
    threads: int | None = None
    preload: bool = True
    step_times: bool = False
    gpu_memory_utilization: float | None = None


@dataclass(frozen=True)
class EngineSpec:
    """Everything needed to start an engine.

    Args:
        head: the head, or the model of another `method`; None where it has none.
        num_speculative_tokens: most drafts of a step; 0 means no speculation, None
            leaves it to the method.
        method: vLLM's name of the speculative method.
    """

    target: str
    head: str | None = None
    num_speculative_tokens: int | None = 0
    method: str = "eagle3"
    dtype: str = "bfloat16"
    max_model_len: int = 2048
    max_num_seqs: int = 16
    mode: EngineMode = field(default_factory=EngineMode)
    # Off, so that a prompt that comes again costs what it cost the first time.
    prefix_caching: bool = False
    # Options of this package, as in --additional-config '{"vllm_eagle3": {...}}'.
    options: dict[str, Any] = field(default_factory=dict)


class Streams(Protocol):
    """What answers a long list of requests: an engine, or several as one."""

    def stream(
        self, requests: Iterable[tuple[Sequence[int], Sampling]]
    ) -> Iterator[tuple[int, Generation]]:
        """Continue (prompt, sampling) pairs; yield (their number, result) as each ends.

        Requests are taken when a place is free, so the engine stays full to the end
        of a long list and nothing waits for the slowest of a batch.
        """
        ...


class Engine(Streams, Protocol):
    """A running engine; prompts and results are token ids of the target."""

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling | Sequence[Sampling],
        at_once: int | None = None,
    ) -> list[Generation]:
        """Continue all prompts; results in the order of the prompts.

        Args:
            sampling: of all prompts, or one for each.
            at_once: how many run together, the next one starting where one ends; None
                starts all together.
        """
        ...

    def score(self, prompts: Sequence[Sequence[int]]) -> list[list[float]]:
        """Log-probability in nats of each id but the first, given those before it."""
        ...

    def capture(self, prompts: Sequence[Sequence[int]], path: Path) -> None:
        """Write what the head reads of each prompt to a safetensors file.

        `N.taps` [tokens, num_taps * hidden] and `N.last` [tokens, hidden], the states
        after the final norm, of the N-th prompt.
        """
        ...

    def capture_draft(self, prompt: Sequence[int], path: Path) -> None:
        """Draft once behind `prompt` and write all that the head's module computed.

        `taps`, `last` as in `capture`; `head.fused` [tokens, hidden]; for step K and
        the row that drafts, `head.K.token_ids` [1], `head.K.hidden`,
        `head.K.feedback` [1, hidden] and `head.K.logits` [1, draft_vocab].
        """
        ...

    def metrics(self) -> DraftCounts:
        """Counters since the engine started."""
        ...

    def step_times(self) -> StepTimes:
        """Times since the engine started; all zero unless the mode asks for them."""
        ...

    def close(self) -> None:
        """Stop the engine and free what it holds."""
        ...
