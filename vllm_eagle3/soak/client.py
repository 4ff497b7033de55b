"""Sending a request as a user's program does, and what came back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx
from openai import APIError, AsyncOpenAI

from vllm_eagle3.soak.workload import Request

REQUEST_SECONDS = 120.0
# Less than the 5 s after which vLLM closes an idle connection: with as much, a request
# may be sent on one that the server is just closing, and never arrives.
IDLE_CONNECTION_SECONDS = 2.0
# Log-probabilities are keyed by id, since two tokens may have one text.
_RETURNED = {"return_token_ids": True}
_TOKEN_ID = "token_id:"


@dataclass
class Choice:
    """One choice; `top_logprobs` has one map per token, id -> nats, if asked for."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    top_logprobs: list[dict[int, float]] = field(default_factory=list)


@dataclass
class Answer:
    """What came back.

    Attributes:
        completion_tokens: as the server counted them; None if it did not say.
        status: HTTP status of a refusal, 0 for an answer that broke off; None if the
            answer is whole, or was left by the client.
    """

    choices: dict[int, Choice] = field(default_factory=dict)
    completion_tokens: int | None = None
    status: int | None = None
    error: str = ""

    @property
    def num_tokens(self) -> int:
        return sum(len(choice.token_ids) for choice in self.choices.values())


def connect(url: str) -> AsyncOpenAI:
    """A client of the server at `url`; it never repeats a request by itself."""
    limits = httpx.Limits(keepalive_expiry=IDLE_CONNECTION_SECONDS)
    # Releases of openai differ in whose type they declare; all take httpx's.
    http: Any = httpx.AsyncClient(limits=limits, timeout=REQUEST_SECONDS)
    return AsyncOpenAI(
        base_url=f"{url}/v1",
        api_key="none",
        max_retries=0,
        timeout=REQUEST_SECONDS,
        http_client=http,
    )


async def ask(client: AsyncOpenAI, request: Request) -> Answer:
    """Send one request and take its answer; failures are answers too."""
    answer = Answer()
    try:
        if request.stream:
            await _take_stream(client, request, answer)
        else:
            await _take_whole(client, request, answer)
    except APIError as error:
        answer.status = getattr(error, "status_code", 0)
        answer.error = f"{type(error).__name__}: {error}"
        if error.__cause__ is not None:
            answer.error += f" ({error.__cause__!r})"
    return answer


async def _take_whole(client: AsyncOpenAI, request: Request, answer: Answer) -> None:
    reply = await _create(client, request)
    for piece in reply.choices:
        _add(answer, piece, piece.message.content if request.chat else piece.text)
    answer.completion_tokens = reply.usage.completion_tokens


async def _take_stream(client: AsyncOpenAI, request: Request, answer: Answer) -> None:
    stream = await _create(
        client, request, stream=True, stream_options={"include_usage": True}
    )
    pieces = 0
    async with stream:  # leaving it closes the connection
        async for chunk in stream:
            for piece in chunk.choices:
                _add(answer, piece, piece.delta.content if request.chat else piece.text)
            if chunk.usage is not None:
                answer.completion_tokens = chunk.usage.completion_tokens
            pieces += 1
            if pieces == request.drop_after:
                return


async def _create(client: AsyncOpenAI, request: Request, **options: Any) -> Any:
    endpoint = client.chat.completions if request.chat else client.completions
    body = dict(request.fields)
    first = "messages" if request.chat else "prompt"
    extra = _RETURNED | ({} if request.chat else {"return_tokens_as_token_ids": True})
    create: Any = endpoint.create
    return await create(
        model=body.pop("model"),
        **{first: body.pop(first)},
        extra_body=body | extra,
        **options,
    )


def _add(answer: Answer, piece: Any, text: str | None) -> None:
    choice = answer.choices.setdefault(piece.index, Choice())
    choice.text += text or ""
    choice.token_ids += getattr(piece, "token_ids", None) or []
    choice.finish_reason = piece.finish_reason or choice.finish_reason
    choice.stop_reason = getattr(piece, "stop_reason", None) or choice.stop_reason
    if piece.logprobs is not None:
        choice.top_logprobs += map(_by_id, piece.logprobs.top_logprobs)


def _by_id(top: Mapping[str, float]) -> dict[int, float]:
    return {int(name.removeprefix(_TOKEN_ID)): value for name, value in top.items()}
