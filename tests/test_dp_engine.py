"""Data parallel 2 behind `vllm serve`: dense replicas, and engines sharing experts."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.moe_target import build_f2_moe
from tests.near_ties import differing
from tests.test_serve import wait_until_ready

pytest.importorskip("vllm")
pytestmark = [pytest.mark.engine, pytest.mark.slow]

Models = Callable[[str], Path]
REQUEST_SECONDS = 120  # a hang shows as a request without an answer


class Server:
    def __init__(self, url: str, target: Path, log: Path) -> None:
        self.url, self.target, self.log = url, target, log

    def complete(self, ids: Sequence[int], max_tokens: int) -> list[int]:
        from openai import OpenAI

        client = OpenAI(
            base_url=f"{self.url}/v1",
            api_key="none",
            max_retries=0,
            timeout=REQUEST_SECONDS,
        )
        reply = client.completions.create(
            model=str(self.target),
            prompt=list(ids),
            temperature=0,
            max_tokens=max_tokens,
            extra_body={"ignore_eos": True, "return_token_ids": True},
        )
        return reply.choices[0].token_ids

    def complete_all(
        self, prompts: Sequence[Sequence[int]], max_tokens: Sequence[int]
    ) -> list[list[int]]:
        """All at once."""
        with ThreadPoolExecutor(len(prompts)) as pool:
            return list(pool.map(self.complete, prompts, max_tokens))

    def counts(self, name: str) -> dict[str, float]:
        """Draft counters by engine."""
        with urllib.request.urlopen(f"{self.url}/metrics") as page:
            text = page.read().decode()
        found = re.findall(
            rf'^vllm:spec_decode_num_{name}_total{{engine="(\d+)".*}} (\S+)$',
            text,
            re.M,
        )
        return {engine: float(value) for engine, value in found}


@contextmanager
def two_engines(target: Path, head: Path, log: Path, *more: str) -> Iterator[Server]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    speculation = {"method": "eagle3", "model": str(head), "num_speculative_tokens": 12}
    options = {"vllm_eagle3": {"shape": "tree", "top_k": 4, "depth": 4}}
    command = [str(Path(sys.executable).with_name("vllm")), "serve", str(target)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--dtype", "float32"]
    command += ["--enforce-eager", "--max-model-len", "512", "--block-size", "32"]
    command += ["--max-num-seqs", "16", "--data-parallel-size", "2", *more]
    command += ["--speculative-config", json.dumps(speculation)]
    command += ["--additional-config", json.dumps(options)]
    environment = {**os.environ, "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    environment.pop("VLLM_ENABLE_V1_MULTIPROCESSING", None)
    url = f"http://127.0.0.1:{port}"
    with log.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, env=environment)
    try:
        wait_until_ready(url, process, log)
        yield Server(url, target, log)
    finally:
        process.terminate()
        process.wait(120)


def test_dense_replicas_both_draft_and_give_the_plain_text(
    models: Models, engine: Any, tmp_path: Path
) -> None:
    from vllm import SamplingParams

    prompts = [[1 + (7 * n + 11 * i) % 500 for i in range(24)] for n in range(16)]
    with two_engines(models("f1"), models("h1"), tmp_path / "log") as server:
        replies = server.complete_all(prompts, [40] * len(prompts))
        drafted = server.counts("draft_tokens")
        accepted = server.counts("accepted_tokens")
    assert len(drafted) == 2 and all(drafted.values())
    assert sum(accepted.values()) > 0
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, logprobs=2)
    assert len(differing(engine("f1").run(prompts, params), replies)) <= 1


def test_engines_that_share_experts_do_not_hang_under_uneven_load(
    models: Models, engine: Any, tmp_path: Path
) -> None:
    """One request alone, then long beside short ones, and one near the length limit."""
    from vllm import SamplingParams

    target = build_f2_moe(tmp_path / "f2_moe")
    lengths = [40, 3, 60, 2, 9, 1, 80]
    prompts = [[3 + n, 40 + n] for n in range(len(lengths))]
    prompts.append([5 + n % 100 for n in range(505)])
    lengths.append(7)
    with two_engines(target, models("h2"), tmp_path / "log") as server:
        alone = server.complete(prompts[0], 40)
        replies = server.complete_all(prompts, lengths)
        again = server.complete(prompts[0], 40)
        accepted = server.counts("accepted_tokens")
    assert alone == replies[0] == again
    assert sum(accepted.values()) > 0
    params = [
        SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in lengths
    ]
    assert replies == engine("f2").run(prompts, params).token_ids
