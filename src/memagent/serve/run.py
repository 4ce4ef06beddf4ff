"""The server process: listen, drain on a signal, shut down.

    SIGTERM or Ctrl-C ─▶ new requests get 503, running ones finish ─▶ shut down
                         a second signal, or after drain_seconds ──▶ running ones get an error, shut down

`serving` runs it in a thread, for notebooks and tests.
"""

from __future__ import annotations

import asyncio
import gc
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

import uvicorn

from memagent.config import ServeConfig
from memagent.engines.local.engine import LocalEngine
from memagent.serve.app import make_app
from memagent.serve.guard import AdmissionGate
from memagent.serve.request_log import OnRequest
from memagent.web.deadline import deadline_protocol
from memagent.web.listening import bound, port_errors, url_of

BACKLOG = 2048
KEEP_ALIVE_SECONDS = 75
"""Longer than clients keep idle connections, so that none is closed during a request."""
CLOSE_SECONDS = 1
"""Time to close connections after draining."""


def serve(
    engine: LocalEngine,
    config: ServeConfig,
    listener: socket.socket,
    *,
    on_ready: Callable[[str], None] = lambda url: None,
    on_request: OnRequest | None = None,
    on_drain: Callable[[int], None] | None = None,
) -> None:
    """Serve on a socket of `bound` until a signal shuts it down. The caller closes engine and socket.

    `on_drain` gets the number of requests that a shutdown waits for, if there are any.
    """
    gc.collect()
    gc.freeze()  # models and modules are permanent: scanning them repeatedly costs whole steps
    with port_errors(
        config.host, config.port
    ):  # another process may have bound the port at the same time
        listener.listen(BACKLOG)
    on_ready(url_of(config.host, listener))
    HttpServer(engine, config, on_request=on_request, on_drain=on_drain).run(sockets=[listener])


@contextmanager
def serving(
    engine: LocalEngine, config: ServeConfig | None = None, *, on_request: OnRequest | None = None
) -> Iterator[str]:
    """Serve in a thread while the block runs; yields the base URL, such as http://HOST:PORT."""
    config = config or ServeConfig(port=0)
    with bound(config.host, config.port) as listener:
        listener.listen(BACKLOG)
        server = HttpServer(engine, config, on_request=on_request)
        thread = threading.Thread(target=server.run, args=([listener],), name="memagent-serve")
        thread.start()
        try:
            yield url_of(config.host, listener)
        finally:
            server.drain()
            thread.join()


class HttpServer(uvicorn.Server):
    """uvicorn that keeps listening while it drains: new clients get an error response."""

    def __init__(
        self,
        engine: LocalEngine,
        config: ServeConfig,
        *,
        on_request: OnRequest | None = None,
        on_drain: Callable[[int], None] | None = None,
    ) -> None:
        self._on_drain = on_drain
        self._gate = AdmissionGate(config.max_concurrency)
        self._drain_seconds = config.drain_seconds
        self._drain_until: float | None = None
        super().__init__(
            uvicorn.Config(
                make_app(engine, config, gate=self._gate, on_request=on_request),
                log_config=None,
                access_log=False,
                server_header=False,
                http=deadline_protocol(),
                lifespan="off",
                ws="none",
                timeout_keep_alive=KEEP_ALIVE_SECONDS,
                timeout_graceful_shutdown=CLOSE_SECONDS,
            )
        )

    def drain(self) -> None:
        """Refuse new requests, and shut down when running ones finish or time out."""
        self._drain_until = time.monotonic() + self._drain_seconds
        self._gate.is_draining = True
        if self._on_drain is not None and self._gate.num_active:
            self._on_drain(self._gate.num_active)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._drain_until is None:
            self.drain()
        else:
            self.should_exit = self.force_exit = True

    async def on_tick(self, counter: int) -> bool:
        if self._drain_until is not None:
            is_over = time.monotonic() >= self._drain_until
            self.should_exit |= is_over or not self._gate.num_active
        return bool(await super().on_tick(counter))

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        running = list(self.server_state.tasks)  # after the drain: what did not finish in time
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running, timeout=CLOSE_SECONDS)
        await super().shutdown(sockets)
