"""Measuring a running OpenAI-compatible server, whatever engine is behind it.

The load generator is vLLM's own, handed in by the command line: requests come as fast
as a number of clients lets them, each waiting for its reply. Figures of latency are
over requests, medians of those over repeats.

    TTFT   time to first token, milliseconds
    TPOT   time per output token after the first, milliseconds
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from vllm_eagle3.bench.environment import describe_environment
from vllm_eagle3.bench.plan import Setting, make_writable, parse_settings
from vllm_eagle3.bench.results import FILE_NAME, Record, file_record, write_json
from vllm_eagle3.embedded import resolve_target
from vllm_eagle3.prompts import Prompt, read_prompt_files

# bench_serve(arguments of `vllm bench serve`) -> its results
Load = Callable[[Sequence[str]], Mapping[str, Any]]
_FIGURES = {
    "output_throughput": "tokens_per_s",
    "median_ttft_ms": "ttft_ms",
    "p99_ttft_ms": "ttft_p99_ms",
    "median_tpot_ms": "tpot_ms",
    "p99_tpot_ms": "tpot_p99_ms",
    "spec_decode_acceptance_length": "acceptance_length",
}
_REQUESTS_PER_CLIENT = 2
LOG_NAME = "load.log"


@dataclass(frozen=True)
class ServerOptions:
    """The options of `vllm-eagle3 bench --server`, as typed; `batch` is clients."""

    url: str
    prompts: tuple[str, ...]
    out: Path
    target: str | None = None
    limit: int | None = None
    batch: str = "1"
    temperature: str = "0"
    max_tokens: int = 96
    repeats: int = 1


def run_server_command(options: ServerOptions, load: Load, console: Console) -> Record:
    """Measure a server; write `out`/results.json and print a table.

    Raises:
        ValueError: an option is wrong, the server does not answer, or requests fail.
    """
    settings = parse_settings(options.temperature, options.batch)
    prompts = read_prompt_files(options.prompts, options.limit)
    make_writable(options.out)
    dataset = options.out / "load.json"
    dataset.write_text(json.dumps(_share_gpt(prompts)), encoding="utf-8")
    runs = []
    for setting in settings:
        console.print(
            f"{setting.batch_size} clients, temperature {setting.temperature:g}",
            highlight=False,
        )
        repeats = [
            _measure(options, setting, dataset, len(prompts), load)
            for _ in range(options.repeats)
        ]
        runs.append(_record(setting, repeats))
    results = {
        "server": runs,
        "environment": {
            **describe_environment(),
            "prompts": [file_record(Path(path)) for path in options.prompts],
            "options": {**asdict(options), "out": str(options.out)},
        },
    }
    write_json(options.out / FILE_NAME, results)
    console.print(server_table(runs))
    return results


def _share_gpt(prompts: Sequence[Prompt]) -> list[Record]:
    """The one format of the generator that needs no further packages.

    Only the user's first message is sent; the reply in the file is not used.
    """
    return [
        {
            "conversations": [
                {"from": "human", "value": prompt.first_turn[-1]["content"]},
                {"from": "gpt", "value": "-"},
            ]
        }
        for prompt in prompts
    ]


def _measure(
    options: ServerOptions, setting: Setting, dataset: Path, prompts: int, load: Load
) -> Record:
    requests = max(prompts, _REQUESTS_PER_CLIENT * setting.batch_size)
    arguments = _arguments(options, setting, dataset, requests)
    with (
        (options.out / LOG_NAME).open("a", encoding="utf-8") as log,
        redirect_stdout(log),  # it prints pages of its own
        redirect_stderr(log),
    ):
        try:
            result = load(arguments)
        except (OSError, RuntimeError) as error:
            raise ValueError(
                f"server: measuring {options.url} failed ({error}); is it up, and is "
                "--target the folder of its tokenizer?"
            ) from error
    failed = requests - int(result["completed"])
    if failed:
        raise ValueError(
            f"server: {failed} of {requests} requests to {options.url} failed or were "
            f"left out as too long; see {options.out / LOG_NAME}"
        )
    return {ours: result.get(theirs) for theirs, ours in _FIGURES.items()}


def _arguments(
    options: ServerOptions, setting: Setting, dataset: Path, requests: int
) -> list[str]:
    values = {
        "--backend": "openai-chat",
        "--base-url": options.url.rstrip("/"),
        "--endpoint": "/v1/chat/completions",
        "--dataset-name": "sharegpt",
        "--dataset-path": str(dataset),
        "--sharegpt-output-len": str(options.max_tokens),
        "--num-prompts": str(requests),
        "--max-concurrency": str(setting.batch_size),
        "--num-warmups": str(setting.batch_size),
        "--temperature": f"{setting.temperature:g}",
    }
    if options.target is not None:
        values["--tokenizer"] = str(resolve_target(options.target))
    return [*(part for pair in values.items() for part in pair), "--disable-tqdm"]


def _record(setting: Setting, repeats: list[Record]) -> Record:
    figures: Record = {}
    for name in _FIGURES.values():
        values = [repeat[name] for repeat in repeats if repeat[name] is not None]
        figures[name] = statistics.median(values) if values else None
    return {
        "clients": setting.batch_size,
        "temperature": setting.temperature,
        **figures,
        "repeats": repeats,
    }


def server_table(runs: Sequence[Record]) -> Table:
    """One row per number of clients and temperature."""
    table = Table(title="milliseconds: median (99th percentile)")
    for heading in ("clients", "T", "tokens/s", "TTFT", "TPOT", "acceptance length"):
        table.add_column(heading, justify="right")
    for run in runs:
        length = run["acceptance_length"]
        table.add_row(
            str(run["clients"]),
            f"{run['temperature']:g}",
            f"{run['tokens_per_s']:.1f}",
            f"{run['ttft_ms']:.0f} ({run['ttft_p99_ms']:.0f})",
            f"{run['tpot_ms']:.1f} ({run['tpot_p99_ms']:.1f})",
            "-" if length is None else f"{length:.2f}",
        )
    return table
