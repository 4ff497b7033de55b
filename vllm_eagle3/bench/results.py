"""results.json: what a benchmark leaves behind."""

from __future__ import annotations

import json
import os
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from vllm_eagle3.acceptance import (
    DraftCounts,
    acceptance_length,
    conditional_acceptance,
)
from vllm_eagle3.bench.environment import describe_environment, settings
from vllm_eagle3.bench.identity import NEAR_TIE_NATS, is_near_tie
from vllm_eagle3.bench.launch import worker_environ
from vllm_eagle3.bench.plan import BenchPlan
from vllm_eagle3.bench.runs import MethodRun, Repeat

Record = dict[str, Any]


def make_results(plan: BenchPlan, runs: Sequence[MethodRun]) -> Record:
    """The content of results.json; see `run_record` for the entries of `runs`."""
    plain = {run.batch_size: run for run in runs if run.method.name == "off"}
    return {
        "runs": [run_record(plan, run, plain.get(run.batch_size)) for run in runs],
        "environment": {
            **describe_environment(),
            "target": str(plan.target),
            "head": str(plan.head) if plan.head else None,
            "prompts": list(plan.options.prompts),
            "near_tie_nats": NEAR_TIE_NATS,
            "engine_mode": asdict(plan.options.mode),
            "methods": {m.name: _method_record(plan, m) for m in plan.methods},
        },
    }


def _method_record(plan: BenchPlan, method: Any) -> Record:
    return {
        "stock_vllm": not method.is_ours,
        # Carried into stock vLLM too: without them it is not lossless on a CPU.
        "carried_cpu_fixes": True,
        "num_speculative_tokens": method.num_speculative_tokens,
        "options": method.options,
        "settings": settings(worker_environ(method, plan.options.mode)),
    }


def run_record(plan: BenchPlan, run: MethodRun, plain: MethodRun | None) -> Record:
    """One entry of `runs`.

    `tokens_per_s` and `speed_up` are medians over repeats, `speed_up` of ratios to
    the plain run in the same repeat; `new_tokens` and `seconds` are totals.
    """
    counts = sum((repeat.counts for repeat in run.repeats), DraftCounts())
    speeds = [repeat.tokens_per_s for repeat in run.repeats]
    record: Record = {
        "method": run.method.name,
        "batch": run.batch_size,
        "temperature": plan.options.temperature,
        "dtype": plan.options.dtype,
        "max_tokens": plan.options.max_tokens,
        "prompts": len(plan.prompt_ids),
        "tokens_per_s": statistics.median(speeds),
        "tokens_per_s_range": [min(speeds), max(speeds)],
        "acceptance_length": acceptance_length(counts),
        "new_tokens": sum(repeat.new_tokens for repeat in run.repeats),
        "seconds": sum(repeat.seconds for repeat in run.repeats),
        "repeats": [_repeat_record(repeat) for repeat in run.repeats],
    }
    if plain is not None:
        record.update(_speed_up(run, plain))
    if run.method.speculates:
        record["counts"] = asdict(counts)
        record["conditional_acceptance"] = [
            {"rate": rate.value, "low": rate.low, "high": rate.high}
            for rate in conditional_acceptance(counts)
        ]
        record.update(_identity_record(plan, run))
    return record


def _repeat_record(repeat: Repeat) -> Record:
    return {
        "tokens_per_s": repeat.tokens_per_s,
        "new_tokens": repeat.new_tokens,
        "seconds": repeat.seconds,
        "acceptance_length": acceptance_length(repeat.counts),
    }


def _speed_up(run: MethodRun, plain: MethodRun) -> Record:
    ratios = [
        mine.tokens_per_s / theirs.tokens_per_s
        for mine, theirs in zip(run.repeats, plain.repeats, strict=True)
    ]
    return {
        "speed_up": statistics.median(ratios),
        "speed_up_range": [min(ratios), max(ratios)],
    }


def _identity_record(plan: BenchPlan, run: MethodRun) -> Record:
    """Counts of prompts that add up to `prompts`; None where nothing was compared."""
    if run.differences is None:
        return {"identical": None, "near_ties": None, "different": None}
    near = sum(is_near_tie(d, plan.options.dtype) for d in run.differences)
    return {
        "identical": len(plan.prompt_ids) - len(run.differences),
        "near_ties": near,
        "different": len(run.differences) - near,
        "differences": [asdict(difference) for difference in run.differences],
    }


def write_json(path: Path, content: Record) -> None:
    """Write a file that is whole or absent."""
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump(content, file, indent=2)
            file.write("\n")
        os.chmod(name, 0o644)  # mkstemp makes it private
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
