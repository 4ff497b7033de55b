"""The worker process: one engine, driven by JSON lines over pipes.

    python -m vllm_eagle3.bench.worker MODULE:ENGINE_CLASS

Requests come on standard input, replies go to the standard output the process was
started with; everything else that prints (vLLM, compilers) is sent to standard error.

    {"op": "start", "spec": {...}}             -> {"seconds": s}
    {"op": "generate", "prompts": [[id, ...], ...], "samplings": [{...}, ...],
     "at_once": N}
        -> {"seconds": s, "generations": [...], "counts": {...},
            "step_times": {...}}
    {"op": "score", "prompts": [[id, ...], ...]} -> {"scores": [[nats, ...], ...]}
    {"op": "capture", "prompts": [[id, ...], ...], "path": "..."}      -> {}
    {"op": "capture_draft", "prompt": [id, ...], "path": "..."}        -> {}
    end of input                               -> the process ends

A request that fails is answered with {"error": "..."} and the process goes on.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

from vllm_eagle3.engine import Engine, EngineMode, EngineSpec, Sampling

EngineFactory = Callable[[EngineSpec], Engine]
Message = dict[str, Any]


def serve(make_engine: EngineFactory, requests: Iterable[str], replies: TextIO) -> None:
    """Answer each request line with one reply line until the requests end."""
    session = _Session(make_engine)
    try:
        for line in requests:
            try:
                reply = session.handle(json.loads(line))
            except Exception as error:  # the boundary: told to the parent
                traceback.print_exc()
                reply = {"error": f"{type(error).__name__}: {error}"}
            replies.write(json.dumps(reply) + "\n")
            replies.flush()
    finally:
        session.close()


class _Session:
    """The engine of this process, once started."""

    def __init__(self, make_engine: EngineFactory) -> None:
        self._make_engine = make_engine
        self._engine: Engine | None = None

    def handle(self, request: Message) -> Message:
        began = time.perf_counter()
        if request["op"] == "start":
            self._engine = self._make_engine(_spec(request["spec"]))
            return {"seconds": time.perf_counter() - began}
        if request["op"] == "generate" and self._engine is not None:
            return self._generate(self._engine, request)
        if request["op"] == "score" and self._engine is not None:
            return {"scores": self._engine.score(request["prompts"])}
        if request["op"] == "capture" and self._engine is not None:
            self._engine.capture(request["prompts"], Path(request["path"]))
            return {}
        if request["op"] == "capture_draft" and self._engine is not None:
            self._engine.capture_draft(request["prompt"], Path(request["path"]))
            return {}
        raise ValueError(
            f"op: got {request['op']!r}, want 'start' first, then 'generate', "
            "'score', 'capture' or 'capture_draft'"
        )

    def _generate(self, engine: Engine, request: Message) -> Message:
        samplings = [Sampling(**fields) for fields in request["samplings"]]
        before, times = engine.metrics(), engine.step_times()
        began = time.perf_counter()
        generations = engine.generate(request["prompts"], samplings, request["at_once"])
        seconds = time.perf_counter() - began
        return {
            "seconds": seconds,
            "generations": [asdict(generation) for generation in generations],
            "counts": asdict(engine.metrics() - before),
            "step_times": asdict(engine.step_times() - times),
        }

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()


def _spec(fields: Message) -> EngineSpec:
    return EngineSpec(**{**fields, "mode": EngineMode(**fields["mode"])})


def main() -> None:
    module, _, name = sys.argv[1].partition(":")
    # Keep the pipe for replies only: libraries print to descriptor 1 as they like.
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    make_engine: EngineFactory = getattr(importlib.import_module(module), name)
    serve(make_engine, sys.stdin, replies)


if __name__ == "__main__":
    main()
