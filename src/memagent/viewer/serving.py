"""The process of the viewer: it listens on this machine only, until Ctrl-C.

with viewing(ViewerApi(open_library(["runs"]))) as url:
    print(url)
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

import uvicorn

from memagent.serve.listen import BACKLOG, bound, port_errors, server_config, url_of
from memagent.viewer.api import ViewerApi
from memagent.viewer.app import make_viewer_app

HOST = "127.0.0.1"


class ViewerServer(uvicorn.Server):
    """uvicorn that ends quietly: Ctrl-C is how a viewer is closed."""

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.should_exit = True


def view(
    api: ViewerApi, *, port: int = 0, on_ready: Callable[[str], None] = lambda url: None
) -> None:
    """Serve until a signal shuts the process down. `on_ready` gets the address."""
    with bound(HOST, port) as listener:
        with port_errors(HOST, port):
            listener.listen(BACKLOG)
        on_ready(url_of(HOST, listener))
        ViewerServer(server_config(make_viewer_app(api, HOST))).run(sockets=[listener])


@contextmanager
def viewing(api: ViewerApi, *, port: int = 0) -> Iterator[str]:
    """Serve in a thread while the block runs; yields the address."""
    with bound(HOST, port) as listener:
        listener.listen(BACKLOG)
        server = ViewerServer(server_config(make_viewer_app(api, HOST)))
        thread = threading.Thread(target=server.run, args=([listener],), name="memagent-view")
        thread.start()
        try:
            yield url_of(HOST, listener)
        finally:
            server.should_exit = True
            thread.join()
