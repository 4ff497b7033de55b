"""Greedy batches for trees, with the runs without speculation, made once a session."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch

from tests.engine_run import EnginePool, Run
from tests.models.random_llama import known_prompts, other_prompts

MAX_MODEL_LEN = 768
SHORT_MODEL_LEN = 128
LONG_REPLY = 320


@dataclass(frozen=True)
class Workload:
    """Prompts and how many tokens each reply has."""

    prompts: list[list[int]]
    lengths: list[int]

    def params(self, **settings: Any) -> list[Any]:
        """One SamplingParams for each prompt: temperature 0 unless told otherwise."""
        from vllm import SamplingParams

        common = {"temperature": 0, "ignore_eos": True, "detokenize": False}
        return [
            SamplingParams(**common | settings, max_tokens=length)
            for length in self.lengths
        ]


def _random_prompts(lengths: list[int], vocab: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(31)
    return [
        torch.randint(3, vocab, (n,), generator=generator).tolist() for n in lengths
    ]


@functools.cache
def workload(target: str, name: str) -> Workload:
    """Prompts for a fixture target.

    * `long`: more requests than fit at once, most of 320 tokens; as short ones leave,
      others join.
    * `edges`: prompts that end around the edges of the first two KV blocks.
    * `ends`: prompts that leave little or no room in a model length of 128.
    """
    vocab = {"f1": 512, "f2": 128}[target]
    if name == "long":
        prompts = [
            [token % vocab for token in prompt]
            for prompt in known_prompts() + other_prompts()
        ]
        prompts += _random_prompts([40, 9, 70, 12], vocab)
        lengths = [LONG_REPLY, 60, LONG_REPLY, 15, LONG_REPLY] * 4
        return Workload(prompts, lengths)
    if name == "edges":
        around = [*range(30, 35), *range(62, 67)]
        return Workload(_random_prompts(around, vocab), [70] * len(around))
    if name == "ends":
        near = list(range(100, SHORT_MODEL_LEN))
        lengths = [SHORT_MODEL_LEN - n for n in near]
        return Workload(_random_prompts(near, vocab), lengths)
    raise ValueError(f"workload: got {name!r}, want long, edges or ends")


class PlainRuns:
    """plain(target, name): that workload without speculation, with logprobs=2.

    All workloads of a target are run at once, since starting an engine takes longest.
    """

    def __init__(self, engine: EnginePool) -> None:
        self._engine = engine
        self._runs: dict[tuple[str, str], Run] = {}

    def __call__(self, target: str, name: str) -> Run:
        if (target, name) not in self._runs:
            handle = self._engine(target, max_model_len=MAX_MODEL_LEN)
            for each in ("long", "edges", "ends"):
                work = workload(target, each)
                run = handle.run(work.prompts, work.params(logprobs=2))
                assert run.drafted == 0
                self._runs[target, each] = run
        return self._runs[target, name]
