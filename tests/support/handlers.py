"""Servers of the standard library in a thread of the test, each for one class of handlers.

class Hello(Handler):
    def do_GET(self) -> None:
        self.reply({"hello": self.path})

with listening(Hello) as url: ...
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any


class Handler(BaseHTTPRequestHandler):
    """Says nothing of its requests."""

    def body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def reply(
        self, value: Any, status: int = 200, *, headers: Mapping[str, str] | None = None
    ) -> None:
        """A whole response: bytes as they are, other values as JSON."""
        data = value if isinstance(value, bytes) else json.dumps(value).encode()
        self.send_response(status)
        for name, text in {"Content-Length": str(len(data)), **(headers or {})}.items():
            self.send_header(name, text)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, *values: object) -> None:
        """Quiet."""


@contextmanager
def listening(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """The address of a server on 127.0.0.1."""
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = True
        Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
