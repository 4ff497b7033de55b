"""A soak from start to end: answers without speculation, then rounds with it.

    server without speculation:  every request of the catalogue once, and the laws
    server with our drafts:      the catalogue, round after round; each answer judged

One server at a time, so that they do not share the machine.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random

import httpx
from openai import AsyncOpenAI

from vllm_eagle3 import prompts
from vllm_eagle3.acceptance import acceptance_length
from vllm_eagle3.bench.methods import Method, parse_method
from vllm_eagle3.soak.adapters import write_adapter
from vllm_eagle3.soak.checks import Round
from vllm_eagle3.soak.client import REQUEST_SECONDS, Answer, ask, connect
from vllm_eagle3.soak.judge import Verdict, judge
from vllm_eagle3.soak.law import Law, exact_law
from vllm_eagle3.soak.meter import Counters, Reading, read
from vllm_eagle3.soak.server import BLOCK_SIZE, Server, ServerSpec
from vllm_eagle3.soak.workload import (
    LAW_PROMPTS,
    MIN_DISTINCT,
    Request,
    Source,
    catalogue,
)

CORPUS = Path(__file__).parents[1] / "prompt_sets" / "demo.jsonl"
MAX_MODEL_LEN = 512
MAX_DISTINCT = 500
ROUNDS = 6
NUM_ADAPTERS = 2
IDLE_SECONDS = 0.5
DRAIN_SECONDS = 60.0
METER_SECONDS = 1.0


@dataclass(frozen=True)
class SoakOptions:
    """What is soaked, and for how long.

    Attributes:
        requests: how many answers are judged; whole rounds, so rarely a few more.
        concurrency: requests under way; twice as many in bursts.
        minutes: no round starts after that, so that there may be fewer requests.
    """

    target: Path
    head: Path
    out: Path
    method: Method = field(default_factory=lambda: parse_method("ours:tree:8"))
    requests: int = 3000
    concurrency: int = 16
    minutes: float = 30.0
    adapters: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.method.is_ours or not self.method.speculates:
            raise ValueError(f"method: got {self.method.name}, want one of ours:...")
        if self.requests < 3 * MIN_DISTINCT:
            raise ValueError(
                f"requests: got {self.requests}, want at least {3 * MIN_DISTINCT}, "
                "three rounds of every kind"
            )
        if self.concurrency < 1:
            raise ValueError(f"concurrency: got {self.concurrency}, want at least 1")
        if self.minutes <= 0:
            raise ValueError(f"minutes: got {self.minutes}, want more than 0")

    @property
    def distinct(self) -> int:
        """Requests of the catalogue."""
        return min(MAX_DISTINCT, max(MIN_DISTINCT, self.requests // ROUNDS))

    @property
    def rounds(self) -> int:
        return math.ceil(self.requests / self.distinct)

    @property
    def num_blocks(self) -> int:
        """A quarter of what `concurrency` requests of full length need, or two of them.

        Small enough that every block is written in the first round, that cached ones
        are evicted, and that bursts preempt.
        """
        each = MAX_MODEL_LEN // BLOCK_SIZE
        return max(2 * each, self.concurrency * each // 4)


@dataclass(frozen=True)
class Progress:
    """A moment of a soak, for a live line."""

    stage: str
    done: int
    total: int
    wrong: int
    tokens_per_s: float
    acceptance_length: float | None
    kv_use: float
    memory: int


@dataclass(frozen=True)
class Expected:
    """What the target says without speculation."""

    requests: list[Request]
    answers: list[Answer]
    laws: dict[int, Law]


@dataclass(frozen=True)
class Soaked:
    """What a soak found."""

    expected: Expected
    rounds: list[Round]
    is_alive: bool


Show = Callable[[Progress], None]


def run_soak(options: SoakOptions, show: Show) -> Soaked:
    """Start one server after the other, and play the catalogue on both.

    Raises:
        ServerError: one did not start; its log is in the output folder.
    """
    options.out.mkdir(parents=True, exist_ok=True)
    adapters = _write_adapters(options)
    ours = ServerSpec(
        options.target,
        options.head,
        options.method,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=options.concurrency,
        num_blocks=options.num_blocks,
        adapters=adapters,
    )
    # Near ties are those of the law that tokens are drawn from, penalties and all.
    processed = ("--logprobs-mode", "processed_logprobs")
    plain = replace(ours, method=parse_method("off"), arguments=processed)
    with Server(plain, options.out / "plain.log") as server:
        server.wait_ready()
        expected = asyncio.run(_expect(options, server, tuple(adapters), show))
    with Server(ours, options.out / "ours.log") as server:
        server.wait_ready()
        rounds = asyncio.run(_play_rounds(options, server, expected, show))
        return Soaked(expected, rounds, server.is_alive)


def _write_adapters(options: SoakOptions) -> dict[str, Path]:
    if not options.adapters:
        return {}
    folders = {
        f"adapter-{n}": options.out / f"adapter-{n}" for n in range(NUM_ADAPTERS)
    }
    for number, folder in enumerate(folders.values()):
        write_adapter(folder, options.target, seed=number)
    return folders


async def _expect(
    options: SoakOptions, server: Server, adapters: tuple[str, ...], show: Show
) -> Expected:
    """Every request once, whole, and the laws."""
    model = str(options.target)
    async with connect(server.url) as client, _http() as http:
        corpus = await _corpus(http, server, model)
        source = Source(model, corpus, MAX_MODEL_LEN, adapters)
        requests = catalogue(source, options.distinct, options.seed)
        answers: list[Answer] = []
        limit = asyncio.Semaphore(options.concurrency)

        async def answered(request: Request) -> Answer:
            async with limit:
                answer = await ask(client, _whole(request))
            answers.append(answer)
            return answer

        def progress(reading: Reading, speed: float, memory: int) -> Progress:
            total = len(requests)
            use = reading.kv_use
            return Progress("plain", len(answers), total, 0, speed, None, use, memory)

        async with _Meter(server, http, progress, show):
            given = await asyncio.gather(*map(answered, requests))
            laws = {
                number: await exact_law(client, model, source.law_prompt(number))
                for number in range(LAW_PROMPTS)
            }
    return Expected(requests, list(given), laws)


def _http() -> httpx.AsyncClient:
    return httpx.AsyncClient(timeout=REQUEST_SECONDS)


def _whole(request: Request) -> Request:
    """The request as its answer is known best: to its end, with what tells ties."""
    fields = request.fields
    if fields["temperature"] == 0 and not request.chat and "logprobs" not in fields:
        fields = fields | {"logprobs": 2}
    return replace(request, fields=fields, drop_after=None, stream=request.chat)


async def _corpus(http: httpx.AsyncClient, server: Server, model: str) -> list[int]:
    """Token ids of the demo's prompts, one text behind the other."""
    text = "\n\n".join(
        message["content"]
        for prompt in prompts.read_prompts(CORPUS)
        for message in prompt.messages
    )
    body = {"model": model, "prompt": text, "add_special_tokens": False}
    reply = await http.post(f"{server.url}/tokenize", json=body)
    tokens: list[int] = reply.raise_for_status().json()["tokens"]
    return tokens


async def _play_rounds(
    options: SoakOptions, server: Server, expected: Expected, show: Show
) -> list[Round]:
    deadline = time.monotonic() + 60 * options.minutes
    random = Random(options.seed)
    rounds: list[Round] = []
    async with connect(server.url) as client, _http() as http:
        for _ in range(options.rounds):
            if time.monotonic() > deadline or not server.is_alive:
                break
            order = random.sample(expected.requests, len(expected.requests))
            player = _Player(options, server, client, http, expected, rounds, show)
            await player.play(order)
    return rounds


class _Player:
    """One round; appended to `rounds` when it starts."""

    def __init__(
        self,
        options: SoakOptions,
        server: Server,
        client: AsyncOpenAI,
        http: httpx.AsyncClient,
        expected: Expected,
        rounds: list[Round],
        show: Show,
    ) -> None:
        self.options, self.server, self.expected = options, server, expected
        self.client, self.http, self.show = client, http, show
        self.rounds = rounds
        self.round = Round()
        rounds.append(self.round)

    async def play(self, requests: Sequence[Request]) -> None:
        """Steady load, a burst and a rest, until all requests are answered."""
        width = self.options.concurrency
        start = time.monotonic()
        with suppress(httpx.HTTPError):  # a dead server shows in every answer
            before = await read(self.http, self.server.url)
            async with _Meter(self.server, self.http, self._progress, self.show) as m:
                self.round.memory = m.memory
                for first in range(0, len(requests), 8 * width):
                    part = requests[first : first + 8 * width]
                    await self._play_part(part[: 6 * width], width)
                    await self._play_part(part[6 * width :], len(part))
                    await asyncio.sleep(IDLE_SECONDS)
                after = await self._drained()
            self.round.counters = after.counters - before.counters
            self.round.kv_left = after.kv_use
        self.round.seconds = time.monotonic() - start

    async def _play_part(self, requests: Sequence[Request], width: int) -> None:
        limit = asyncio.Semaphore(max(width, 1))

        async def one(request: Request) -> None:
            async with limit:
                answer = await ask(self.client, request)
            self._take(request, answer)

        await asyncio.gather(*map(one, requests))

    def _take(self, request: Request, answer: Answer) -> None:
        verdict = judge(request, self.expected.answers[request.number], answer)
        self.round.verdicts.append((request.number, request.kind, verdict))
        if request.law is not None and not verdict.wrong:
            samples = self.round.samples.setdefault(request.law, [])
            samples += [tuple(c.token_ids) for c in answer.choices.values()]

    async def _drained(self) -> Reading:
        """A reading when nothing runs any more, after one last request.

        vLLM's gauges are set by steps, so without that request they would still show
        what dropped requests held.
        """
        model, last = str(self.options.target), {"prompt": [5], "max_tokens": 2}
        request = Request(0, "last", {"model": model, "temperature": 0.0} | last)
        deadline = time.monotonic() + DRAIN_SECONDS
        while True:
            await ask(self.client, request)
            reading = await read(self.http, self.server.url)
            if reading.unfinished == 0 and reading.kv_use == 0:
                return reading
            if time.monotonic() > deadline:
                return reading
            await asyncio.sleep(METER_SECONDS)

    def _progress(self, reading: Reading, speed: float, memory: int) -> Progress:
        verdicts = [v for each in self.rounds for _, _, v in each.verdicts]
        return Progress(
            f"round {len(self.rounds)}",
            len(verdicts),
            self.options.rounds * self.options.distinct,
            sum(bool(verdict.wrong) for verdict in verdicts),
            speed,
            acceptance_length(reading.counters.drafts),
            reading.kv_use,
            memory,
        )


class _Meter:
    """Read the server every second while the block runs."""

    def __init__(
        self,
        server: Server,
        http: httpx.AsyncClient,
        progress: Callable[[Reading, float, int], Progress],
        show: Show,
    ) -> None:
        self.server, self.http = server, http
        self.progress, self.show = progress, show
        self.memory: list[int] = []

    async def __aenter__(self) -> _Meter:
        self._task = asyncio.create_task(self._watch())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task

    async def _watch(self) -> None:
        last, then = Counters(), time.monotonic()
        while True:
            with suppress(httpx.HTTPError):  # busy, or dead: answers will tell
                reading = await read(self.http, self.server.url)
                self.memory.append(self.server.resident_bytes())
                new, now = reading.counters, time.monotonic()
                speed = (new - last).new_tokens / (now - then)
                self.show(self.progress(reading, speed, self.memory[-1]))
                last, then = new, now
            await asyncio.sleep(METER_SECONDS)


def wrong_answers(rounds: Sequence[Round]) -> list[tuple[int, int, str, Verdict]]:
    """(round, request, kind, verdict) of every wrong answer."""
    return [
        (index, number, kind, verdict)
        for index, each in enumerate(rounds)
        for number, kind, verdict in each.verdicts
        if verdict.wrong
    ]
