"""The Ray examples run as they stand, on fixture models."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.near_ties import differing
from tests.ray_nodes import PATIENCE
from tests.test_serve import wait_until_ready

pytest.importorskip("ray")
pytestmark = [pytest.mark.engine, pytest.mark.slow]

Models = Callable[[str], Path]
ROOT = Path(__file__).parent.parent
TEXTS = [f"An old tale of {n} sisters" for n in range(12)]


def command(example: str, models: Models, *arguments: str) -> list[str]:
    pair = ["--target", str(models("f1")), "--head", str(models("h1"))]
    return [sys.executable, f"examples/{example}", *pair, *arguments]


def test_replies_of_two_engines_are_the_target_s_own_in_order(
    models: Models, engine: Any, tmp_path: Path
) -> None:
    from vllm import SamplingParams

    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "rows.jsonl"
    prompts.write_text("".join(json.dumps(text) + "\n" for text in TEXTS))
    options = ["--prompts", str(prompts), "--out", str(out), "--engines", "2"]
    options += ["--batch", "3", "--temperature", "0", "--max-tokens", "16", "--eager"]
    options += ["--dtype", "float32"]
    done = subprocess.run(
        command("ray_data.py", models, *options),
        cwd=ROOT,
        env={**os.environ, **PATIENCE, "RAY_DEDUP_LOGS": "0"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    said = re.findall(
        r"pid=(\d+).* (\d+) of \d+ drafts accepted", done.stdout + done.stderr
    )
    assert len({process for process, _ in said}) == 2
    assert sum(int(accepted) for _, accepted in said) > 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(rows) == len(TEXTS)
    begins = [row["spans"][0][0] for row in rows]
    asked = [row["ids"][:begin] for row, begin in zip(rows, begins, strict=True)]
    assert len({tuple(ids) for ids in asked}) == len(TEXTS)
    params = SamplingParams(temperature=0, max_tokens=16, logprobs=2)
    plain = engine("f1").run(asked, params)
    replies = [row["ids"][begin:] for row, begin in zip(rows, begins, strict=True)]
    assert len(differing(plain, replies)) <= 1


def test_serve_answers_as_the_engine_without_speculation(
    models: Models, engine: Any, tmp_path: Path
) -> None:
    from openai import OpenAI
    from vllm import SamplingParams

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    own = ["--dtype", "float32", "--enforce-eager", "--max-model-len", "512"]
    own += ["--block-size", "32"]
    environment = {**os.environ, **PATIENCE}
    environment.pop("VLLM_ENABLE_V1_MULTIPROCESSING", None)
    log, url = tmp_path / "log", f"http://127.0.0.1:{port}"
    options = ["--replicas", "2", "--port", str(port), "--", *own]
    with log.open("w") as file:
        process = subprocess.Popen(
            command("ray_serve.py", models, *options),
            cwd=ROOT,
            env=environment,
            stdout=file,
            stderr=file,
        )
    prompts = [[1 + (7 * n + 11 * i) % 500 for i in range(24)] for n in range(12)]

    def ask(ids: list[int]) -> list[int]:
        client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        reply = client.completions.create(
            model=str(models("f1")),
            prompt=ids,
            temperature=0,
            max_tokens=40,
            extra_body={"ignore_eos": True, "return_token_ids": True},
        )
        return reply.choices[0].token_ids

    try:
        wait_until_ready(url, process, log)
        with ThreadPoolExecutor(6) as pool:
            replies = list(pool.map(ask, prompts))
        with urllib.request.urlopen(f"{url}/metrics") as page:
            metrics = page.read().decode()
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(120)
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, logprobs=2)
    assert len(differing(engine("f1").run(prompts, params), replies)) <= 1
    counters = [x for x in metrics.splitlines() if "num_draft_tokens_total{" in x]
    assert sum(float(line.rsplit(" ", 1)[1]) for line in counters) > 0
