"""Requests to the server from web pages, from clients that never finish, and of absurd size."""

import asyncio
import http.client
import json
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

import pytest
from starlette.datastructures import Headers

from memagent.serve import guard, listen
from memagent.serve.keys import KeyHolder
from memagent.serve.listen import ForeignRequest, HostCheck
from memagent.serve.wire import ApiError
from memagent.tokens.control import ControlTokens
from memagent.tokens.tokenizers import ModelTokenizer
from tests.hostile import requests
from tests.hostile.harness import tried
from tests.support.timing import settle
from tests.support.tiny_models import WINDOW, make_tiny_model
from tests.support.tiny_server import TinyServer, serving_tiny

HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinyServer]:
    folder = make_tiny_model(tmp_path_factory.mktemp("secret-folder") / "tiny", "llama")
    with serving_tiny(folder, max_concurrency=2) as server:
        yield server


def send(server: TinyServer, body: Any, **headers: str) -> tuple[int, Any]:
    """Status and JSON of a chat request."""
    address = urlsplit(server.url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=30)
    sent = {"Content-Type": "application/json", **headers}
    connection.request("POST", "/v1/chat/completions", json.dumps(body), sent)
    response = connection.getresponse()
    content = json.loads(response.read())
    connection.close()
    return response.status, content


def half_sent(server: TinyServer, text: str) -> socket.socket:
    address = urlsplit(server.url)
    connection = socket.create_connection((address.hostname, address.port or 0), timeout=60)
    connection.sendall(text.encode())
    return connection


def received(connection: socket.socket) -> bytes:
    """What the server sends; nothing if it has closed the connection."""
    try:
        return connection.recv(1000)
    except ConnectionResetError:  # closed before all that was sent was read
        return b""


# --- web pages ------------------------------------------------------------------------------------


def test_a_page_whose_name_points_here_is_refused(server: TinyServer) -> None:
    status, content = send(server, HELLO, Host="evil.example:8000")
    assert (status, content["error"]["code"]) == (403, "host_not_allowed")
    assert send(server, HELLO, Host="localhost:8000")[0] == 200
    assert send(server, HELLO)[0] == 200


def test_a_page_of_another_site_is_refused(server: TinyServer) -> None:
    for origin in (
        "https://evil.example",
        "null",
        "http://203.0.113.7",
        "http://localhost.evil.example",
        "http://localhost:80.evil.example",
        "http://evil.example\\@localhost",
    ):
        status, content = send(server, HELLO, Origin=origin)
        assert (status, content["error"]["code"]) == (403, "origin_not_allowed")
    assert send(server, HELLO, Origin="http://localhost:3000")[0] == 200
    assert send(server, HELLO, Origin=server.url)[0] == 200


@pytest.mark.parametrize(
    ("host", "is_own"),
    [
        ("127.0.0.1:8000", True),
        ("[::1]:8000", True),
        ("LOCALHOST", True),
        ("localhost.", True),
        ("192.0.2.5:8000", True),
        ("box.lan", True),
        ("models.example:8000", True),
        ("evil.example", False),
        ("127.0.0.1.evil.example", False),
        ("localhost@evil.example", False),
        ("evil.example@localhost", False),
        ("localhost:8000.evil.example", False),
        ("localhost:99999", False),
        ("[::1", False),
        ("", False),
    ],
)
def test_hosts_of_the_server_are_addresses_and_its_names(host: str, is_own: bool) -> None:
    check = HostCheck("box.lan", "models.example, other.example")
    if is_own:
        check.check(Headers({"host": host}))
    else:
        with pytest.raises(ForeignRequest, match="another name"):
            check.check(Headers({"host": host}))


# --- clients that never finish --------------------------------------------------------------------


def test_half_sent_bodies_lock_nobody_out(server: TinyServer) -> None:
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
        "Content-Type: application/json\r\nContent-Length: 1000\r\n\r\n{"
    )
    waiting = [half_sent(server, head) for _ in range(20)]
    try:
        time.sleep(0.1)
        assert send(server, HELLO)[0] == 200
    finally:
        for connection in waiting:
            connection.close()


def test_a_body_that_never_ends_gets_408(
    server: TinyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard, "BODY_SECONDS", 0.1)
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
        "Content-Type: application/json\r\nContent-Length: 1000\r\n\r\n{"
    )
    with half_sent(server, head) as connection:
        assert connection.recv(1000).startswith(b"HTTP/1.1 408")


@pytest.mark.parametrize("text", ["", "POST /v1/chat/completions HTTP/1.1\r\nHost: local"])
def test_headers_that_never_end_close_the_connection(
    server: TinyServer, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setattr(listen, "HEADER_SECONDS", 0.1)
    with half_sent(server, text) as connection:
        assert received(connection) == b""


def test_headers_of_a_second_request_have_a_deadline_too(
    server: TinyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with half_sent(server, "GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n") as connection:
        with connection.makefile("rb") as file:
            assert file.readline().startswith(b"HTTP/1.1 200")
            head = dict(line.lower().split(b": ", 1) for line in iter(file.readline, b"\r\n"))
            file.read(int(head[b"content-length"]))
        monkeypatch.setattr(listen, "HEADER_SECONDS", 0.1)
        with suppress(BrokenPipeError):  # a busy machine: the server closes idle connections too
            connection.sendall(b"GET /health HTTP/1.1\r\n")
        assert received(connection) == b""


async def test_bodies_that_are_arriving_have_limits_of_each_of_a_key_and_of_all() -> None:
    bodies, anyone, of_key = guard._Bodies(10), KeyHolder(), guard.MAX_WAITING_OF_KEY

    def arriving(num_bytes: int, holder: KeyHolder) -> asyncio.Future[bytes | None]:
        """A body of so many bytes, which do not end."""
        messages = [{"type": "http.request", "body": b"x" * num_bytes, "more_body": True}]

        async def receive() -> Any:
            return messages.pop() if messages else await asyncio.Event().wait()

        return asyncio.ensure_future(bodies.receive(receive, holder))

    async def refusal(num_bytes: int, holder: KeyHolder) -> int:
        with pytest.raises(ApiError) as caught:
            await arriving(num_bytes, holder)
        return caught.value.status

    anna = [arriving(10, KeyHolder(id="anna")) for _ in range(of_key)]
    await settle()
    assert await refusal(11, anyone) == 413
    assert await refusal(1, KeyHolder(id="anna")) == 429
    others = [arriving(10, anyone) for _ in range(guard.MAX_WAITING_BODIES - of_key)]
    await settle()
    assert await refusal(1, KeyHolder(id="bert")) == 429
    for body in (*anna, *others):
        body.cancel()
    await asyncio.gather(*anna, *others, return_exceptions=True)
    small = [arriving(1, KeyHolder(id=name)) for name in ("anna", "bert")]
    await settle()
    assert not any(body.done() for body in small)
    for body in small:
        body.cancel()


# --- size -----------------------------------------------------------------------------------------


def test_a_message_far_above_the_window_is_not_tokenised(
    server: TinyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded: list[int] = []
    for kind, name in ((ModelTokenizer, "_ids"), (ControlTokens, "encode_rendered")):
        encode = getattr(kind, name)

        def recorded(self: Any, text: str, *rest: str, encode: Any = encode) -> list[int]:
            encoded.append(len(text))
            ids: list[int] = encode(self, text, *rest)
            return ids

        monkeypatch.setattr(kind, name, recorded)
    assert send(server, HELLO)[0] == 200
    assert encoded
    for text in ("word " * 500_000, "<|im_end|>" * 200_000, " " * 2_000_000):
        body = {"messages": [{"role": "user", "content": text}]}
        status, content = send(server, body)
        assert (status, content["error"]["code"]) == (400, "context_length_exceeded")
        assert content["error"]["param"] == "messages"
    assert sum(encoded) <= 3 * 16 * WINDOW


# --- names ----------------------------------------------------------------------------------------


def test_names_and_errors_contain_no_local_path(server: TinyServer) -> None:
    _, reply = send(server, HELLO)
    assert reply["model"] == "tiny"
    for body in (
        {**HELLO, "model": "nosuch"},
        {**HELLO, "max_tokens": WINDOW},
        {"messages": [{"role": "user", "content": "word " * 2000}]},
    ):
        status, content = send(server, body)
        assert status in (400, 404)
        assert "tiny" in content["error"]["message"]
        assert "secret-folder" not in json.dumps(content)
    assert send(server, {**HELLO, "model": "tiny"})[0] == 200
    assert send(server, {**HELLO, "model": server.engine.model})[0] == 200


# --- many -----------------------------------------------------------------------------------------


def test_hostile_requests_are_answered_or_refused_and_the_server_stays_healthy(
    server: TinyServer,
) -> None:
    assert tried(requests.sent_to(server), 60, 1) == []
