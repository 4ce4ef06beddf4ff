"""A reading gateway over a scripted engine, in a thread of this process.

with serving_gateway(tmp_path) as gateway:
    gateway.client().chat.completions.create(model="memagent", messages=...)
"""

import asyncio
import json
import socket
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import openai

from memagent.agent.reader import Reader
from memagent.config import GatewayConfig, ServeConfig
from memagent.engines.base import BaseEngine
from memagent.engines.scripted import ScriptedEngine, keyword_reply
from memagent.serve.http import serving
from memagent.serve.reading.app import gateway_app
from memagent.serve.reading.state import DATABASE, GatewayState, state_folder
from memagent.types import Completion, Message, Sampling

MODEL = "memagent"
FACT = "The house was inherited by Anna Bergström in 1874."
QUESTION = "Who inherited the house?"
SMALL: dict[str, Any] = {
    "window": 1024,
    "chunk_tokens": 300,
    "memory_tokens": 128,
    "answer_tokens": 64,
}
"""Reading settings for which a few pages are a long text."""


def readings_of(state: GatewayState) -> list[str]:
    """Ids of the readings that are kept, the newest first."""
    with closing(sqlite3.connect(state.folder / DATABASE)) as database:
        return [row[0] for row in database.execute("SELECT id FROM readings ORDER BY updated DESC")]


_plain = httpx.Client(timeout=60, trust_env=False)


class PatientEngine(ScriptedEngine):
    """The scripted engine with a delay, which counts the calls that run at once and those that were cancelled."""

    def __init__(self, seconds: float = 0.0) -> None:
        super().__init__(keyword_reply)
        self.seconds = seconds
        self.num_running = 0
        self.most_at_once = 0
        self.num_cancelled = 0

    async def complete(self, messages: Sequence[Message], sampling: Sampling) -> Completion:
        self.num_running += 1
        self.most_at_once = max(self.most_at_once, self.num_running)
        try:
            await asyncio.sleep(self.seconds)
            return await super().complete(messages, sampling)
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        finally:
            self.num_running -= 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Gateway:
    """A gateway that is running."""

    url: str
    engine: BaseEngine
    state: GatewayState

    @property
    def base_url(self) -> str:
        return f"{self.url}/v1"

    def client(self, key: str = "none", **options: Any) -> openai.OpenAI:
        return openai.OpenAI(base_url=self.base_url, api_key=key, max_retries=0, **options)

    def send(self, method: str, path: str, **options: Any) -> httpx.Response:
        """A plain request."""
        return _plain.request(method, self.url + path, **options)


@contextmanager
def serving_gateway(
    folder: Path,
    engine: BaseEngine | None = None,
    *,
    reading: dict[str, Any] | None = None,
    server: dict[str, Any] | None = None,
    **settings: Any,
) -> Iterator[Gateway]:
    """Serve a gateway with its state in `folder` while the block runs."""
    engine = engine or PatientEngine()
    config = GatewayConfig.parse({"state_dir": str(folder), **settings})
    serve = ServeConfig.parse({"port": 0, "drain_seconds": 0.1, **(server or {})})
    with GatewayState(state_folder(config)) as state:
        reader = Reader(engine, **(SMALL if reading is None else reading))
        make = partial(gateway_app, engine, reader, state, config, serve)
        with serving(make, serve) as url:
            yield Gateway(url=url, engine=engine, state=state)


def novel(num_lines: int = 200, *, fact: str = FACT) -> str:
    """A text that tells the fact in its middle. Novels of different lengths have no line in common."""
    lines = [f"Line {n} of the {num_lines} lines tells of rain and wind." for n in range(num_lines)]
    return "\n\n".join([*lines[: num_lines // 2], fact, *lines[num_lines // 2 :]])


def asking(text: str | None = None, question: str = QUESTION) -> list[Any]:
    """Messages with a text and a question about it."""
    return [
        {"role": "user", "content": novel() if text is None else text},
        {"role": "user", "content": question},
    ]


def prompts_of(gateway: Gateway) -> list[list[Message]]:
    """Every prompt that the engine was given."""
    assert isinstance(gateway.engine, ScriptedEngine)
    return gateway.engine.prompts


def connected(gateway: Gateway) -> socket.socket:
    place = urlsplit(gateway.url)
    return socket.create_connection((place.hostname or "", place.port or 0), timeout=60)


def chat_request(messages: Any, key: str = "none", **fields: Any) -> bytes:
    """The bytes of a chat request."""
    body = json.dumps({"model": MODEL, "messages": messages, **fields}).encode()
    return head_of("/v1/chat/completions", key, len(body)) + body


def head_of(path: str, key: str, length: int, *, kind: str = "application/json") -> bytes:
    """The head of a POST request."""
    return (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {key}\r\n"
        f"Content-Type: {kind}\r\nContent-Length: {length}\r\n\r\n"
    ).encode()
