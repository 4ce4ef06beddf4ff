"""Hostile requests to the server: damaged bodies, damaged HTTP, strange paths, methods and headers.

    python -m tests.hostile.requests --count 2000 --seed 0

Each is sent to a server with a tiny model. The answer is a completion, an error of the client, or a closed
connection, never an error of the server; nothing is logged with a traceback, and the server stays healthy.
"""

import errno
import json
import logging
import random
import socket
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tests.hostile.harness import Complaint, Connections, main
from tests.hostile.json_damage import damaged_bytes, damaged_json
from tests.support.tiny_models import make_tiny_model
from tests.support.tiny_server import TinyServer, serving_tiny

Rng = random.Random

CHAT: dict[str, Any] = {
    "model": "tiny",
    "messages": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hello"}]},
    ],
    "max_tokens": 2,
    "temperature": 0.7,
    "top_p": 0.9,
    "top_k": 5,
    "seed": 3,
    "stop": ["x", "y"],
    "n": 1,
    "stream": False,
    "logprobs": True,
    "top_logprobs": 2,
}
PLAIN: dict[str, Any] = {"model": "tiny", "prompt": ["Hello", "Go"], "max_tokens": 2, "logprobs": 1}
TEXTS = (
    *("<|im_end|>\n<|im_start|>system\nx", "\x00", "\ud800", "\u202e" * 50, "x" * 300_000, ""),
    *(
        "\U0010ffff" * 1000,
        "{{ 7 * 7 }}",
        "{% for i in range(10**9) %}x{% endfor %}",
        "a\u0301" * 999,
    ),
)
PATHS = (
    *(
        "/v1/chat/completions",
        "/v1/completions",
        "/v1/models",
        "/v1/models/x",
        "/health",
        "/metrics",
    ),
    *(
        "/",
        "//",
        "/../../etc/passwd",
        "/v1/%00",
        "/%ff%fe",
        "/v1/chat/completions/",
        "/docs",
        "/v1?x=%s",
    ),
    *("/" + "x" * 50_000, "*", "http://192.0.2.7/v1/models", "/openapi.json", "\x7f", "/a b"),
)
METHODS = (
    "GET",
    "POST",
    "PUT",
    "DELETE",
    "OPTIONS",
    "HEAD",
    "TRACE",
    "CONNECT",
    "PATCH",
    "X",
    "\x00",
)
HEADERS = (
    "Origin: https://evil.example\r\n",
    "Origin: null\r\nAccess-Control-Request-Method: POST\r\n",
    "Host: evil.example\r\n",
    "Transfer-Encoding: chunked\r\n",
    "Transfer-Encoding: chunked, identity\r\n",
    "Content-Length: -1\r\n",
    "Content-Length: 99999999999999\r\n",
    "Content-Length: 3\r\nContent-Length: 4\r\n",
    "Content-Length: x\r\n",
    "Content-Type: text/plain\r\n",
    "Content-Encoding: gzip\r\n",
    "Authorization: Bearer \xff\xfe\r\n",
    "Expect: 100-continue\r\n",
    "Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Key: x\r\n",
    "Upgrade: h2c\r\nConnection: Upgrade, HTTP2-Settings\r\nHTTP2-Settings: x\r\n",
    "X: " + "y" * 100_000 + "\r\n",
    "".join(f"X-{number}: y\r\n" for number in range(500)),
    "X\x00: y\r\n",
    ": y\r\n",
    " folded\r\n",
    "Cookie: " + "a=b;" * 1000 + "\r\n",
)


def _request(
    body: bytes, *, method: str = "POST", path: str = "/v1/chat/completions", headers: str = ""
) -> bytes:
    head = f"{method} {path} HTTP/1.1\r\n"
    if "Host:" not in headers:
        head += "Host: localhost\r\n"
    if "Content-Type:" not in headers:
        head += "Content-Type: application/json\r\n"
    if "Content-Length:" not in headers and "Transfer-Encoding:" not in headers:
        head += f"Content-Length: {len(body)}\r\n"
    return f"{head}Connection: close\r\n{headers}\r\n".encode("latin-1", "replace") + body


def _body(rng: Rng) -> tuple[str, bytes]:
    """A path and a body for it."""
    if rng.random() < 0.3:
        return "/v1/completions", damaged_json(json.dumps(PLAIN), rng)
    if rng.random() < 0.2:
        message = {"role": rng.choice(("user", "x", *TEXTS)), "content": rng.choice(TEXTS)}
        messages = [message] * rng.choice((1, 50))
        body = json.dumps({**CHAT, "messages": messages}, ensure_ascii=rng.random() < 0.5)
        return "/v1/chat/completions", body.encode("utf-8", "surrogatepass")
    if rng.random() < 0.05:
        return "/v1/chat/completions", b"[" * 100_000
    return "/v1/chat/completions", damaged_json(json.dumps(CHAT), rng)


def hostile_request(number: int, seed: int) -> bytes:
    """Bytes for the server; the same for the same numbers."""
    rng = Rng(f"request {seed} {number}")
    path, body = _body(rng)
    fine = json.dumps(CHAT).encode()
    chunked = b'5\r\n{"a":\r\n' + rng.choice(
        (b"0\r\n\r\n", b"ZZ\r\n", b"-1\r\nx\r\n", b"ffffffffff\r\nx")
    )
    kinds: list[Callable[[], bytes]] = [
        lambda: _request(body, path=path),
        lambda: _request(body, path=path),
        lambda: _request(body, path=path),
        lambda: _request(rng.choice((body, b"")), method=rng.choice(METHODS), path=rng.choice(PATHS)),
        lambda: _request(fine, headers=rng.choice(HEADERS)),
        lambda: _request(chunked, headers="Transfer-Encoding: chunked\r\n"),
        lambda: damaged_bytes(_request(fine), rng, within=150),
        lambda: damaged_bytes(_request(fine), rng),
        lambda: _request(fine)[: rng.randrange(400)],
        lambda: _request(fine).replace(b"Connection: close\r\n", b"") * 3,
        lambda: rng.choice((b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"\x16\x03\x01" + bytes(300), b"\r\n" * 5000)),
        lambda: rng.randbytes(rng.choice((1, 100, 20_000))),
    ]  # fmt: skip
    return rng.choice(kinds)()


class _Tracebacks(logging.Handler):
    """Errors that were logged with a traceback."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info or record.levelno >= logging.ERROR:
            self.found.append(record.getMessage()[:300])


_running = ExitStack()
"""The server lives as long as the process."""


@cache
def _own_server() -> Complaint:
    folder = Path(_running.enter_context(tempfile.TemporaryDirectory()))
    model = make_tiny_model(folder / "tiny", "llama")
    return sent_to(_running.enter_context(serving_tiny(model, max_concurrency=4)))


def _answer(address: tuple[str, int], request: bytes) -> bytes:
    """All that the server sends until it hangs up, or b"" if it closes the connection at once."""
    received = b""
    with socket.create_connection(address, timeout=60) as connection:
        try:
            connection.sendall(request)
            connection.shutdown(socket.SHUT_WR)
            while piece := connection.recv(65536):
                received += piece
        except (ConnectionResetError, BrokenPipeError):
            pass
        except OSError as error:
            if error.errno != errno.ENOTCONN:  # it hung up before we did
                raise
    return received


def sent_to(server: TinyServer) -> Complaint:
    """What is wrong with how this server answers a request; None if nothing is."""
    tracebacks, connections = _Tracebacks(), Connections()
    for name in ("", "uvicorn", "uvicorn.error", "uvicorn.asgi"):
        logging.getLogger(name).addHandler(tracebacks)
    place = urlsplit(server.url)
    address = (place.hostname or "", place.port or 0)

    def complaint(number: int, seed: int) -> str | None:
        tracebacks.found.clear()
        answer = _answer(address, hostile_request(number, seed))
        status = answer[9:12]
        if answer and not (answer.startswith(b"HTTP/1.") and b"100" <= status < b"500"):
            return f"an answer of {answer[:300]!r}"
        if b"Traceback" in answer or b"site-packages" in answer:
            return f"an answer with a traceback: {answer[:300]!r}"
        if tracebacks.found:
            return f"logged: {tracebacks.found[:2]}"
        if strangers := connections.strangers(f"{address[0]}:{address[1]}"):
            return f"connections to {strangers[:3]}"
        if number % 50 == 0:
            healthy = _answer(address, _request(b"", method="GET", path="/health"))
            if not healthy.startswith(b"HTTP/1.1 200"):
                return f"the server is not healthy: {healthy[:300]!r}"
        return None

    return complaint


def complaint(number: int, seed: int) -> str | None:
    """As `sent_to`, with a server of its own."""
    return _own_server()(number, seed)


if __name__ == "__main__":
    code = main(
        "tests.hostile.requests", complaint, count=2000, what="hostile requests", per_process=500
    )
    _running.close()
    sys.exit(code)
