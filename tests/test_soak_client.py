"""The soak's client: whole replies, streams, refusals, and streams that break off."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI

from vllm_eagle3.soak.client import IDLE_CONNECTION_SECONDS, Answer, ask, connect
from vllm_eagle3.soak.workload import Request

FIELDS = {"model": "m", "temperature": 0.0, "max_tokens": 3}
WHOLE = Request(0, "greedy", FIELDS | {"prompt": [5, 6], "logprobs": 2})
STREAM = Request(0, "streamed", FIELDS | {"prompt": [5, 6]}, stream=True)
CHAT = Request(
    0,
    "chat",
    FIELDS | {"messages": [{"role": "user", "content": "hi"}]},
    chat=True,
    stream=True,
)
USAGE = {"prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5}


def piece(*ids: int, text: str = "", **fields: Any) -> dict[str, Any]:
    return {"index": 0, "text": text, "token_ids": ids, "finish_reason": None} | fields


def chunk(*pieces: dict[str, Any], **fields: Any) -> dict[str, Any]:
    common = {"id": "x", "object": "text_completion", "created": 1, "model": "m"}
    return common | {"choices": list(pieces)} | fields


class Broken(httpx.AsyncByteStream):
    """A stream that ends without its end."""

    async def __aiter__(self) -> AsyncIterator[bytes]:
        yield f"data: {json.dumps(chunk(piece(8, text='a')))}\n\n".encode()
        raise httpx.RemoteProtocolError("peer closed connection")


def events(*chunks: dict[str, Any]) -> httpx.Response:
    lines = [f"data: {json.dumps(each)}\n\n" for each in chunks]
    text = "".join(lines) + "data: [DONE]\n\n"
    return httpx.Response(200, text=text, headers={"content-type": "text/event-stream"})


def asked(request: Request, reply: httpx.Response) -> tuple[Answer, dict[str, Any]]:
    """The answer to a request that meets this reply, and the body that was sent."""
    bodies: list[dict[str, Any]] = []

    def serve(sent: httpx.Request) -> httpx.Response:
        bodies.append(json.loads(sent.content))
        return reply

    async def once() -> Answer:
        http = httpx.AsyncClient(transport=httpx.MockTransport(serve))
        url = "http://127.0.0.1:1/v1"
        async with AsyncOpenAI(
            base_url=url, api_key="none", max_retries=0, http_client=http
        ) as client:
            return await ask(client, request)

    return asyncio.run(once()), bodies[0]


def test_whole_reply_with_log_probabilities_by_id() -> None:
    logprobs = {
        "tokens": ["token_id:8"],
        "token_logprobs": [-0.1],
        "top_logprobs": [{"token_id:8": -0.1, "token_id:9": -2.0}],
        "text_offset": [0],
    }
    given = piece(8, text="a", logprobs=logprobs, finish_reason="stop", stop_reason=8)
    answer, body = asked(WHOLE, httpx.Response(200, json=chunk(given, usage=USAGE)))
    choice = answer.choices[0]
    assert (choice.text, choice.token_ids, choice.stop_reason) == ("a", [8], 8)
    assert choice.top_logprobs == [{8: -0.1, 9: -2.0}]
    assert answer.completion_tokens == 3 and answer.status is None
    assert body == WHOLE.fields | {
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
    }


def test_streams_are_joined() -> None:
    pieces = [chunk(piece(8, text="a")), chunk(piece(9, 10, finish_reason="length"))]
    answer, body = asked(STREAM, events(*pieces, chunk(usage=USAGE)))
    choice = answer.choices[0]
    assert (choice.text, choice.token_ids) == ("a", [8, 9, 10])
    assert choice.finish_reason == "length" and answer.completion_tokens == 3
    assert body["stream"] and body["stream_options"] == {"include_usage": True}


def test_chat_streams_are_joined() -> None:
    deltas = [{"role": "assistant", "content": ""}, {"content": "a"}, {"content": "b"}]
    pieces = [
        chunk({"index": 0, "delta": delta, "finish_reason": None, "token_ids": [n]})
        for n, delta in enumerate(deltas)
    ]
    del pieces[0]["choices"][0]["token_ids"]
    answer, _ = asked(CHAT, events(*pieces))
    assert (answer.choices[0].text, answer.choices[0].token_ids) == ("ab", [1, 2])


def test_a_client_that_leaves_keeps_what_it_has() -> None:
    leaving = Request(0, "dropped", STREAM.fields, stream=True, drop_after=1)
    pieces = [chunk(piece(8)), chunk(piece(9))]
    answer, _ = asked(leaving, events(*pieces))
    assert answer.choices[0].token_ids == [8]
    assert answer.status is None and answer.completion_tokens is None


@pytest.mark.parametrize(
    ("reply", "status", "error"),
    [
        (httpx.Response(400, json={"error": {"message": "too long"}}), 400, "too long"),
        (events({"error": {"message": "engine died"}}), 0, "engine died"),
        (
            httpx.Response(
                200, stream=Broken(), headers={"content-type": "text/event-stream"}
            ),
            0,
            "Connection error",
        ),
    ],
    ids=["refused", "error in a stream", "broken stream"],
)
def test_failures_are_answers(reply: httpx.Response, status: int, error: str) -> None:
    answer, _ = asked(STREAM, reply)
    assert answer.status == status and error in answer.error
    if error == "Connection error":
        assert answer.choices[0].token_ids == [8]


def test_no_request_goes_out_on_a_connection_that_the_server_may_be_closing() -> None:
    """vLLM closes idle ones after five seconds, and so does httpx left to itself."""
    served: list[int] = []  # requests of each connection
    reply = json.dumps(chunk(piece(8), usage=USAGE)).encode()
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        served.append(0)
        with suppress(asyncio.IncompleteReadError):  # the client has closed
            while True:
                sent = await reader.readuntil(b"\r\n\r\n")
                [length] = re.findall(rb"content-length: (\d+)", sent.lower())
                await reader.readexactly(int(length))
                served[-1] += 1
                writer.write(b"%scontent-length: %d\r\n\r\n" % (head, len(reply)))
                writer.write(reply)
        writer.close()

    async def ask_again_after_a_rest() -> None:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with server, connect(url) as client:
            for rest in (0.0, 0.0, IDLE_CONNECTION_SECONDS + 0.2):
                await asyncio.sleep(rest)
                assert (await ask(client, WHOLE)).status is None

    asyncio.run(ask_again_after_a_rest())
    assert served == [2, 1] and IDLE_CONNECTION_SECONDS < 5
