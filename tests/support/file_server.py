"""A web server for one file: it knows Range, and fails in the ways a test asks for.

with serving(b"...") as server:
    server.cut_after = [100, 50]      # the first reply ends after 100 bytes, the second after 50
    download(server.url, target)
server.asked                          # the Range header of each request
"""

from collections.abc import Iterator
from contextlib import contextmanager

from tests.support.handlers import Handler, listening


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

    def answer(self, handler: Handler) -> None:
        requested = handler.headers.get("Range")
        self.asked.append(requested)
        if self.statuses:
            handler.send_error(self.statuses.pop(0))
            return
        start = int(requested.removeprefix("bytes=").rstrip("-")) if requested else 0
        if not self.knows_ranges:
            requested, start = None, 0
        if start >= len(self.data) and requested:
            handler.reply(b"", 416, headers={"Content-Range": f"bytes */{len(self.data)}"})
            return
        body = self.data[start:]
        headers = {"Content-Length": str(len(body))}
        if requested:
            last = len(self.data) - 1
            headers["Content-Range"] = f"bytes {start}-{last}/{len(self.data)}"
        sent = body[: self.cut_after.pop(0)] if self.cut_after else body
        handler.reply(sent, 206 if requested else 200, headers=headers)
        handler.close_connection = True


@contextmanager
def serving(data: bytes, name: str = "file.json") -> Iterator[FileServer]:
    """A server on a free port of this machine."""
    served = FileServer(data)

    class Serving(Handler):
        def do_GET(self) -> None:
            served.answer(self)

    with listening(Serving) as url:
        served.url = f"{url}/{name}"
        yield served
