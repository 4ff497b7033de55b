"""The reliability of the head, measured with `decode`, the method on plain PyTorch.

The engine grows and judges the same trees (a test compares them step by step), but
keeps no confidences; so this runs apart from what is timed, for a few prompts.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import torch

from vllm_eagle3.bench.plan import BenchPlan
from vllm_eagle3.decode import Pick, Step, decode, greedy
from vllm_eagle3.drafter import TreeShape
from vllm_eagle3.head_io import read_head
from vllm_eagle3.plain import PlainHead, PlainTarget
from vllm_eagle3.reliability import bins, expected_calibration_error, judged_nodes

Record = dict[str, Any]
# Wide enough to judge unlikely drafts too.
SHAPE = TreeShape(num_nodes=16, top_k=4, depth=5)
MAX_PROMPTS = 16
_SEED = 0


class _Oracle:
    """Target and head, loaded once; every prompt starts with empty caches."""

    def __init__(self, plan: BenchPlan) -> None:
        assert plan.head is not None
        self.dtype = getattr(torch, plan.options.dtype)
        self.loaded = read_head(plan.head, plan.target, self.dtype)
        if self.loaded.embed_tokens is not None:
            raise ValueError(
                "reliability: got a head with an embedding of its own, which is only "
                "run inside the engine; leave --reliability out"
            )
        self.target = PlainTarget.load(
            plan.target, self.loaded.config.tap_ids, self.dtype
        )
        self.max_tokens = plan.options.max_tokens
        self.ends = _end_ids(plan)

    def steps(self, prompt_ids: list[int], pick: Pick) -> list[Step]:
        """The steps of a reply up to its end."""
        target = PlainTarget(self.target.model, self.target.tap_ids)
        head = PlainHead(self.loaded.head.to(self.dtype), self.loaded.vocab, target)
        _, steps = decode(target, head, prompt_ids, self.max_tokens, SHAPE, pick)
        said = [set(step.verdict.token_ids[0].tolist()) for step in steps]
        last = next((i for i, ids in enumerate(said) if ids & self.ends), len(steps))
        return steps[:last]


def _end_ids(plan: BenchPlan) -> set[int]:
    config = json.loads((plan.target / "config.json").read_text(encoding="utf-8"))
    ends = config.get("eos_token_id")
    return set(ends if isinstance(ends, list) else [ends]) - {None}


def measure_reliability(plan: BenchPlan) -> list[Record]:
    """One record a temperature: bins of confidence and their calibration error.

    Raises:
        ValueError: a head that plain PyTorch does not run, or no draft was judged.
    """
    oracle = _Oracle(plan)
    temperatures = dict.fromkeys(setting.temperature for setting in plan.settings)
    return [_record(plan, oracle, temperature) for temperature in temperatures]


def _record(plan: BenchPlan, oracle: _Oracle, temperature: float) -> Record:
    pick = greedy if temperature == 0 else _sampler(temperature)
    # Spread over the prompts, whatever their order.
    prompts = plan.prompt_ids[:: -(-len(plan.prompt_ids) // MAX_PROMPTS)]
    steps = [step for ids in prompts for step in oracle.steps(list(ids), pick)]
    found = bins(judged_nodes(steps))
    return {
        "temperature": temperature,
        "prompts": len(prompts),
        "steps": len(steps),
        "shape": asdict(SHAPE),
        "bins": [asdict(part) for part in found],
        "expected_calibration_error": expected_calibration_error(found),
    }


def _sampler(temperature: float) -> Pick:
    generator = torch.Generator().manual_seed(_SEED)

    def pick(logits: torch.Tensor) -> torch.Tensor:
        law = (logits.float() / temperature).softmax(-1)
        return torch.multinomial(law, 1, generator=generator)[:, 0]

    return pick
