"""results.json: what a benchmark leaves behind, enough to redo it and to redraw it.

runs          one entry per setting and method, see `run_record`
environment   versions, machine, command line, settings, hashes of what was read
"""

from __future__ import annotations

import hashlib
import heapq
import json
import os
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from vllm_eagle3.acceptance import (
    acceptance_length,
    conditional_acceptance,
)
from vllm_eagle3.bench.environment import describe_environment, settings
from vllm_eagle3.bench.identity import NEAR_TIE_NATS, is_near_tie
from vllm_eagle3.bench.methods import Method
from vllm_eagle3.bench.plan import BenchPlan
from vllm_eagle3.bench.process import Timed
from vllm_eagle3.bench.runs import MethodRun, Repeat, total_counts
from vllm_eagle3.bench.statistics import Cells, SpeedUp, speed_up
from vllm_eagle3.engine import StepTimes

Record = dict[str, Any]
FILE_NAME = "results.json"


def make_results(plan: BenchPlan, runs: Sequence[MethodRun]) -> Record:
    """The content of results.json; see `run_record` for the entries of `runs`."""
    plain = {run.setting: run for run in runs if run.method.name == "off"}
    return {
        "runs": [run_record(plan, run, plain.get(run.setting)) for run in runs],
        "environment": {
            **describe_environment(),
            "target": _folder_record(plan.target, "config.json"),
            "head": _folder_record(plan.head, "*.*") if plan.head else None,
            "prompts": [file_record(Path(path)) for path in plan.options.prompts],
            "prompt_ids_sha256": _sha256(json.dumps(plan.prompt_ids).encode()),
            "options": {**asdict(plan.options), "out": str(plan.options.out)},
            "near_tie_nats": NEAR_TIE_NATS,
            "methods": {m.name: _method_record(plan, m) for m in plan.methods},
        },
    }


def _folder_record(folder: Path, pattern: str) -> Record:
    """A model's folder; a target's weights are too many bytes to hash."""
    files = sorted(folder.glob(pattern))
    return {
        "path": str(folder),
        "sha256": {file.name: _sha256(file.read_bytes()) for file in files},
    }


def file_record(path: Path) -> Record:
    return {"path": str(path), "sha256": _sha256(path.read_bytes())}


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _method_record(plan: BenchPlan, method: Method) -> Record:
    spec = plan.engine_spec(method)
    return {
        "stock_vllm": not method.is_ours,
        # Carried into stock vLLM too: without them it is not lossless on a CPU.
        "carried_cpu_fixes": True,
        "method": spec.method if method.speculates else None,
        "model": spec.head,
        "num_speculative_tokens": method.num_speculative_tokens,
        "max_num_seqs": spec.max_num_seqs,
        "options": method.options,
        "settings": settings(plan.environ(method)),
    }


def run_record(plan: BenchPlan, run: MethodRun, plain: MethodRun | None) -> Record:
    """One entry of `runs`.

    `tokens_per_s` is a median over repeats, `speed_up` see `bench.statistics`;
    `new_tokens` and `seconds` are totals. `requests` are those of one repeat, and
    `mean_running` is how many of a batch were running on average in the plain run.
    """
    counts = total_counts(timed for repeat in run.repeats for timed in repeat.batches)
    speeds = [repeat.tokens_per_s for repeat in run.repeats]
    record: Record = {
        "method": run.method.name,
        "batch": run.setting.batch_size,
        "temperature": run.setting.temperature,
        "dtype": plan.options.dtype,
        "max_tokens": plan.options.max_tokens,
        "prompts": len(plan.prompt_ids),
        "requests": len(run.repeats[0].token_ids),
        "tokens_per_s": statistics.median(speeds),
        "tokens_per_s_range": [min(speeds), max(speeds)],
        "acceptance_length": acceptance_length(counts),
        "new_tokens": sum(repeat.new_tokens for repeat in run.repeats),
        "seconds": sum(repeat.seconds for repeat in run.repeats),
        "tasks": _task_records(run, plain),
        "repeats": [_repeat_record(repeat) for repeat in run.repeats],
    }
    if plain is not None:
        record.update(_speed_up_record(run, plain, list(range(len(run.batches)))))
        record["mean_running"] = _mean_running(plain)
        record["token_counts_equal"] = _token_counts_equal(run, plain)
    if step := _step_record(run):
        record["step"] = step
    if run.method.speculates:
        record["counts"] = asdict(counts)
        record["conditional_acceptance"] = [
            {"rate": rate.value, "low": rate.low, "high": rate.high}
            for rate in conditional_acceptance(counts)
        ]
        record.update(_identity_record(plan, run))
    return record


def _task_records(run: MethodRun, plain: MethodRun | None) -> Record:
    """Acceptance and speed by task; `mixed` where batches hold several."""
    places: dict[str, list[int]] = {}
    for index, batch in enumerate(run.batches):
        places.setdefault(batch.task, []).append(index)
    return {task: _task_record(run, plain, indices) for task, indices in places.items()}


def _task_record(run: MethodRun, plain: MethodRun | None, indices: list[int]) -> Record:
    counts = total_counts(r.batches[index] for r in run.repeats for index in indices)
    cells = _cells(run).columns(indices)
    record: Record = {
        "acceptance_length": acceptance_length(counts),
        "drafts": counts.drafts,
        "tokens_per_s": float(cells.new_tokens.sum() / cells.seconds.sum()),
    }
    if plain is not None:
        record.update(_speed_up_record(run, plain, indices))
    return record


def _speed_up_record(run: MethodRun, plain: MethodRun, batches: list[int]) -> Record:
    if run is plain:
        ratio = SpeedUp(1.0, 1.0, 1.0)
    else:
        ratio = speed_up(_cells(run).columns(batches), _cells(plain).columns(batches))
    return {
        "speed_up": ratio.value,
        "speed_up_interval": None if ratio.value is None else [ratio.low, ratio.high],
        "repeats_needed": ratio.repeats_needed,
    }


def _cells(run: MethodRun) -> Cells:
    return Cells.of(
        [[timed.seconds for timed in repeat.batches] for repeat in run.repeats],
        [[timed.new_tokens for timed in repeat.batches] for repeat in run.repeats],
    )


def _step_record(run: MethodRun) -> Record | None:
    """Milliseconds of each part of a mean step; None where none was timed."""
    batches = [timed for repeat in run.repeats for timed in repeat.batches]
    total = sum((timed.step_times for timed in batches), StepTimes())
    if not total.steps:
        return None
    parts = asdict(total)
    steps = parts.pop("steps")
    return {"steps": steps} | {k: 1000 * v / steps for k, v in parts.items()}


def _mean_running(plain: MethodRun) -> float:
    """A plain step makes one token a running request: tokens over steps."""
    steps = tokens = 0
    for repeat in plain.repeats:
        for batch, timed in zip(plain.batches, repeat.batches, strict=True):
            lengths = [len(reply.token_ids) for reply in timed.generations]
            steps += _plain_steps(lengths, batch.at_once)
            tokens += timed.new_tokens
    return tokens / steps


def _plain_steps(lengths: list[int], at_once: int) -> int:
    """Steps until the last of these replies ends; each takes the first free place."""
    places = [0] * at_once
    for length in lengths:
        heapq.heapreplace(places, places[0] + length)
    return max(places)


def _token_counts_equal(run: MethodRun, plain: MethodRun) -> bool | None:
    """Whether every batch gave as many tokens as the plain run's; at temperature 0."""
    if run.setting.temperature > 0:
        return None
    expected = [timed.new_tokens for timed in plain.repeats[0].batches]
    return all(
        [timed.new_tokens for timed in repeat.batches] == expected
        for repeat in run.repeats
    )


def _repeat_record(repeat: Repeat) -> Record:
    return {
        "tokens_per_s": repeat.tokens_per_s,
        "new_tokens": repeat.new_tokens,
        "seconds": repeat.seconds,
        "acceptance_length": acceptance_length(repeat.counts),
        "batches": [_batch_record(timed) for timed in repeat.batches],
    }


def _batch_record(timed: Timed) -> Record:
    return {"seconds": timed.seconds, "new_tokens": timed.new_tokens}


def _identity_record(plan: BenchPlan, run: MethodRun) -> Record:
    """Counts of requests that add up to `requests`; None where nothing was compared."""
    if run.differences is None:
        return {"identical": None, "near_ties": None, "different": None}
    requests = [prompt for batch in run.batches for prompt in batch.prompts]
    near = sum(is_near_tie(d, plan.options.dtype) for d in run.differences)
    return {
        "identical": len(requests) - len(run.differences),
        "near_ties": near,
        "different": len(run.differences) - near,
        "differences": [
            {"prompt": requests[difference.request], **asdict(difference)}
            for difference in run.differences
        ],
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
