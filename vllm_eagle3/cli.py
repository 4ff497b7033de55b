"""The command `vllm-eagle3`: arguments in, one call out.

A ValueError is a message for the user: it is printed as one line, with exit code 2;
`vllm-eagle3 --debug COMMAND` shows where it came from.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from vllm_eagle3 import doctor, embedded, preload

app = typer.Typer(
    help="EAGLE-3 speculative decoding for stock vLLM: serve, train, measure.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
# Commands that start engines are restarted once with the libraries that vLLM wants.
ENGINE_COMMANDS = frozenset({"bench", "demo", "data", "eval"})
_DEBUG_HELP = "Show the traceback of an error."


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point; the arguments of the process by default."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        app(arguments)
    except ValueError as error:
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
    if context.invoked_subcommand in ENGINE_COMMANDS:
        preload.restart_with_preload()


_NAMES = ", ".join(embedded.NAMES)
_TARGET_HELP = f"Target: a model directory, or {_NAMES}."
_HEAD_HELP = f"Draft head: its directory, or {_NAMES}."


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
    target: Annotated[str | None, typer.Option(help=_TARGET_HELP)] = None,
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
