"""A real server when its parts or its users die: said at once, nothing lost."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from vllm_eagle3.bench.methods import parse_method
from vllm_eagle3.soak.client import Answer, ask, connect
from vllm_eagle3.soak.meter import read
from vllm_eagle3.soak.server import Server, ServerSpec
from vllm_eagle3.soak.workload import Request

pytest.importorskip("vllm")
pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(900)]

Models = Callable[[str], Path]
PROMPT = [7 * n % 120 + 3 for n in range(40)]
LONG = 700  # tokens; some seconds of work
SECONDS = 60.0  # in which a fault must be noticed


def _spec(models: Models, *arguments: str) -> ServerSpec:
    return ServerSpec(
        models("f3"),
        models("h2"),
        parse_method("ours:tree:8"),
        max_model_len=1024,
        max_num_seqs=8,
        num_blocks=256,
        arguments=arguments,
    )


@pytest.fixture(scope="module")
def server(
    models: Models, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("faults") / "log"
    with Server(_spec(models), log) as server:
        server.wait_ready()
        yield server


def _request(server: Server, length: int, **changes: Any) -> Request:
    fields = {
        "model": str(server.spec.target),
        "prompt": PROMPT,
        "temperature": 0.0,
        "max_tokens": length,
        "ignore_eos": True,
    }
    return Request(0, "long", fields, **changes)


def _ask(server: Server, *requests: Request) -> list[Answer]:
    async def all_at_once() -> list[Answer]:
        async with connect(server.url) as client:
            return await asyncio.gather(*(ask(client, r) for r in requests))

    return asyncio.run(all_at_once())


def test_clients_that_leave_give_back_their_blocks(server: Server) -> None:
    (alone,) = _ask(server, _request(server, 60))
    leaving = _request(server, LONG, stream=True, drop_after=3)
    *left, stayed = _ask(server, *[leaving] * 5, _request(server, 60))
    assert stayed == alone and alone.num_tokens == 60
    for answer in left:
        ids = answer.choices[0].token_ids
        assert (
            0 < len(ids) < LONG and ids[:60] == alone.choices[0].token_ids[: len(ids)]
        )
    deadline = time.monotonic() + SECONDS
    while True:
        _ask(server, _request(server, 2))  # a step, which sets vLLM's gauges
        reading = _read(server)
        if reading.kv_use == 0 and reading.unfinished == 0:
            break
        assert time.monotonic() < deadline, reading
    assert reading.counters.drafts.accepted_tokens > 0


def _read(server: Server) -> Any:
    async def once() -> Any:
        async with httpx.AsyncClient() as http:
            return await read(http, server.url)

    return asyncio.run(once())


def _kill_midway(server: Server, title: str) -> Answer:
    """Stream a long reply, kill a process of the server meanwhile; what arrived."""

    async def streamed() -> Answer:
        async with connect(server.url) as client, httpx.AsyncClient() as http:
            before = await read(http, server.url)
            request = _request(server, LONG, stream=True)
            answer = asyncio.create_task(ask(client, request))
            while not answer.done():
                now = await read(http, server.url)
                if (now.counters - before.counters).new_tokens > 20:
                    break
            _process(server, title).kill()
            return await asyncio.wait_for(answer, SECONDS)

    return asyncio.run(streamed())


def _process(server: Server, title: str) -> psutil.Process:
    titles = {(p.cmdline() or [""])[0]: p for p in server.processes()}
    assert title in titles, list(titles)
    return titles[title]


def _assert_said_at_once(server: Server, title: str, whole: Answer) -> None:
    """The stream ends with an error behind right tokens, and the server ends."""
    broken = _kill_midway(server, title)
    assert broken.status is not None and broken.error
    arrived = broken.choices[0].token_ids
    assert 0 < len(arrived) < LONG
    assert arrived == whole.choices[0].token_ids[: len(arrived)]
    server.wait_ended(SECONDS)
    assert "EngineDeadError" in server.log_path.read_text()


def test_a_killed_engine_core_is_said_and_the_next_start_answers(
    server: Server, tmp_path: Path
) -> None:
    """So is a killed worker, which the next start shows too."""
    (whole,) = _ask(server, _request(server, LONG))
    _assert_said_at_once(server, "VLLM::EngineCore", whole)
    with Server(server.spec, tmp_path / "log") as second:
        second.wait_ready()
        assert _ask(second, _request(second, LONG)) == [whole]
        _assert_said_at_once(second, "VLLM::Worker", whole)


def test_a_killed_rank_is_said(models: Models, tmp_path: Path) -> None:
    spec = _spec(models, "--tensor-parallel-size", "2")
    with Server(spec, tmp_path / "log") as server:
        server.wait_ready()
        (whole,) = _ask(server, _request(server, LONG))
        _assert_said_at_once(server, "VLLM::Worker_TP1", whole)
