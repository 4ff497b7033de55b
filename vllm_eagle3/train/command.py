"""The commands `data`: check the arguments, run, show progress."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from .. import embedded
from ..engine import EngineSpec, Sampling, Streams
from ..prompts import first_turn_ids, read_prompt_files
from .overlap import GRAM, Excluded, overlaps
from .regen import Ask, write_prompts, write_replies

StartEngine = Callable[[EngineSpec], Streams]

# Many short rows at once: what keeps a small target's engine full.
_MAX_NUM_SEQS = 64


def run_data_prompts(
    start: StartEngine, target: str, count: int, out: Path, console: Console
) -> None:
    """Let the target write `count` user turns into `out`."""
    target_dir, tokenizer = _target_and_tokenizer(target)
    engine = start(EngineSpec(str(target_dir), max_num_seqs=_MAX_NUM_SEQS))
    with Progress(console=console) as bar:
        task = bar.add_task("prompts", total=count)
        kept = write_prompts(
            engine,
            tokenizer,
            count,
            out,
            lambda done, _: bar.update(task, completed=done),
        )
    console.print(f"{out}: {kept} prompts of {count} draws")


def run_data_regen(
    start: StartEngine,
    target: str,
    prompt_files: Sequence[str],
    limit: int | None,
    samplings: Sequence[Sampling],
    kind: str,
    out: Path,
    console: Console,
    exclude: Sequence[str] | None = None,
) -> None:
    """Answer the first turn of every prompt; append the rows to `out`.

    `samplings` are used in turn, and a prompt of a category has it as its row's label.
    Prompts that share words with those of the files `exclude` are left out.
    """
    if out.suffix == ".gz":
        raise ValueError(
            f"out: got {out}, want a plain .jsonl (compress it afterwards)"
        )
    target_dir, tokenizer = _target_and_tokenizer(target)
    prompts = read_prompt_files(prompt_files, limit)
    if exclude:
        excluded, all_prompts = Excluded(exclude), prompts
        prompts = [p for p in all_prompts if not overlaps(excluded, p)]
        dropped = len(all_prompts) - len(prompts)
        console.print(
            f"{dropped} prompts share {GRAM} words with a benchmark: left out"
        )
    asks = [
        Ask(tuple(first_turn_ids(prompt, tokenizer)), sampling, prompt.category or kind)
        for prompt, sampling in zip(prompts, cycle(samplings), strict=False)
    ]
    engine = start(EngineSpec(str(target_dir), max_num_seqs=_MAX_NUM_SEQS))
    with Progress(console=console) as bar:
        task = bar.add_task("replies", total=len(asks))
        written = write_replies(
            engine, asks, out, lambda done, _: bar.update(task, completed=done)
        )
    console.print(f"{out}: {written} new reply tokens, {len(asks)} rows")


def read_temperatures(text: str) -> list[float]:
    """Parse "0,0.7,1"."""
    try:
        temperatures = [float(part) for part in text.split(",")]
    except ValueError:
        temperatures = []
    # A NaN fails every comparison, so what is right is asked for.
    if not temperatures or not all(t >= 0 for t in temperatures):
        raise ValueError(f"temperature: got {text!r}, want numbers >= 0, as in 0,0.7,1")
    return temperatures


def _target_and_tokenizer(target: str) -> tuple[Path, Any]:
    from transformers import AutoTokenizer

    target_dir = embedded.resolve_target(target)
    return target_dir, AutoTokenizer.from_pretrained(str(target_dir))
