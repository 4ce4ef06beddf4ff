"""Endpoints that answer with anything: raw bytes over a socket, one behaviour per reply.

    async with hostile(lambda request: [b"HTTP/1.1 200 OK\\r\\n..."]) as server:
        ask(server.base_url)          # server.requests holds what arrived

A behaviour gets the request and yields the bytes of the reply; between two pieces the server waits
`pause` seconds. Nothing here needs a process of its own.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

Behaviour = Callable[[bytes], Iterable[bytes]]


@dataclass
class HostileServer:
    port: int = 0
    requests: list[bytes] = field(default_factory=list)

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"


@asynccontextmanager
async def hostile(behaviour: Behaviour, *, pause: float = 0.0) -> AsyncIterator[HostileServer]:
    """A server on 127.0.0.1 that answers every request by the behaviour and then hangs up."""
    server = HostileServer()
    handlers: set[asyncio.Task[None]] = set()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        handlers.add(task)
        task.add_done_callback(handlers.discard)
        with suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            head = await reader.readuntil(b"\r\n\r\n")
            length = next(
                (
                    int(line.split(b":")[1])
                    for line in head.split(b"\r\n")
                    if line.lower().startswith(b"content-length:")
                ),
                0,
            )
            request = head + await reader.readexactly(length)
            server.requests.append(request)
            for piece in behaviour(request):
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(pause)
        writer.close()

    listener = await asyncio.start_server(answer, "127.0.0.1", 0)
    server.port = listener.sockets[0].getsockname()[1]
    try:
        yield server
    finally:
        listener.close()
        for task in list(handlers):
            task.cancel()
        await asyncio.gather(*handlers, return_exceptions=True)


def response(body: bytes, *, status: str = "200 OK", headers: str = "") -> bytes:
    head = f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nConnection: close\r\n"
    return f"{head}Content-Length: {len(body)}\r\n{headers}\r\n".encode() + body


def completion(content: Any = "fine", **fields: Any) -> dict[str, Any]:
    return {
        "choices": [{"message": {"content": content}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 7, "completion_tokens": 2},
        **fields,
    }


def reply(content: Any = "fine", **fields: Any) -> bytes:
    return response(json.dumps(completion(content, **fields)).encode())


def with_usage(value: str) -> bytes:
    """A reply whose usage is this JSON, which `json.dumps` might not write."""
    body = json.dumps(completion(usage="HERE")).replace('"HERE"', value)
    return response(body.encode())


DEEP = b"[" * 200_000 + b"]" * 200_000

USAGES: dict[str, str] = {
    "infinite": '{"prompt_tokens": 1e999, "completion_tokens": 1e999}',
    "infinite completion": '{"prompt_tokens": 7, "completion_tokens": 1e999}',
    "not a number": '{"prompt_tokens": 7, "completion_tokens": NaN}',
    "negative": '{"prompt_tokens": -1000000, "completion_tokens": -5}',
    "negative cached": '{"prompt_tokens": 7, "prompt_tokens_details": {"cached_tokens": -9}}',
    "a list": '{"prompt_tokens": [7], "completion_tokens": [2]}',
    "list of completion": '{"prompt_tokens": 7, "completion_tokens": [2]}',
    "words": '{"prompt_tokens": 7, "completion_tokens": "many"}',
    "4,000 digits": '{"prompt_tokens": %s, "completion_tokens": 2}' % ("9" * 4000),
    "true": '{"prompt_tokens": true, "completion_tokens": true}',
    "cached without end": '{"prompt_tokens": 7, "prompt_tokens_details": {"cached_tokens": 1e999}}',
    "a string": '"many"',
}
"""Usages that no call can have."""

BROKEN: dict[str, bytes] = {
    "deep": response(DEEP),
    "deep content": response(b'{"choices": [{"message": {"content": ' + DEEP + b"}}]}"),
    "10,000 digits": with_usage('{"prompt_tokens": %s}' % ("9" * 10_000)),
    "object as content": reply({"a": 1}),
    "number as content": reply(7),
    "number in a part": reply([{"text": 7}]),
    "string part": reply(["text"]),
    "choices of nonsense": response(b'{"choices": [7]}'),
    "message of nonsense": response(b'{"choices": [{"message": "x"}]}'),
    "garbage status line": b"\x00\xff\xfe nonsense\r\n\r\n",
    "no status": b"HTTP/1.1 \r\n\r\n",
    "status 999": response(b"{}", status="999 Strange"),
    "status -1": response(b"{}", status="-1 Strange"),
    "bad length": b"HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\n{}",
    "bad chunks": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nZZ\r\n{}\r\n",
    "bad gzip": response(b"not gzip", headers="Content-Encoding: gzip\r\n"),
    "not utf-8": response(b'{"choices": "\xff\xfe'),
    "nothing": b"",
    "deep error": response(DEEP, status="500 Error"),
    "error of nonsense": response(
        b'{"error": {"message": {"a": [1]}, "code": [2]}}', status="500 E"
    ),
}
"""Replies without a usable completion: retried until patience runs out, then one line."""
