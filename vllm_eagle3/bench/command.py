"""The commands `bench`, `report` and `demo`: check, run, write, show."""

from __future__ import annotations

import json
from pathlib import Path

from rich.console import Console

from vllm_eagle3.bench import page
from vllm_eagle3.bench.confidence import measure_reliability
from vllm_eagle3.bench.launch import available_cores
from vllm_eagle3.bench.plan import BenchOptions, BenchPlan, make_plan
from vllm_eagle3.bench.plots import draw_all
from vllm_eagle3.bench.report import LiveTable, notes, results_table, verdict
from vllm_eagle3.bench.results import FILE_NAME, Record, make_results, write_json
from vllm_eagle3.bench.runs import run_bench
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
    """Measure; write results.json, plots and report.html to `out`; print the table.

    Args:
        engine: `module:class`, see `bench.worker`.

    Raises:
        ValueError: an option is wrong; nothing was started.
        WorkerError: an engine failed.
    """
    results = _measure(options, engine, console)
    _write_report(options.out, results, console)
    return results


def run_report_command(out: Path, into: Path | None, console: Console) -> None:
    """Draw the plots and report.html of `out` again and print its Markdown.

    Args:
        out: folder with the results.json of a benchmark.
        into: a Markdown file that takes the tables instead, see `page.write_into`.
    """
    results = _read_results(out / FILE_NAME)
    if into is None:
        console.print(page.markdown(results), markup=False, highlight=False)
    else:
        page.write_into(into, page.markdown(results))
        console.print(f"written: {into}", highlight=False)
    _write_report(out, results, console)


def _measure(options: BenchOptions, engine: str, console: Console) -> Record:
    plan = make_plan(options)
    _announce(plan, console)
    with LiveTable(plan, console) as watcher:
        runs = run_bench(plan, engine, watcher)
    results = make_results(plan, runs)
    # Kept before anything else can go wrong: the rest can be made from it.
    write_json(options.out / FILE_NAME, results)
    console.print(results_table(results["runs"]))
    for line in (*notes(results["runs"]), verdict(results["runs"])):
        console.print(line, highlight=False)
    if options.reliability:
        console.print("judging the head's confidence, on plain PyTorch")
        results["reliability"] = measure_reliability(plan)
        write_json(options.out / FILE_NAME, results)
    return results


def _read_results(path: Path) -> Record:
    try:
        results: Record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(
            f"report: cannot read {path} ({error}); give the --out folder of a bench"
        ) from error
    if "runs" not in results:
        raise ValueError(
            f"report: {path} is of a server, whose table is all there is to show"
        )
    return results


def _write_report(out: Path, results: Record, console: Console) -> None:
    try:
        plots = draw_all(results)
    except ValueError as error:  # no matplotlib: the page has the tables still
        console.print(str(error), markup=False, highlight=False)
        plots = {}
    for name, png in plots.items():
        (out / f"{name}.png").write_bytes(png)
    report = out / "report.html"
    report.write_text(page.html_page(results, plots), encoding="utf-8")
    console.print(f"written: {report}", highlight=False)


def _announce(plan: BenchPlan, console: Console) -> None:
    console.print(f"target {plan.target}", highlight=False)
    if plan.head is not None:
        console.print(f"head   {plan.head}", highlight=False)
    how = "eager" if plan.options.mode.enforce_eager else "compiled"
    console.print(f"every method runs {how}, on {available_cores()} cores")


def run_demo_command(
    target: str,
    head: str,
    out: Path,
    engine: str,
    console: Console,
    repeats: int = 1,
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
        repeats=repeats,
        mode=DEMO_MODE,
    )
    results = _measure(options, engine, console)
    demo = {"methods": {r["method"]: _demo_record(r) for r in results["runs"]}}
    write_json(out, demo)
    console.print(f"written: {out}", highlight=False)
    return demo


def _demo_record(run: Record) -> Record:
    return {name: run[name] for name in _DEMO_FIELDS if name in run}
