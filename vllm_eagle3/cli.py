"""The command `vllm-eagle3`: arguments in, one call out.

A ValueError is a message for the user: it is printed as one line, with exit code 2;
`vllm-eagle3 --debug COMMAND` shows where it came from.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from vllm_eagle3 import doctor, embedded, preload
from vllm_eagle3.bench.command import (
    run_bench_command,
    run_demo_command,
    run_report_command,
)
from vllm_eagle3.bench.methods import CONTROLS, KNOWN_METHODS
from vllm_eagle3.bench.plan import BenchOptions
from vllm_eagle3.bench.process import WorkerError
from vllm_eagle3.bench.server import ServerOptions, run_server_command
from vllm_eagle3.cli_data import TARGET_HELP, data_app
from vllm_eagle3.engine import ENGINE, EngineMode
from vllm_eagle3.head_io import convert_head
from vllm_eagle3.head_layouts import LAYOUTS
from vllm_eagle3.simulate_command import SimulateOptions, run_simulate_command

app = typer.Typer(
    help="EAGLE-3 speculative decoding for stock vLLM: serve, train, measure.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(data_app, name="data", no_args_is_help=True)
# Commands that compute in their own process, engine or trainer, are restarted once with
# the libraries that vLLM wants on a CPU (training is 15% quicker with them). The
# processes that `bench` and `demo` start get them without that.
COMPUTING_COMMANDS = frozenset({"data", "train", "scale"})
_DEFAULT_MODE = EngineMode()
_DEBUG_HELP = "Show the traceback of an error."


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point; the arguments of the process by default."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        app(arguments)
    except (ValueError, WorkerError) as error:
        if arguments[:1] == ["--debug"]:
            raise
        console = Console(stderr=True, soft_wrap=True, highlight=False)
        console.print("[bold red]error:[/]", end=" ")
        console.print(str(error), markup=False)
        raise SystemExit(2) from None


@app.callback()
def _before_any_command(
    context: typer.Context,
    debug: Annotated[bool, typer.Option("--debug", help=_DEBUG_HELP)] = False,
) -> None:
    if context.invoked_subcommand in COMPUTING_COMMANDS:
        preload.restart_with_preload()


_NAMES = ", ".join(embedded.NAMES)
_HEAD_HELP = f"Draft head: its directory, or {_NAMES}."
_OURS_HELP = "What drafts: ours:auto, ours:chain:K or ours:tree:N[:TOP_K:DEPTH]."
_METHODS_HELP = f"Comma-separated: {KNOWN_METHODS}."
_RELIABILITY_HELP = "Judge the head's confidence too, on plain PyTorch."
_SERVER_HELP = (
    "Measure a running OpenAI-compatible server at this URL instead; --batch is then "
    "the number of clients, --target its tokenizer."
)
_WAVES_HELP = "N batches' worth of requests; one that ends makes room for the next."
_STAGGER_HELP = "Shorter replies in the first wave: requests come and go one by one."
_WARM_UP_HELP = "Times through all prompts before any is counted."
_CONTROLS_HELP = f"Add {', '.join(CONTROLS)}; chains only where none is named."


@app.command()
def target(
    name: Annotated[str, typer.Argument(help=f"One of {_NAMES}.")],
    out: Annotated[
        Path | None, typer.Option(help="Directory to write; the cache by default.")
    ] = None,
) -> None:
    """Obtain an embedded target; print its path, its head's and how to serve them."""
    path = embedded.target_path(name, out)
    print(f"target: {path}")
    head = embedded.head_path(name)
    print(f"head:   {head}\n\n{embedded.serve_line(path, head)}")


@app.command(name="doctor")
def doctor_command(
    target: Annotated[str | None, typer.Option(help=TARGET_HELP)] = None,
    head: Annotated[str | None, typer.Option(help=_HEAD_HELP)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Check this installation, and whether a head fits a target; exit 1 if not."""
    from vllm_eagle3.integration import diagnosis

    findings = doctor.check_installation()
    # With these in order, vLLM can be imported and asked for the rest.
    if doctor.is_well(findings):
        findings += diagnosis.findings()
    findings += doctor.check_pair(target, head)
    if as_json:
        print(json.dumps([f.as_dict() for f in findings], indent=2))
    else:
        doctor.show(findings)
    raise typer.Exit(0 if doctor.is_well(findings) else 1)


@app.command()
def convert(
    head: Annotated[str, typer.Argument(help=_HEAD_HELP)],
    out: Annotated[Path, typer.Argument(help="Folder to write.")],
    to: Annotated[str, typer.Option(help=f"One of {', '.join(LAYOUTS)}.")],
    target: Annotated[str | None, typer.Option(help=TARGET_HELP)] = None,
) -> None:
    """Write a head in the layout of another program."""
    loaded = convert_head(
        embedded.resolve_head(head),
        out,
        to,
        None if target is None else embedded.resolve_target(target),
    )
    for note in loaded.notes:
        print(note, file=sys.stderr)
    print(f"{out}: {to}, from {loaded.layout}")


@app.command()
def bench(
    out: Annotated[Path, typer.Option(help="Folder for results and logs.")],
    prompts: Annotated[
        list[str], typer.Option(help="Prompt files: .jsonl, .json or plain text.")
    ],
    more_prompts: Annotated[
        list[str] | None, typer.Argument(help="More prompt files.", show_default=False)
    ] = None,
    target: Annotated[str | None, typer.Option(help=TARGET_HELP)] = None,
    head: Annotated[str | None, typer.Option(help=_HEAD_HELP)] = None,
    server: Annotated[str | None, typer.Option(help=_SERVER_HELP)] = None,
    limit: Annotated[int | None, typer.Option(help="First N of each file.")] = None,
    spread: Annotated[
        bool, typer.Option("--spread", help="N from all over each file instead.")
    ] = False,
    methods: Annotated[str, typer.Option(help=_METHODS_HELP)] = "ours:auto",
    controls: Annotated[
        bool, typer.Option("--controls/--no-controls", help=_CONTROLS_HELP)
    ] = True,
    batch: Annotated[str, typer.Option(help="Batch sizes, as in 1,4,16.")] = "1",
    temperature: Annotated[str, typer.Option(help="0 is greedy; as in 0,1.")] = "0",
    max_tokens: Annotated[int, typer.Option(help="New tokens per prompt.")] = 96,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="All replies of full length.")
    ] = False,
    repeats: Annotated[int, typer.Option(help="Times through all prompts.")] = 1,
    waves: Annotated[int, typer.Option(help=_WAVES_HELP)] = 1,
    stagger: Annotated[bool, typer.Option("--stagger", help=_STAGGER_HELP)] = False,
    warm_up: Annotated[int, typer.Option(help=_WARM_UP_HELP)] = 0,
    dtype: Annotated[
        str, typer.Option(help="bfloat16, float16, float32.")
    ] = "bfloat16",
    max_model_len: Annotated[int, typer.Option(help="Context of the engines.")] = 2048,
    enforce_eager: Annotated[
        bool, typer.Option("--enforce-eager/--compile", help="For every method.")
    ] = _DEFAULT_MODE.enforce_eager,
    separate_process: Annotated[
        bool, typer.Option("--separate-process/--in-process", help="vLLM's core.")
    ] = _DEFAULT_MODE.separate_process,
    block_size: Annotated[
        int | None, typer.Option(help="Tokens per KV block.")
    ] = _DEFAULT_MODE.block_size,
    step_times: Annotated[
        bool, typer.Option("--step-times", help="Split steps into parts (CPU).")
    ] = _DEFAULT_MODE.step_times,
    reliability: Annotated[
        bool, typer.Option("--reliability", help=_RELIABILITY_HELP)
    ] = False,
) -> None:
    """Measure methods against each other: speed, acceptance, same text."""
    files = (*prompts, *(more_prompts or ()))
    if server is not None:
        if head is not None:
            raise ValueError("head: got one with --server, which has its own already")
        numbers = (limit, batch, temperature, max_tokens, repeats)
        _bench_server(ServerOptions(server, files, out, target, *numbers))
        return
    if target is None:
        raise ValueError("target: got none, want one with --target, or --server URL")
    mode = replace(
        _DEFAULT_MODE,
        enforce_eager=enforce_eager,
        separate_process=separate_process,
        block_size=block_size,
        step_times=step_times,
    )
    options = BenchOptions(
        target=target,
        head=head,
        prompts=files,
        out=out,
        methods=methods,
        controls=controls,
        limit=limit,
        spread=spread,
        batch=batch,
        temperature=temperature,
        max_tokens=max_tokens,
        ignore_eos=ignore_eos,
        repeats=repeats,
        waves=waves,
        stagger=stagger,
        warm_up=warm_up,
        dtype=dtype,
        max_model_len=max_model_len,
        reliability=reliability,
        mode=mode,
    )
    run_bench_command(options, ENGINE, Console())


def _bench_server(options: ServerOptions) -> None:
    try:
        from vllm_eagle3.integration.load_generator import bench_serve
    except ImportError as error:
        raise ValueError(
            f"server: vLLM, whose load generator is used, cannot be imported ({error})"
        ) from error
    run_server_command(options, bench_serve, Console())


@app.command()
def report(
    out: Annotated[Path, typer.Argument(help="The --out folder of a bench.")],
    into: Annotated[
        Path | None, typer.Option(help="Markdown file whose marked part to replace.")
    ] = None,
) -> None:
    """Draw a benchmark again, and print its tables as Markdown."""
    run_report_command(out, into, Console(soft_wrap=True))


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="File to write.")] = Path("demo.json"),
    target: Annotated[str, typer.Option(help=TARGET_HELP)] = embedded.NAMES[0],
    head: Annotated[str, typer.Option(help=_HEAD_HELP)] = embedded.NAMES[0],
    repeats: Annotated[int, typer.Option(help="Times through all prompts.")] = 1,
) -> None:
    """See speculation at work: a few prompts, with and without it, then a table."""
    run_demo_command(target, head, out, ENGINE, Console(), repeats)


@app.command(name="eval")
def eval_command(
    target: Annotated[str, typer.Option(help=TARGET_HELP)],
    head: Annotated[str, typer.Option(help=_HEAD_HELP)],
    prompts: Annotated[
        list[str], typer.Option(help="Prompt files: .jsonl, .json or plain text.")
    ],
    more_prompts: Annotated[
        list[str] | None, typer.Argument(help="More prompt files.", show_default=False)
    ] = None,
    limit: Annotated[int | None, typer.Option(help="First N of each file.")] = None,
    draft_tokens: Annotated[int, typer.Option(help="Length of the chain.")] = 5,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    max_tokens: Annotated[int, typer.Option(help="New tokens per prompt.")] = 96,
    dtype: Annotated[
        str, typer.Option(help="bfloat16, float16, float32.")
    ] = "bfloat16",
    max_model_len: Annotated[int, typer.Option(help="Context of the engines.")] = 2048,
    check: Annotated[
        bool, typer.Option("--check", help="Compare the trainer's head and vLLM's too.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Predict a head's acceptance from plain texts; measure the same in the engine."""
    from vllm_eagle3.evaluation.command import EvalOptions, run_eval_command

    options = EvalOptions(
        target=target,
        head=head,
        prompts=(*prompts, *(more_prompts or ())),
        limit=limit,
        draft_tokens=draft_tokens,
        temperature=temperature,
        max_tokens=max_tokens,
        dtype=dtype,
        max_model_len=max_model_len,
        check=check,
    )
    results = run_eval_command(options, ENGINE, Console(stderr=as_json), as_json)
    if check and results["check"]["first_difference"] is not None:
        raise typer.Exit(1)


@app.command()
def simulate(
    record: Annotated[
        Path, typer.Option(help='Folder that an engine with "record" wrote.')
    ],
    curve: Annotated[
        Path | None, typer.Option(help="Cost curve, YAML; the record's by default.")
    ] = None,
    batch: Annotated[str, typer.Option(help="Batch sizes.")] = "1,2,4,8,16,32,64",
    num_speculative_tokens: Annotated[int, typer.Option(help="Of the engine.")] = 16,
    steps: Annotated[int, typer.Option(help="Of each simulated run.")] = 500,
    context: Annotated[int, typer.Option(help="Tokens of one request.")] = 256,
    against: Annotated[
        Path | None, typer.Option(help="results.json of a bench, to be predicted.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="JSON file to write.")] = None,
) -> None:
    """Predict what `auto` brings by batch size, here or on a machine that is not."""
    run_simulate_command(
        SimulateOptions(
            record, curve, batch, num_speculative_tokens, steps, context, against, out
        ),
        Console(),
    )


@app.command()
def train(
    config: Annotated[Path, typer.Option("--config", "-c", help="YAML of the run.")],
    overrides: Annotated[
        list[str] | None, typer.Option("--set", help="key=value, as in loss.eta=3.")
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Show rows, bytes, time; then stop."),
    ] = False,
) -> None:
    """Train a head; resumes if the run has been stopped."""
    from vllm_eagle3.evaluation.capturing import capturing
    from vllm_eagle3.evaluation.scoring import scorer
    from vllm_eagle3.train.train_command import run_train

    with capturing(ENGINE) as start_capture:
        run_train(
            config,
            Console(),
            overrides or [],
            dry_run,
            scorer(ENGINE),
            start_capture,
        )


@app.command()
def soak(
    out: Annotated[Path, typer.Option(help="Folder for soak.json and logs.")],
    target: Annotated[str, typer.Option(help=TARGET_HELP)] = embedded.NAMES[0],
    head: Annotated[str, typer.Option(help=_HEAD_HELP)] = embedded.NAMES[0],
    method: Annotated[str, typer.Option(help=_OURS_HELP)] = "ours:tree:8",
    requests: Annotated[int, typer.Option(help="Answers to judge.")] = 3000,
    concurrency: Annotated[int, typer.Option(help="Requests at a time.")] = 16,
    minutes: Annotated[float, typer.Option(help="Start no round after that.")] = 30.0,
    adapters: Annotated[
        bool, typer.Option("--adapters/--no-adapters", help="Random LoRA adapters.")
    ] = True,
    seed: Annotated[int, typer.Option(help="Of the requests.")] = 0,
) -> None:
    """Put a server under mixed load and check every answer; exit 1 if one is wrong."""
    from vllm_eagle3.bench.methods import parse_method
    from vllm_eagle3.soak.command import run_soak_command
    from vllm_eagle3.soak.run import SoakOptions

    options = SoakOptions(
        target=embedded.resolve_target(target),
        head=embedded.resolve_head(head),
        out=out,
        method=parse_method(method),
        requests=requests,
        concurrency=concurrency,
        minutes=minutes,
        adapters=adapters,
        seed=seed,
    )
    raise typer.Exit(0 if run_soak_command(options, Console()) else 1)


@app.command()
def scale(
    config: Annotated[Path, typer.Option("--config", "-c", help="YAML of the run.")],
    out: Annotated[Path, typer.Option(help="Folder of points and report.")],
    overrides: Annotated[
        list[str] | None, typer.Option("--set", help="key=value, as in loss.eta=3.")
    ] = None,
    curve: Annotated[bool, typer.Option(help="Acceptance against data.")] = True,
    grid: Annotated[bool, typer.Option(help="The ablation grid.")] = False,
    fractions: Annotated[
        str, typer.Option(help="Parts of the data.")
    ] = "1/8,1/4,1/2,1",
    seeds: Annotated[str, typer.Option(help="As in 0,1,2.")] = "0",
    same: Annotated[
        str, typer.Option(help="At every point the same: epochs or steps.")
    ] = "epochs",
    grid_fraction: Annotated[str, typer.Option(help="Data of the grid.")] = "1/4",
    prompts: Annotated[
        list[str] | None, typer.Option(help="Measure on these in the engine too.")
    ] = None,
    limit: Annotated[int | None, typer.Option(help="First N of each file.")] = None,
    max_tokens: Annotated[int, typer.Option(help="New tokens per prompt.")] = 96,
) -> None:
    """Train on parts of the data, or without parts of the method, and compare."""
    from vllm_eagle3.evaluation.scale_command import ScaleOptions, run_scale_command

    options = ScaleOptions(
        config=config,
        out=out,
        overrides=tuple(overrides or ()),
        curve=curve,
        grid=grid,
        fractions=fractions,
        seeds=seeds,
        same=same,
        grid_fraction=grid_fraction,
        prompts=tuple(prompts or ()),
        limit=limit,
        max_tokens=max_tokens,
    )
    run_scale_command(options, ENGINE, Console())
