"""WorkerProcess: the parent's handle on one engine in a process of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vllm_eagle3.acceptance import DraftCounts
from vllm_eagle3.engine import EngineSpec, Generation, Sampling, StepTimes, one_each

LOG_TAIL_LINES = 15
STOP_SECONDS = 20


class WorkerError(RuntimeError):
    """An engine process failed; the message ends with the last lines of its log."""


@dataclass(frozen=True)
class Timed:
    """A batch of generations, the time it took and what speculation did in it."""

    generations: tuple[Generation, ...]
    seconds: float
    counts: DraftCounts
    step_times: StepTimes

    @property
    def new_tokens(self) -> int:
        return sum(len(generation.token_ids) for generation in self.generations)


class WorkerProcess:
    """Start a worker; use as a context manager, so that it never outlives its user.

    Args:
        name: named in errors.
        engine: `module:class` of the engine, called with an `EngineSpec`.
        environ: the whole environment of the process.
        log_path: where all that the process prints goes.
    """

    def __init__(
        self, name: str, engine: str, environ: Mapping[str, str], log_path: Path
    ) -> None:
        self.name = name
        self.log_path = log_path
        with log_path.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "vllm_eagle3.bench.worker", engine],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=dict(environ),
                encoding="utf-8",
                # A group of its own: the engine's children end with it.
                start_new_session=True,
            )

    def __enter__(self) -> WorkerProcess:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._kill()  # it may be in the middle of minutes of work
        self.close()

    def request_start(self, spec: EngineSpec) -> None:
        """Ask for the engine; several workers may be asked before `wait_started`."""
        self._send({"op": "start", "spec": asdict(spec)})

    def wait_started(self) -> float:
        """Wait until the engine is up; seconds it took.

        Raises:
            WorkerError: the engine did not start.
        """
        return float(self._receive()["seconds"])

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling | Sequence[Sampling],
        at_once: int | None = None,
    ) -> Timed:
        """Continue the prompts, all together or so many at a time.

        Args:
            sampling: of all prompts, or one for each.

        Raises:
            WorkerError: the engine refused or died.
        """
        ids = [list(prompt) for prompt in prompts]
        fields = [asdict(each) for each in one_each(sampling, len(ids))]
        message = {"op": "generate", "prompts": ids, "samplings": fields}
        self._send(message | {"at_once": at_once})
        reply = self._receive()
        counts = reply["counts"]
        counts["accepted_per_depth"] = tuple(counts["accepted_per_depth"])
        return Timed(
            tuple(_generation(fields) for fields in reply["generations"]),
            float(reply["seconds"]),
            DraftCounts(**counts),
            StepTimes(**reply["step_times"]),
        )

    def score(self, prompts: Sequence[Sequence[int]]) -> list[list[float]]:
        """`Engine.score` of these ids.

        Raises:
            WorkerError: the engine refused or died.
        """
        self._send({"op": "score", "prompts": [list(ids) for ids in prompts]})
        return self._receive()["scores"]

    def capture_draft(self, prompt: Sequence[int], path: Path) -> None:
        """`Engine.capture_draft`; raises WorkerError as `score` does."""
        message = {"op": "capture_draft", "prompt": list(prompt), "path": str(path)}
        self._send(message)
        self._receive()

    def capture(self, prompts: Sequence[Sequence[int]], path: Path) -> None:
        """`Engine.capture`; raises WorkerError as `score` does."""
        ids = [list(prompt) for prompt in prompts]
        self._send({"op": "capture", "prompts": ids, "path": str(path)})
        self._receive()

    def close(self) -> None:
        """End the process: politely, then with force."""
        self._close_stdin()
        if self._process.poll() is None:
            try:
                self._process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self._kill()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def _kill(self) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def _close_stdin(self) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.close()
        except BrokenPipeError:
            return  # it ended by itself meanwhile

    def _send(self, message: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._death() from None

    def _receive(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise self._death()
        reply: dict[str, Any] = json.loads(line)
        if "error" in reply:
            raise WorkerError(f"{self.name}: {reply['error']}\n{self._log_tail()}")
        return reply

    def _death(self) -> WorkerError:
        code = self._process.wait(STOP_SECONDS)
        return WorkerError(
            f"{self.name}: the engine process ended with exit code {code}\n"
            f"{self._log_tail()}"
        )

    def _log_tail(self) -> str:
        lines = self.log_path.read_text(encoding="utf-8", errors="replace").splitlines()
        tail = "\n".join(f"    {line}" for line in lines[-LOG_TAIL_LINES:])
        return f"last lines of {self.log_path}:\n{tail}"


def _generation(fields: dict[str, Any]) -> Generation:
    top_logprobs = fields["top_logprobs"]
    if top_logprobs is not None:
        # JSON turns the token ids, which are keys here, into strings.
        top_logprobs = tuple(
            {int(token): value for token, value in place.items()}
            for place in top_logprobs
        )
    return Generation(tuple(fields["token_ids"]), top_logprobs)
