"""Hostile replies of an endpoint: damaged JSON, damaged HTTP, redirects, and replies that never end.

    python -m tests.hostile.replies --count 200 --seed 0

Each is the answer to a completion and to a list of models. The engine returns a completion with a usage
that can be, or raises one line; it connects to no address but the one it was given.
"""

import asyncio
import json
import random
import sys
from collections.abc import Callable, Iterable
from functools import cache

from memagent.agent.model_call import Limits, call_model
from memagent.config import EngineConfig
from memagent.engines.openai import EndpointEngine
from memagent.errors import MemagentError
from memagent.tokens.tokenizers import open_tokenizer
from memagent.types import Message, Prices, Sampling
from tests.hostile.endpoints import (
    BROKEN,
    DEEP,
    USAGES,
    completion,
    hostile,
    reply,
    response,
    with_usage,
)
from tests.hostile.harness import Connections, main, wrong_line
from tests.hostile.json_damage import damaged_bytes, damaged_json

Rng = random.Random

MESSAGES: list[Message] = [{"role": "user", "content": "the text of a document"}]
LISTING = {"object": "list", "data": [{"id": "m", "max_model_len": 4096, "owned_by": "vllm"}]}
ELSEWHERE = (
    "http://127.0.0.2:9/v1/chat/completions",
    "https://192.0.2.7/v1",
    "//192.0.2.7/v1",
    "http://evil.example@192.0.2.7/",
    "http://127.0.0.1.nip.invalid/v1",
    "/v1/other",
    "file:///etc/passwd",
    "",
    "http://[::1",
    "\\\\192.0.2.7\\x",
    "x" * 10_000,
)
WAITS = ("nan", "-5", "1e999", "0", "99999999999", "x", "Wed, 21 Oct 2015 07:28:00 GMT", "")
STATUSES = (
    "200 OK",
    "400 Bad",
    "401 No",
    "404 No",
    "429 Slow",
    "500 Error",
    "503 Busy",
    "204 None",
)
HEADERS = (
    "Content-Encoding: gzip\r\n",
    "Content-Encoding: br\r\n",
    "Transfer-Encoding: chunked\r\n",
    "Content-Length: 5\r\n",
    "X: " + "y" * 100_000 + "\r\n",
    "".join(f"X-{number}: y\r\n" for number in range(2000)),
    "Set-Cookie: a=b; Domain=192.0.2.7\r\n",
    "X\x00Y: \xff\r\n",
    " folded\r\n",
)
ENDLESS = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n\r\n"


def hostile_reply(number: int, seed: int) -> Callable[[bytes], Iterable[bytes]]:
    """What the endpoint answers; the same for the same numbers."""
    rng = Rng(f"reply {seed} {number}")
    fine = json.dumps(rng.choice((completion(), LISTING)))
    status = rng.choice(STATUSES)
    kinds: list[Callable[[], list[bytes]]] = [
        lambda: [response(damaged_json(fine, rng), status=rng.choice(("200 OK", status)))],
        lambda: [response(damaged_json(fine, rng))],
        lambda: [damaged_bytes(response(fine.encode()), rng)],
        lambda: [damaged_bytes(response(fine.encode()), rng, within=60)],
        lambda: [response(fine.encode(), headers=rng.choice(HEADERS))],
        lambda: [
            response(
                b"{}",
                status=rng.choice(("301 M", "302 F", "303 S", "307 T", "308 P")),
                headers=f"Location: {rng.choice(ELSEWHERE)}\r\n",
            )
        ],
        lambda: [response(b"{}", status=status, headers=f"Retry-After: {rng.choice(WAITS)}\r\n")],
        lambda: [rng.choice(sorted(BROKEN.values()))],
        lambda: [with_usage(rng.choice(sorted(USAGES.values())))],
        lambda: [response(DEEP, status=status)],
        lambda: [ENDLESS, *[b" "] * 1000],
        lambda: [ENDLESS, b'{"choices": "', *[b"x" * 65536] * 200],
        lambda: [piece.to_bytes(1, "little") for piece in reply()],
        lambda: [rng.randbytes(rng.choice((1, 100, 5000)))],
        lambda: [reply("\x00\ud83d\x1b[2J\u202e" * rng.choice((1, 5000)))],
    ]
    pieces = rng.choice(kinds)()
    return lambda request: pieces


@cache
def _connections() -> Connections:
    return Connections()


def complaint(number: int, seed: int) -> str | None:
    """What is wrong with how the engine takes a reply; None if nothing is."""
    return asyncio.run(_complaint(hostile_reply(number, seed)))


async def _complaint(behaviour: Callable[[bytes], Iterable[bytes]]) -> str | None:
    connections = _connections()
    connections.addresses.clear()
    limits = Limits(max_calls=None, max_cost=1.0, prices=Prices(prompt=1.0, completion=1.0))
    async with hostile(behaviour, pause=0.001) as server:
        settings = {"model": "m", "base_url": server.base_url, "patience": 0.3, "timeout": 0.5}
        async with EndpointEngine(EngineConfig.parse(settings)) as engine:
            try:
                await engine.inspect()
                sampling = Sampling(max_tokens=50)
                call = await call_model(engine, open_tokenizer("bytes"), limits, MESSAGES, sampling)
            except MemagentError as error:
                if reason := wrong_line(error):
                    return reason
            else:
                usage = call.usage
                counts = (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens)
                if not all(type(count) is int and 0 <= count <= 10**9 for count in counts):
                    return f"a usage of {counts}"
                call.completion.text.encode()  # no half surrogate pairs
        if limits.cost < 0:
            return f"a cost of {limits.cost}"
        if strangers := connections.strangers(f"127.0.0.1:{server.port}"):
            return f"connections to {strangers[:3]}"
    return None


if __name__ == "__main__":
    sys.exit(main("tests.hostile.replies", complaint, count=200, what="replies of an endpoint"))
