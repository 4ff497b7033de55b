"""The command `eval`: predict acceptance from texts, then measure it in the engine."""

from __future__ import annotations

import json
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import Progress as Bars

from ..bench.launch import worker_environ
from ..bench.methods import parse_method
from ..bench.plan import BenchOptions, BenchPlan, make_plan
from ..bench.process import WorkerProcess
from ..engine import EngineMode, Sampling
from .parity import first_difference
from .predict import Predictor
from .results import Judged, Record, make_results, results_table
from .texts import Observed, observe
from .walk import walk

CHECKED_ROWS = 4


@dataclass(frozen=True)
class EvalOptions:
    """The options of `vllm-eagle3 eval`, as typed.

    `check` first replays prompts through the trainer's head and the engine's.
    """

    target: str
    head: str
    prompts: tuple[str, ...]
    limit: int | None = None
    draft_tokens: int = 5
    temperature: float = 0.0
    max_tokens: int = 96
    dtype: str = "bfloat16"
    max_model_len: int = 2048
    check: bool = False


def run_eval_command(
    options: EvalOptions, engine: str, console: Console, as_json: bool = False
) -> Record:
    """Print predicted and measured acceptance by prompt file; returns the results.

    Args:
        engine: `module:class`, see `bench.worker`.
        console: shows progress; with `as_json` the results go to standard output.

    Raises:
        ValueError: an option is wrong; nothing was started.
        WorkerError: an engine failed.
    """
    results = evaluate(options, engine, console)
    if as_json:
        print(json.dumps(results, indent=2))
    else:
        console.print(results_table(results))
    return results


def evaluate(options: EvalOptions, engine: str, console: Console) -> Record:
    """The results of `eval`; see `run_eval_command`."""
    with tempfile.TemporaryDirectory(prefix="vllm-eagle3-eval-") as folder:
        plans = {file: _plan(options, file, Path(folder)) for file in options.prompts}
        check = {}
        if options.check:
            check["check"] = _check(options, plans, engine, Path(folder), console)
        with Bars(console=console) as bars:
            observed = _observe(options, plans, engine, Path(folder), bars)
            judged = _predict(options, plans, observed, bars)
    any_plan = next(iter(plans.values()))
    return make_results(
        judged,
        {
            "target": str(any_plan.target),
            "head": str(any_plan.head),
            "draft_tokens": options.draft_tokens,
            "temperature": options.temperature,
            "max_tokens": options.max_tokens,
            "dtype": options.dtype,
            **check,
        },
    )


def _check(
    options: EvalOptions,
    plans: dict[str, BenchPlan],
    engine: str,
    folder: Path,
    console: Console,
) -> Record:
    """Compare the trainer's head with the engine's, both in float32."""
    plan, steps = next(iter(plans.values())), options.draft_tokens
    assert plan.head is not None
    rows = [ids for p in plans.values() for ids in p.prompt_ids][:CHECKED_ROWS]
    predictor = Predictor(plan.target, plan.head, torch.float32)
    method = parse_method(f"ours:chain:{steps}")
    spec = replace(plan.engine_spec(method), dtype="float32")
    environ = worker_environ(method, spec.mode)
    with WorkerProcess("check", engine, environ, folder / "check.log") as worker:
        worker.request_start(spec)
        worker.wait_started()
        found = first_difference(predictor, worker, rows, steps, folder)
    said = str(found) if found else "no tensor differs"
    console.print(f"check, {len(rows)} rows, {steps} chained steps: {said}")
    return {
        "rows": len(rows),
        "steps": steps,
        "first_difference": None if found is None else asdict(found),
    }


def _plan(options: EvalOptions, file: str, folder: Path) -> BenchPlan:
    return make_plan(
        BenchOptions(
            target=options.target,
            head=options.head,
            prompts=(file,),
            out=folder,
            methods=f"off,chain:{options.draft_tokens}",
            controls=False,
            limit=options.limit,
            temperature=options.temperature,
            # The plain text goes on by as many tokens as are drafted.
            max_tokens=options.max_tokens + options.draft_tokens,
            dtype=options.dtype,
            max_model_len=options.max_model_len,
            # Neither texts nor acceptance gain by a minute of compiling.
            mode=EngineMode(enforce_eager=True),
        )
    )


def _observe(
    options: EvalOptions,
    plans: dict[str, BenchPlan],
    engine: str,
    logs: Path,
    bars: Bars,
) -> dict[str, list[Observed]]:
    prompts = [ids for plan in plans.values() for ids in plan.prompt_ids]
    task = bars.add_task("texts", total=len(prompts))
    observed = iter(
        observe(
            next(iter(plans.values())),
            prompts,
            Sampling(options.temperature, options.max_tokens),
            options.draft_tokens,
            engine,
            logs,
            lambda done: bars.update(task, completed=done),
        )
    )
    return {
        file: [next(observed) for _ in plan.prompt_ids] for file, plan in plans.items()
    }


def _predict(
    options: EvalOptions,
    plans: dict[str, BenchPlan],
    observed: dict[str, list[Observed]],
    bars: Bars,
) -> dict[str, list[Judged]]:
    plan = next(iter(plans.values()))
    assert plan.head is not None
    predictor = Predictor(plan.target, plan.head, getattr(torch, options.dtype))
    task = bars.add_task("prediction", total=sum(map(len, observed.values())))
    judged: dict[str, list[Judged]] = {}
    for file, entries in observed.items():
        judged[file] = []
        for entry in entries:
            judged[file].append(_judge(predictor, entry, options.draft_tokens))
            bars.advance(task)
    return judged


def _judge(predictor: Predictor, entry: Observed, num_drafts: int) -> Judged:
    text = entry.text
    hits = predictor.hits(text, num_drafts)
    return Judged(
        predicted=walk(hits, len(text.prompt), len(text.reply)),
        measured=entry.counts,
        same_text=entry.speculative_reply == text.reply,
    )
