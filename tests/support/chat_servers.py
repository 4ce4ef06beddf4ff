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
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock, Thread
from typing import Any

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
    port: int = 0
    chats: list[Json] = field(default_factory=list)
    others: list[str] = field(default_factory=list)
    """Method and path of all other requests."""
    lock: Lock = field(default_factory=Lock)

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"


@contextmanager
def chat_server(
    chat: Chat, paths: Mapping[str, Any] | None = None, *, model: str = "test-model"
) -> Iterator[ChatServer]:
    """A server on 127.0.0.1 that serves one model."""
    models = {"/v1/models": {"data": [{"id": model, "object": "model"}]}}
    server = ChatServer(chat, {**models, **(paths or {})})

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._page("GET")

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            if self.path != "/v1/chat/completions":
                self._page("POST")
                return
            with server.lock:  # replies may depend on those before
                server.chats.append(body)
                reply = server.chat(body)
            self._send(200, reply)

        def _page(self, method: str) -> None:
            server.others.append(f"{method} {self.path}")
            page = server.paths.get(self.path)
            page = page(server) if callable(page) else page
            self._send(404, {"error": "not found"}) if page is None else self._send(200, page)

        def _send(self, status: int, value: Json) -> None:
            data = json.dumps(value).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: object) -> None:
            """Quiet."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listener:
        server.port = listener.server_address[1]
        Thread(target=listener.serve_forever, args=(0.01,), daemon=True).start()
        try:
            yield server
        finally:
            listener.shutdown()
