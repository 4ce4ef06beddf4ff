"""A web server for one file: it knows Range, and fails in the ways a test asks for.

with serving(b"...") as server:
    server.cut_after = [100, 50]      # the first reply ends after 100 bytes, the second after 50
    download(server.url, target)
server.asked                          # the Range header of each request
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class FileServer:
    """What is served, and how."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.url = ""
        self.cut_after: list[int] = []
        """For each of the first replies: bytes of the body before the connection is cut."""
        self.statuses: list[int] = []
        """For each of the first replies: an HTTP status to fail with."""
        self.knows_ranges = True
        self.asked: list[str | None] = []
        """Range header of each request."""

    def reply(self, handler: BaseHTTPRequestHandler) -> None:
        requested = handler.headers.get("Range")
        self.asked.append(requested)
        if self.statuses:
            handler.send_error(self.statuses.pop(0))
            return
        start = int(requested.removeprefix("bytes=").rstrip("-")) if requested else 0
        if not self.knows_ranges:
            requested, start = None, 0
        if start >= len(self.data) and requested:
            handler.send_response(416)
            handler.send_header("Content-Range", f"bytes */{len(self.data)}")
            handler.send_header("Content-Length", "0")
            handler.end_headers()
            return
        handler.send_response(206 if requested else 200)
        if requested:
            last = len(self.data) - 1
            handler.send_header("Content-Range", f"bytes {start}-{last}/{len(self.data)}")
        body = self.data[start:]
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body[: self.cut_after.pop(0)] if self.cut_after else body)
        handler.close_connection = True


@contextmanager
def serving(data: bytes, name: str = "file.json") -> Iterator[FileServer]:
    """A server on a free port of this machine."""
    served = FileServer(data)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            served.reply(self)

        def log_message(self, *args: object) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    served.url = f"http://127.0.0.1:{server.server_port}/{name}"
    try:
        yield served
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
