"""`vllm serve` as users type it: our drafter at work behind the OpenAI interface."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")
pytestmark = pytest.mark.engine

Models = Callable[[str], Path]
START_SECONDS = 600  # a busy machine imports vLLM for minutes
PROMPT = "An old tale of two sisters who crossed the sea"


@dataclass(frozen=True)
class Server:
    url: str
    log: Path
    model: str

    def client(self) -> Any:
        from openai import OpenAI

        return OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)

    def counter(self, name: str) -> float:
        return self.metric(f"vllm:spec_decode_num_{name}_total")

    def metric(self, name: str, **labels: str) -> float:
        """Sum of a metric over all labels but these."""
        with urllib.request.urlopen(f"{self.url}/metrics") as page:
            lines = page.read().decode().splitlines()
        return sum(
            float(line.rsplit(" ", 1)[1])
            for line in lines
            if line.startswith((f"{name}{{", f"{name} "))
            and all(f'{key}="{value}"' in line for key, value in labels.items())
        )


@pytest.fixture(scope="module")
def server(
    models: Models, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = tmp_path_factory.mktemp("serve") / "log"
    target = str(models("f1"))
    speculation = {
        "method": "eagle3",
        "model": str(models("h1")),
        "num_speculative_tokens": 3,
    }
    vllm = str(Path(sys.executable).with_name("vllm"))
    command = [vllm, "serve", target, "--host", "127.0.0.1", "--port", str(port)]
    command += ["--speculative-config", json.dumps(speculation)]
    command += ["--dtype", "float32", "--enforce-eager", "--max-model-len", "512"]
    command += ["--block-size", "32"]
    # What `auto` chooses depends on how fast the machine is; a record does not.
    options = {"vllm_eagle3": {"record": str(log.with_name("record"))}}
    command += ["--additional-config", json.dumps(options)]
    environment = {**os.environ, "VLLM_LOGGING_LEVEL": "INFO"}
    # Users do not set this; the tests' own engines do.
    environment.pop("VLLM_ENABLE_V1_MULTIPROCESSING", None)
    with log.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, env=environment)
    try:
        url = f"http://127.0.0.1:{port}"
        wait_until_ready(url, process, log)
        yield Server(url, log, target)
    finally:
        process.terminate()
        process.wait(60)


def wait_until_ready(url: str, process: subprocess.Popen, log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        assert process.poll() is None, log.read_text()[-3000:]
        try:
            urllib.request.urlopen(f"{url}/health", timeout=2)
            return
        except OSError:
            time.sleep(1)
    raise AssertionError(f"no answer in {START_SECONDS} s:\n{log.read_text()[-3000:]}")


def test_one_log_line_says_that_we_drive_the_engine(server: Server) -> None:
    lines = [
        line
        for line in server.log.read_text().splitlines()
        if "vllm_eagle3 drives this engine" in line
    ]
    assert len(lines) == 1 and "a chain of 3" in lines[0]


def test_completion_equals_the_engine_without_speculation(
    server: Server, engine: Any
) -> None:
    from vllm import SamplingParams

    before = server.counter("draft_tokens"), server.counter("accepted_tokens")
    ids = [1 + 7 * n % 500 for n in range(40)]
    reply = server.client().completions.create(
        model=server.model,
        prompt=ids,
        temperature=0,
        max_tokens=60,
        extra_body={"ignore_eos": True, "return_token_ids": True},
    )
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    plain = engine("f1").run([ids], params)
    assert reply.choices[0].token_ids == plain.token_ids[0]
    assert reply.usage.completion_tokens == 60
    assert server.counter("draft_tokens") > before[0]


def test_drafts_are_accepted_on_text_that_the_head_knows(server: Server) -> None:
    from tests.models import random_llama

    before = server.counter("accepted_tokens")
    server.client().completions.create(
        model=server.model,
        prompt=random_llama.known_prompts()[1],
        temperature=0,
        max_tokens=30,
        extra_body={"ignore_eos": True},
    )
    assert server.counter("accepted_tokens") - before >= 10


def test_streamed_pieces_join_to_the_whole_reply(server: Server) -> None:
    arguments: dict[str, Any] = {
        "model": server.model,
        "prompt": PROMPT,
        "temperature": 0,
        "max_tokens": 40,
        "extra_body": {"ignore_eos": True},
    }
    whole = server.client().completions.create(**arguments)
    pieces = list(
        server.client().completions.create(
            stream=True, stream_options={"include_usage": True}, **arguments
        )
    )
    joined = "".join(p.choices[0].text for p in pieces if p.choices)
    assert joined == whole.choices[0].text
    assert pieces[-1].usage.completion_tokens == whole.usage.completion_tokens == 40
    finishes = [p.choices[0].finish_reason for p in pieces if p.choices]
    assert [f for f in finishes if f] == ["length"]


def test_chat_answers(server: Server) -> None:
    message = {"role": "user", "content": PROMPT}
    reply = server.client().chat.completions.create(
        model=server.model, messages=[message], temperature=0, max_tokens=20
    )
    assert reply.choices[0].message.content


def test_bench_measures_a_running_server(server: Server, tmp_path: Path) -> None:
    from rich.console import Console

    from vllm_eagle3.bench.server import ServerOptions, run_server_command
    from vllm_eagle3.integration.load_generator import bench_serve

    prompts = tmp_path / "prompts.txt"
    prompts.write_text(f"{PROMPT}\n{PROMPT} and back\n")
    options = ServerOptions(
        server.url,
        (str(prompts),),
        tmp_path / "out",
        target=server.model,
        batch="1,2",
        max_tokens=12,
    )
    before = server.counter("draft_tokens")
    with (tmp_path / "printed").open("w") as file:
        results = run_server_command(options, bench_serve, Console(file=file))
    one, two = results["server"]
    assert (one["clients"], two["clients"]) == (1, 2)
    for record in (one, two):
        assert min(record["tokens_per_s"], record["ttft_ms"], record["tpot_ms"]) > 0
        assert record["acceptance_length"] >= 1
    assert server.counter("draft_tokens") > before


def test_our_metrics_say_what_was_drafted_and_accepted(server: Server) -> None:
    def ours(name: str, **labels: str) -> float:
        return server.metric(f"vllm_eagle3:{name}", **labels)

    assert 0 < ours("verified_nodes_total") <= ours("drafted_nodes_total")
    assert ours("verified_nodes_total") == server.counter("draft_tokens")
    assert ours("verified_at_depth_total") == server.counter("draft_tokens")
    assert ours("accepted_at_depth_total") == server.counter("accepted_tokens") > 0
    assert ours("acceptance_length_count") == server.counter("drafts")
    lengths = server.counter("drafts") + server.counter("accepted_tokens")
    assert ours("acceptance_length_sum") == lengths
    assert ours("plans_total", kind="chain") > 0
    assert ours("plain_steps_total") > 0
    for part in ("draft", "verify"):
        assert ours("seconds_total", part=part) > 0


def ask(server: Server, options: str) -> Any:
    return server.client().completions.create(
        model=server.model,
        prompt=PROMPT,
        temperature=0,
        max_tokens=20,
        extra_body={"ignore_eos": True, "vllm_xargs": {"vllm_eagle3": options}},
    )


def test_a_request_can_do_without_drafts(server: Server) -> None:
    before = server.counter("drafts")
    reply = ask(server, '{"off": true}')
    assert reply.usage.completion_tokens == 20
    assert server.counter("drafts") == before
    reason = "asked for by the request"
    assert server.metric("vllm_eagle3:fallbacks_total", reason=reason) > 0


def test_a_bad_option_of_a_request_is_named(server: Server) -> None:
    from openai import BadRequestError

    with pytest.raises(BadRequestError, match="max_node: unknown key, did you mean"):
        ask(server, '{"max_node": 3}')


def test_the_record_of_the_server_can_be_simulated(server: Server) -> None:
    from vllm_eagle3.recording import ACCEPTANCE, STEPS
    from vllm_eagle3.simulate import curve_of_steps, read_traces

    folder = server.log.with_name("record")
    drafts = read_traces(folder / ACCEPTANCE)
    # Drafts of every kind were verified; those of the largest shape are kept.
    assert {len(draft.scores) for draft in drafts} == {3}
    assert 3 * len(drafts) < server.counter("draft_tokens")
    accepted = sum(int(d.accepted.sum()) for d in drafts)
    assert 0 < accepted < server.counter("accepted_tokens")
    assert all((d.scores <= 0).all() for d in drafts)
    curve = curve_of_steps(folder / STEPS)
    assert 0 < curve.verify_ms[0][1] < 1000
