"""The commands `vllm-eagle3 data ...`: prompts, replies, and a look at both."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from vllm_eagle3 import embedded
from vllm_eagle3.benchmark_prompts import BENCHMARKS, write_benchmark
from vllm_eagle3.engine import ENGINE, EngineSpec, Sampling, Streams

TARGET_HELP = f"Target: a model directory, or {', '.join(embedded.NAMES)}."
data_app = typer.Typer(help="Training data: the target's own words.")
_ROWS_HELP = "Row file to write; an unfinished one is continued."
_EXCLUDE_HELP = "Prompt files of benchmarks; what shares 13 words in a row is dropped."


@data_app.command(name="prompts")
def data_prompts(
    target: Annotated[str, typer.Option(help=TARGET_HELP)],
    out: Annotated[Path, typer.Option(help="Prompt file to write (.jsonl).")],
    count: Annotated[int, typer.Option(help="Draws; some are dropped.")] = 1000,
) -> None:
    """Let the target write what users might ask it."""
    from vllm_eagle3.train import command

    command.run_data_prompts(_start_engine, target, count, out, Console())


@data_app.command(name="regen")
def data_regen(
    target: Annotated[str, typer.Option(help=TARGET_HELP)],
    prompts: Annotated[list[str], typer.Option(help="Prompt files.")],
    out: Annotated[Path, typer.Option(help=_ROWS_HELP)],
    limit: Annotated[int | None, typer.Option(help="First N of each file.")] = None,
    temperature: Annotated[
        str, typer.Option(help="0 is greedy; several take turns, as in 0,0.7,1.")
    ] = "0,0.7,1",
    max_tokens: Annotated[int, typer.Option(help="New tokens per prompt.")] = 384,
    kind: Annotated[str, typer.Option(help="Label kept with each row.")] = "chat",
    exclude: Annotated[list[str] | None, typer.Option(help=_EXCLUDE_HELP)] = None,
    ray_engines: Annotated[
        int, typer.Option(help="Engines on a Ray cluster; 0 is one without Ray.")
    ] = 0,
) -> None:
    """Let the target answer prompts; its token ids are the training rows."""
    from vllm_eagle3.train import command
    from vllm_eagle3.train.ray_engines import RayEngines

    def start(spec: EngineSpec) -> Streams:
        if ray_engines:
            return RayEngines(ENGINE, spec, ray_engines)
        return _start_engine(spec)

    temperatures = command.read_temperatures(temperature)
    samplings = [Sampling(t, max_tokens) for t in temperatures]
    command.run_data_regen(
        start, target, prompts, limit, samplings, kind, out, Console(), exclude
    )


def _start_engine(spec: EngineSpec) -> Streams:
    """An engine in this process, on all cores if it runs on a CPU.

    By default vLLM's scheduler would spin on a core of its own while the model runs on
    the others: on two cores a full batch takes nearly twice as long that way.
    """
    from vllm_eagle3.integration.cpu_fixes import is_cpu
    from vllm_eagle3.integration.engine import VllmEngine

    if is_cpu():
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    return VllmEngine(spec)


@data_app.command(name="preview")
def data_preview(
    rows: Annotated[list[str], typer.Argument(help="Row files.")],
    target: Annotated[str, typer.Option(help=TARGET_HELP)],
    limit: Annotated[int, typer.Option(help="Rows to show; all are counted.")] = 3,
    max_length: Annotated[int, typer.Option(help="As in training.")] = 2048,
) -> None:
    """Show which tokens of rows are supervised."""
    from vllm_eagle3.train.data_command import run_data_preview

    run_data_preview(rows, target, limit, max_length, Console())


@data_app.command(name="benchmark")
def data_benchmark(
    name: Annotated[str, typer.Argument(help=f"One of {', '.join(BENCHMARKS)}.")],
    out: Annotated[Path | None, typer.Option(help="NAME.jsonl by default.")] = None,
) -> None:
    """Fetch the prompts of a benchmark, for measuring."""
    path = out if out is not None else Path(f"{name}.jsonl")
    print(f"{path}: {write_benchmark(name, path)} prompts")


@data_app.command(name="dedup")
def data_dedup(
    source: Annotated[Path, typer.Argument(help="Rows or prompts (.jsonl, .gz).")],
    exclude: Annotated[list[str], typer.Option(help=_EXCLUDE_HELP)],
    out: Annotated[Path, typer.Option(help="File to write (.jsonl).")],
    target: Annotated[str, typer.Option(help=TARGET_HELP)],
) -> None:
    """Drop rows or prompts that share 13 words in a row with a benchmark."""
    from vllm_eagle3.train.data_command import run_data_dedup

    run_data_dedup(source, exclude, out, target, Console())
