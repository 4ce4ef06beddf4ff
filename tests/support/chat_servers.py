"""Chat endpoints in a thread of the test that answer as one function says, and keep what they were asked.

    with chat_server(lambda request: said("fine", prompt_tokens=1000)) as server:
        ask(server.base_url)
    assert len(server.chats) == 1

`paths` are further pages by their path, each a JSON value or a function of the server: what servers tell of
themselves beside OpenAI's API.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Lock
from typing import Any

from tests.support.handlers import Handler, listening

Json = dict[str, Any]
Chat = Callable[[Json], Json]
"""The reply to a request, both as JSON."""


def said(
    text: str | None,
    *,
    finish_reason: str = "stop",
    prompt_tokens: int = 1000,
    completion_tokens: int = 50,
    refusal: str | None = None,
    **fields: Any,
) -> Json:
    """A reply, with its usage."""
    message = {"role": "assistant", "content": text, "refusal": refusal}
    usage = {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens}
    choice = {"index": 0, "message": message, "finish_reason": finish_reason}
    return {"choices": [choice], "usage": usage, "model": "test-model", **fields}


def prompt_of(request: Json) -> str:
    """All that a request says to the model."""
    return "\n".join(message["content"] for message in request["messages"])


def each_second(chat: Chat) -> Chat:
    """Answers a prompt with nothing the first time, the third time and so on."""
    asked: dict[str, int] = {}

    def reply(request: Json) -> Json:
        prompt = prompt_of(request)
        asked[prompt] = asked.get(prompt, 0) + 1
        return said("", completion_tokens=50) if asked[prompt] % 2 else chat(request)

    return reply


@dataclass
class ChatServer:
    """What the server was asked."""

    chat: Chat
    paths: Mapping[str, Any]
    url: str = ""
    chats: list[Json] = field(default_factory=list)
    others: list[str] = field(default_factory=list)
    """Method and path of all other requests."""
    lock: Lock = field(default_factory=Lock)

    @property
    def base_url(self) -> str:
        return f"{self.url}/v1"


@contextmanager
def chat_server(
    chat: Chat, paths: Mapping[str, Any] | None = None, *, model: str = "test-model"
) -> Iterator[ChatServer]:
    """A server on 127.0.0.1 that serves one model."""
    models = {"/v1/models": {"data": [{"id": model, "object": "model"}]}}
    server = ChatServer(chat, {**models, **(paths or {})})

    class Chatting(Handler):
        def do_GET(self) -> None:
            server.others.append(f"{self.command} {self.path}")
            page = server.paths.get(self.path)
            page = page(server) if callable(page) else page
            self.reply({"error": "not found"}, 404) if page is None else self.reply(page)

        def do_POST(self) -> None:
            body = json.loads(self.body())
            if self.path != "/v1/chat/completions":
                self.do_GET()
                return
            with server.lock:  # replies may depend on those before
                server.chats.append(body)
                reply = server.chat(body)
            self.reply(reply)

    with listening(Chatting) as server.url:
        yield server
