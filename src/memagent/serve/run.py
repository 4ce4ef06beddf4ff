"""The server process: listen, drain on a signal, shut down.

    SIGTERM or Ctrl-C ─▶ new requests get 503, running ones finish ─▶ shut down
                         a second signal, or after drain_seconds ──▶ running ones get an error, shut down

`serving` runs it in a thread, for notebooks and tests; `serving_here` in the event loop of the caller.
"""

from __future__ import annotations

import asyncio
import gc
import socket
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager, nullcontext
from types import FrameType
from typing import Protocol

import uvicorn
from starlette.types import ASGIApp

from memagent.config import ServeConfig
from memagent.serve.guard import AdmissionGate
from memagent.serve.listen import BACKLOG, CLOSE_SECONDS, bound, port_errors, server_config, url_of

SWITCH_SECONDS = 0.0005
"""How long a thread that counts tokens may keep the event loop waiting; Python's default is ten times as long."""
MAX_THREADS = 1
"""Threads that count tokens and cut sections. With two of them short requests waited twice as long under load."""


def prepare_process() -> None:
    """Settings of a process that does nothing but serve."""
    gc.collect()
    gc.freeze()  # models and modules are permanent: scanning them repeatedly costs whole steps
    sys.setswitchinterval(SWITCH_SECONDS)


class MakeApp(Protocol):
    """Makes the application of a server, such as `partial(make_app, engine, config)`."""

    def __call__(self, *, gate: AdmissionGate) -> ASGIApp: ...


def serve(
    make: MakeApp,
    config: ServeConfig,
    listener: socket.socket,
    *,
    on_ready: Callable[[str], None] = lambda url: None,
    on_drain: Callable[[int], None] | None = None,
) -> None:
    """Serve on a socket of `bound` until a signal shuts it down. The caller closes what the app uses.

    `on_drain` gets the number of requests that a shutdown waits for, if there are any.
    """
    prepare_process()
    with port_errors(
        config.host, config.port
    ):  # another process may have bound the port at the same time
        listener.listen(BACKLOG)
    on_ready(url_of(config.host, listener))
    HttpServer(make, config, on_drain=on_drain).run(sockets=[listener])


@contextmanager
def serving(make: MakeApp, config: ServeConfig | None = None) -> Iterator[str]:
    """Serve in a thread while the block runs; yields the base URL, such as http://HOST:PORT."""
    config = config or ServeConfig(port=0)
    with bound(config.host, config.port) as listener:
        listener.listen(BACKLOG)
        server = HttpServer(make, config)
        thread = threading.Thread(target=server.run, args=([listener],), name="memagent-serve")
        thread.start()
        try:
            yield url_of(config.host, listener)
        finally:
            server.drain()
            thread.join()


@asynccontextmanager
async def serving_here(make: MakeApp, config: ServeConfig) -> AsyncIterator[str]:
    """Serve in the running event loop while the block runs; yields the base URL. Signals are left alone."""
    with bound(config.host, config.port) as listener:
        listener.listen(BACKLOG)
        server = HttpServer(make, config, has_signals=False)
        running = asyncio.ensure_future(server.serve(sockets=[listener]))
        try:
            yield url_of(config.host, listener)
        finally:
            server.drain()
            await running


class HttpServer(uvicorn.Server):
    """uvicorn that keeps listening while it drains: new clients get an error response."""

    def __init__(
        self,
        make: MakeApp,
        config: ServeConfig,
        *,
        on_drain: Callable[[int], None] | None = None,
        has_signals: bool = True,
    ) -> None:
        """Without `has_signals`, signals of the process do not shut it down."""
        self._on_drain = on_drain
        self._has_signals = has_signals
        self._gate = AdmissionGate(config.max_concurrency)
        self._drain_seconds = config.drain_seconds
        self._drain_until: float | None = None
        super().__init__(server_config(make(gate=self._gate)))

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        if self._has_signals:  # the loop is our own
            threads = ThreadPoolExecutor(MAX_THREADS, "memagent-serve")
            asyncio.get_running_loop().set_default_executor(threads)
        await super().serve(sockets)

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        with super().capture_signals() if self._has_signals else nullcontext():
            yield

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
