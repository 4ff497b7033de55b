"""The commands `bench` and `demo`: check, run, write, show."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from vllm_eagle3.bench.launch import available_cores
from vllm_eagle3.bench.plan import BenchOptions, BenchPlan, make_plan
from vllm_eagle3.bench.report import LiveTable, notes, results_table, verdict
from vllm_eagle3.bench.results import FILE_NAME, Record, make_results, write_json
from vllm_eagle3.bench.runs import run_bench
from vllm_eagle3.config import AUTO_CHAIN
from vllm_eagle3.engine import EngineMode

DEMO_PROMPTS = Path(__file__).parents[1] / "prompt_sets" / "demo.jsonl"
DEMO_METHODS = "off,chain:3,ours:auto"
DEMO_TOKENS = 64
# torch.compile takes minutes for three engines, longer than all the demo's replies.
DEMO_MODE = EngineMode(enforce_eager=True)
_DEMO_FIELDS = (
    *("tokens_per_s", "speed_up", "speed_up_interval", "repeats_needed"),
    *("acceptance_length", "new_tokens", "seconds"),
    *("prompts", "identical", "near_ties", "different"),
)


def run_bench_command(options: BenchOptions, engine: str, console: Console) -> Record:
    """Measure, write `out`/results.json and print the table; returns the results.

    Args:
        engine: `module:class`, see `bench.worker`.

    Raises:
        ValueError: an option is wrong; nothing was started.
        WorkerError: an engine failed.
    """
    plan = make_plan(options)
    _announce(plan, console)
    with LiveTable(plan, console) as watcher:
        runs = run_bench(plan, engine, watcher)
    results = make_results(plan, runs)
    write_json(options.out / FILE_NAME, results)
    console.print(results_table(results["runs"]))
    for line in (*notes(results["runs"]), verdict(results["runs"])):
        console.print(line, highlight=False)
    return results


def _announce(plan: BenchPlan, console: Console) -> None:
    console.print(f"target {plan.target}", highlight=False)
    if plan.head is not None:
        console.print(f"head   {plan.head}", highlight=False)
    how = "eager" if plan.options.mode.enforce_eager else "compiled"
    console.print(f"every method runs {how}, on {available_cores()} cores")
    if any(method.options.get("shape") == "auto" for method in plan.methods):
        console.print(f"ours:auto stands for a chain of {AUTO_CHAIN} for now")


def run_demo_command(
    target: str, head: str, out: Path, engine: str, console: Console
) -> Record:
    """The benchmark on the demo's prompts; writes `out` and returns its content.

    Logs and the full results go to a folder beside `out`.
    """
    if out.is_dir():
        raise ValueError(f"out: {out} is a folder, want the name of a file")
    options = BenchOptions(
        target=target,
        head=head,
        prompts=(str(DEMO_PROMPTS),),
        out=out.with_name(f"{out.stem}_run"),
        methods=DEMO_METHODS,
        controls=False,
        max_tokens=DEMO_TOKENS,
        mode=DEMO_MODE,
    )
    results = run_bench_command(options, engine, console)
    demo = {"methods": {r["method"]: _demo_record(r) for r in results["runs"]}}
    write_json(out, demo)
    console.print(f"written: {out}", highlight=False)
    return demo


def _demo_record(run: Record) -> Record:
    return {name: run[name] for name in _DEMO_FIELDS if name in run}
