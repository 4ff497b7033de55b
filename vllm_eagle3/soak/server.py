"""A real `vllm serve` on the loopback interface, with or without our drafts."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

import psutil

from vllm_eagle3.bench.launch import worker_environ
from vllm_eagle3.bench.methods import Method
from vllm_eagle3.bench.process import WorkerError
from vllm_eagle3.config import KEY
from vllm_eagle3.engine import EngineMode

HOST = "127.0.0.1"
START_SECONDS = 600.0
STOP_SECONDS = 30.0
BLOCK_SIZE = 32
MAX_LORA_RANK = 8
_LOG_TAIL_LINES = 20


class ServerError(WorkerError):
    """The server did not start; the message ends with the last lines of its log."""


@dataclass(frozen=True)
class ServerSpec:
    """What is served, and how.

    Attributes:
        method: as in the benchmark; one that is not ours runs stock vLLM.
        adapters: name -> folder of a LoRA adapter.
        num_blocks: KV blocks of `BLOCK_SIZE` tokens; None leaves it to vLLM.
        arguments: more of the command line.
    """

    target: Path
    head: Path | None
    method: Method
    max_model_len: int
    max_num_seqs: int
    num_blocks: int | None = None
    adapters: Mapping[str, Path] = field(default_factory=dict)
    arguments: tuple[str, ...] = ()

    def command(self, port: int) -> list[str]:
        """The command line, in float32, where equal text can be asked for."""
        vllm = str(Path(sys.executable).with_name("vllm"))
        command = [vllm, "serve", str(self.target), "--host", HOST]
        command += ["--port", str(port), "--dtype", "float32", "--enforce-eager"]
        command += ["--block-size", str(BLOCK_SIZE)]
        command += ["--max-model-len", str(self.max_model_len)]
        command += ["--max-num-seqs", str(self.max_num_seqs)]
        if self.num_blocks is not None:
            command += ["--num-gpu-blocks-override", str(self.num_blocks)]
        if self.method.speculates:
            speculation = {
                "method": "eagle3",
                "model": str(self.head),
                "num_speculative_tokens": self.method.num_speculative_tokens,
            }
            command += ["--speculative-config", json.dumps(speculation)]
        if self.method.options:
            options = {KEY: self.method.options}
            command += ["--additional-config", json.dumps(options)]
        if self.adapters:
            modules = [f"{name}={path}" for name, path in self.adapters.items()]
            command += ["--enable-lora", "--max-lora-rank", str(MAX_LORA_RANK)]
            command += ["--max-loras", str(len(modules)), "--lora-modules", *modules]
        return [*command, *self.arguments]


class Server:
    """Start a server; use as a context manager, so that it never outlives its user.

    Args:
        log_path: where everything that its processes print goes.
    """

    def __init__(self, spec: ServerSpec, log_path: Path) -> None:
        self.spec = spec
        self.log_path = log_path
        port = _free_port()
        self.url = f"http://{HOST}:{port}"
        environ = worker_environ(spec.method, EngineMode(separate_process=True))
        with log_path.open("wb") as log:
            self._process = subprocess.Popen(
                spec.command(port),
                stdout=log,
                stderr=log,
                env=environ,
                # A group of its own: the engine's processes end with it.
                start_new_session=True,
            )

    def __enter__(self) -> Server:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def wait_ready(self, seconds: float = START_SECONDS) -> None:
        """Wait until it answers.

        Raises:
            ServerError: it ended, or took longer.
        """
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if not self.is_alive:
                code = self._process.returncode
                raise ServerError(f"ended with exit code {code}\n{self.log_tail()}")
            try:
                urllib.request.urlopen(f"{self.url}/health", timeout=2)
                return
            except OSError:
                time.sleep(0.2)
        raise ServerError(f"no answer in {seconds:.0f} s\n{self.log_tail()}")

    def wait_ended(self, seconds: float) -> int:
        """Wait until it ends by itself; its exit code.

        Raises:
            subprocess.TimeoutExpired: it is still there.
        """
        return self._process.wait(seconds)

    def processes(self) -> list[psutil.Process]:
        """The server and its engine and workers."""
        try:
            front = psutil.Process(self._process.pid)
            return [front, *front.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def resident_bytes(self) -> int:
        """Memory of all its processes together."""
        total = 0
        for process in self.processes():
            try:
                total += process.memory_info().rss
            except psutil.NoSuchProcess:
                continue  # it has just ended
        return total

    def log_tail(self) -> str:
        lines = self.log_path.read_text("utf-8", errors="replace").splitlines()
        tail = "\n".join(f"    {line}" for line in lines[-_LOG_TAIL_LINES:])
        return f"last lines of {self.log_path}:\n{tail}"

    def stop(self) -> None:
        """End it: politely, then whatever is left of its group with force."""
        if self.is_alive:
            self._process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_SECONDS)
        with suppress(ProcessLookupError):  # nobody is left
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def _free_port() -> int:
    with socket.socket() as free:
        free.bind((HOST, 0))
        return int(free.getsockname()[1])
