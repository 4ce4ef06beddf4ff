"""The server process: listen, drain on a signal, shut down.

    SIGTERM or Ctrl-C ─▶ new requests get 503, running ones finish ─▶ shut down
                         a second signal, or after drain_seconds ──▶ shut down immediately

`serving` runs it in a thread, for notebooks and tests.
"""

from __future__ import annotations

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
from memagent.errors import ConfigError
from memagent.serve.app import make_app
from memagent.serve.deadline import deadline_protocol
from memagent.serve.guard import AdmissionGate

BACKLOG = 2048
KEEP_ALIVE_SECONDS = 75
"""Longer than clients keep idle connections, so that none is closed during a request."""
CLOSE_SECONDS = 1
"""Time to close connections after draining."""


def serve(
    engine: LocalEngine, config: ServeConfig, *, on_ready: Callable[[str], None] = lambda url: None
) -> None:
    """Serve until a signal shuts it down. The caller closes the engine."""
    gc.collect()
    gc.freeze()  # models and modules are permanent: scanning them repeatedly costs whole steps
    with _listening(config) as listener:
        on_ready(_url(config.host, listener))
        HttpServer(engine, config).run(sockets=[listener])


@contextmanager
def serving(engine: LocalEngine, config: ServeConfig | None = None) -> Iterator[str]:
    """Serve in a thread while the block runs; yields the base URL, such as http://HOST:PORT."""
    config = config or ServeConfig(port=0)
    with _listening(config) as listener:
        server = HttpServer(engine, config)
        thread = threading.Thread(target=server.run, args=([listener],), name="memagent-serve")
        thread.start()
        try:
            yield _url(config.host, listener)
        finally:
            server.drain()
            thread.join()


class HttpServer(uvicorn.Server):
    """uvicorn that keeps listening while it drains: new clients get an error response."""

    def __init__(self, engine: LocalEngine, config: ServeConfig) -> None:
        self._gate = AdmissionGate(config.max_concurrency)
        self._drain_seconds = config.drain_seconds
        self._drain_until: float | None = None
        super().__init__(
            uvicorn.Config(
                make_app(engine, config, gate=self._gate),
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


@contextmanager
def _listening(config: ServeConfig) -> Iterator[socket.socket]:
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    try:
        listener = socket.create_server((config.host, config.port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {config.host} port {config.port} ({error.strerror or error}); "
            "choose others with `host` and `port`"
        ) from None
    with listener:
        yield listener


def _url(host: str, listener: socket.socket) -> str:
    name = f"[{host}]" if ":" in host else host
    return f"http://{name}:{listener.getsockname()[1]}"
