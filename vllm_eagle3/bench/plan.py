"""BenchPlan: what to measure, checked before any engine starts."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_eagle3 import embedded
from vllm_eagle3.bench.launch import KV_CACHE_GIB, worker_environ
from vllm_eagle3.bench.methods import Method, parse_methods, with_controls
from vllm_eagle3.bench.workload import (
    PromptBatch,
    make_batches,
    staggered,
    task_names,
)
from vllm_eagle3.config import KEY, read_options
from vllm_eagle3.embedded import resolve_head, resolve_target
from vllm_eagle3.engine import EngineMode, EngineSpec, Sampling
from vllm_eagle3.prompts import Prompt, first_turn_ids, read_prompts
from vllm_eagle3.scratch import scratch_blocks

if TYPE_CHECKING:
    from collections.abc import Sequence

DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
_BLOCK_TOKENS = 128  # a block of a CPU's cache; the last one of a request is half empty
MAX_TEMPERATURE = 2.0


@dataclass(frozen=True)
class BenchOptions:
    """The options of `vllm-eagle3 bench`, as typed."""

    target: str
    head: str | None
    prompts: tuple[str, ...]
    out: Path
    methods: str = "ours:auto"
    controls: bool = True
    limit: int | None = None
    spread: bool = False  # `limit` prompts from all over a file, not its first ones
    batch: str = "1"
    temperature: str | float = "0"
    max_tokens: int = 96
    ignore_eos: bool = False
    repeats: int = 1
    waves: int = 1  # requests of a measurement, in batches
    stagger: bool = False  # of the first wave, so that requests end one by one
    warm_up: int = 0  # times through all prompts before any of them is counted
    dtype: str = "bfloat16"
    max_model_len: int = 2048
    reliability: bool = False
    mode: EngineMode = field(default_factory=EngineMode)


@dataclass(frozen=True)
class Setting:
    """What all methods are measured at before the next one: a row of the results."""

    temperature: float
    batch_size: int


@dataclass(frozen=True)
class BenchPlan:
    """Checked options: everything that the runs need, and nothing that can be wrong.

    `prompt_ids` are the token ids of first turns in the target's chat template, and
    `tasks` what each prompt is about.
    """

    options: BenchOptions
    target: Path
    head: Path | None
    methods: tuple[Method, ...]
    settings: tuple[Setting, ...]
    prompt_ids: tuple[tuple[int, ...], ...]
    tasks: tuple[str, ...]

    def engine_spec(self, method: Method) -> EngineSpec:
        """The engine of a method, large enough for every batch size."""
        head = str(self.head) if method.uses_head else method.model
        return EngineSpec(
            target=str(self.target),
            head=head if method.speculates else None,
            num_speculative_tokens=method.num_speculative_tokens,
            method=method.stock,
            dtype=self.options.dtype,
            max_model_len=self.options.max_model_len,
            max_num_seqs=max(setting.batch_size for setting in self.settings),
            mode=self.options.mode,
            options=method.options,
        )

    def batches(self, setting: Setting) -> tuple[PromptBatch, ...]:
        """What runs together at a setting."""
        return make_batches(self.tasks, setting.batch_size, self.options.waves)

    def environ(self, method: Method) -> dict[str, str]:
        """The environment of a method's process."""
        mode = self.options.mode
        return worker_environ(method, mode, kv_cache_gib=self.kv_cache_gib())

    def kv_cache_gib(self) -> int:
        """A KV cache that holds the largest batch: nobody is to be preempted.

        With room for the scratch blocks of trees, which are taken from it too.
        """
        most = max(
            sum(sorted(map(self._prompt_length, batch.prompts))[-batch.at_once :])
            + batch.at_once * (self.options.max_tokens + _BLOCK_TOKENS)
            for setting in self.settings
            for batch in self.batches(setting)
        )
        requests = max(setting.batch_size for setting in self.settings)
        most += max(_scratch_tokens(method, requests) for method in self.methods)
        config = _target_config(self.target)
        heads = config.get("num_attention_heads", 0)
        width = config.get("head_dim") or config.get("hidden_size", 0) // max(heads, 1)
        kv_heads = config.get("num_key_value_heads", heads)
        layers = config.get("num_hidden_layers", 0) + 1  # the head's too
        token_bytes = 2 * layers * kv_heads * width * DTYPE_BYTES[self.options.dtype]
        return KV_CACHE_GIB + most * token_bytes // 2**30

    def _prompt_length(self, prompt: int) -> int:
        return len(self.prompt_ids[prompt])

    def samplings(self, batch: PromptBatch, sampling: Sampling) -> list[Sampling]:
        """How the replies of a batch are sampled, one for each prompt."""
        size, most = len(batch.prompts), sampling.max_tokens
        limits = (
            staggered(most, batch.at_once, size)
            if self.options.stagger
            else [most] * size
        )
        return [replace(sampling, max_tokens=limit) for limit in limits]

    def sampling(self, setting: Setting) -> Sampling:
        """How replies are sampled at a setting."""
        return Sampling(
            setting.temperature,
            self.options.max_tokens,
            ignore_eos=self.options.ignore_eos,
        )


def make_plan(options: BenchOptions) -> BenchPlan:
    """Check the options, read the prompts and make the output folder.

    Raises:
        ValueError: naming the option, what came, what is wanted.
    """
    methods = parse_methods(options.methods)
    if options.controls:
        methods = with_controls(methods, has_head=options.head is not None)
    settings = parse_settings(str(options.temperature), options.batch)
    _check_numbers(options)
    files = _read_files(options)
    prompts = [prompt for _, group in files for prompt in group]
    make_writable(options.out)
    head = None
    if any(method.uses_head for method in methods):
        if options.head is None:
            needing = ", ".join(m.name for m in methods if m.uses_head)
            raise ValueError(f"head: got none, want one for {needing}")
        head = resolve_head(options.head)
    target = resolve_target(options.target)
    plan = BenchPlan(
        options,
        target,
        head,
        tuple(map(_with_resolved_model, methods)),
        settings,
        tuple(tuple(ids) for ids in _tokenize(prompts, target)),
        task_names(files),
    )
    _check_lengths(plan, prompts)
    return plan


def _with_resolved_model(method: Method) -> Method:
    if method.model is None:
        return method
    if method.model in embedded.NAMES:
        return replace(method, model=str(embedded.target_path(method.model)))
    if not (Path(method.model) / "config.json").is_file():
        raise ValueError(
            f"methods: {method.name}: {method.model} has no config.json; give the "
            "folder of its model"
        )
    return method


def _read_files(options: BenchOptions) -> list[tuple[str, list[Prompt]]]:
    if not options.prompts:
        raise ValueError("prompts: got no files, want at least one")
    if not options.spread or options.limit is None:
        return [(path, read_prompts(path, options.limit)) for path in options.prompts]
    return [(path, _spread(path, options.limit)) for path in options.prompts]


def _spread(path: str, limit: int) -> list[Prompt]:
    """As many prompts as the limit says, at equal distances: files are often sorted."""
    if limit < 1:
        raise ValueError(f"limit: got {limit}, want at least 1")
    prompts = read_prompts(path)
    limit = min(limit, len(prompts))
    return [prompts[i * len(prompts) // limit] for i in range(limit)]


def parse_settings(temperatures: str, batch: str) -> tuple[Setting, ...]:
    """Every temperature at every batch size; both as typed.

    Raises:
        ValueError: naming the option.
    """
    return tuple(
        Setting(temperature, batch_size)
        for temperature in _parse_temperatures(temperatures)
        for batch_size in _parse_batch_sizes(batch)
    )


def _parse_temperatures(text: str) -> tuple[float, ...]:
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        values = []
    # A NaN fails every comparison, so what is right is asked for.
    if not values or not all(0.0 <= value <= MAX_TEMPERATURE for value in values):
        raise ValueError(
            f"temperature: got {text!r}, want 0 (greedy) to {MAX_TEMPERATURE:g}, "
            "one or several, as in 0,1"
        )
    return tuple(dict.fromkeys(values))


def _parse_batch_sizes(text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and int(part) > 0 for part in parts):
        raise ValueError(f"batch: got {text!r}, want sizes of 1 or more, as in 1,4,16")
    return tuple(dict.fromkeys(int(part) for part in parts))


def _check_numbers(options: BenchOptions) -> None:
    for name in ("max_tokens", "repeats", "waves", "max_model_len"):
        if getattr(options, name) < 1:
            raise ValueError(f"{name}: got {getattr(options, name)}, want 1 or more")
    if options.stagger and options.waves == 1:
        raise ValueError(
            "stagger: got it with waves 1, want at least 2, since only what follows "
            "the first wave profits from it; try waves 3"
        )
    if options.warm_up < 0:
        raise ValueError(f"warm_up: got {options.warm_up}, want 0 or more")
    if options.reliability and options.head is None:
        raise ValueError("reliability: got no head, want one with --head")
    if options.mode.step_times and options.mode.separate_process:
        raise ValueError(
            "step_times: got it with separate_process; the steps of another process "
            "are not seen, leave one of them out"
        )
    if options.dtype not in DTYPE_BYTES:
        raise ValueError(
            f"dtype: got {options.dtype!r}, want one of {list(DTYPE_BYTES)}"
        )


def make_writable(out: Path) -> None:
    """Make a folder for results.

    Raises:
        ValueError: it cannot be written to.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        probe = out / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ValueError(
            f"out: cannot write to {out} ({error.strerror or error}); choose another "
            "folder with --out DIR"
        ) from error


def _tokenize(prompts: Sequence[Prompt], target: Path) -> list[list[int]]:
    # transformers logs and phones home as it likes; both are unwanted here.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(target))
    except (OSError, ValueError) as error:
        raise ValueError(
            f"target: no tokenizer can be read from {target} ({error}); a model's "
            "directory has tokenizer.json and tokenizer_config.json"
        ) from error
    return [first_turn_ids(prompt, tokenizer) for prompt in prompts]


def _scratch_tokens(method: Method, requests: int) -> int:
    """Tokens in the scratch blocks of a method's engine."""
    if not method.is_ours or not method.num_speculative_tokens:
        return 0
    options = read_options({KEY: method.options})
    shape = options.tree_shape(method.num_speculative_tokens)
    if shape is None or shape.top_k == 1:
        return 0
    return scratch_blocks(shape, requests, _BLOCK_TOKENS) * _BLOCK_TOKENS


def _target_config(target: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads(
        (target / "config.json").read_text(encoding="utf-8")
    )
    return config


def _check_lengths(plan: BenchPlan, prompts: Sequence[Prompt]) -> None:
    options = plan.options
    config = _target_config(plan.target)
    most = config.get("max_position_embeddings", options.max_model_len)
    if options.max_model_len > most:
        raise ValueError(
            f"max_model_len: got {options.max_model_len}, want at most {most} "
            "(the target's max_position_embeddings)"
        )
    for prompt, ids in zip(prompts, plan.prompt_ids, strict=True):
        needed = len(ids) + options.max_tokens
        if needed > options.max_model_len:
            raise ValueError(
                f"{prompt.source}: {len(ids)} tokens and {options.max_tokens} new ones "
                f"need a context of {needed}, got max_model_len "
                f"{options.max_model_len}; raise it or leave the prompt out"
            )
