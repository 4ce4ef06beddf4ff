"""What all servers share: an application behind the guard, streams of events, clients that leave, errors; and the
process: listen, drain on a signal, shut down.
"""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import socket
import sys
import threading
import time
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Generator,
    Iterator,
    Sequence,
)
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, asynccontextmanager, contextmanager, nullcontext
from types import FrameType
from typing import Any, Protocol, TypeVar, get_type_hints

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send

from memagent._version import __version__
from memagent.config import ServeConfig
from memagent.engines.base import BaseEngine
from memagent.errors import MemagentError
from memagent.serve.guard import (
    CLIENT_GONE,
    JSON_TYPE,
    AdmissionGate,
    CheckKey,
    Guard,
    Metrics,
    OnRequest,
    Route,
    engine_ended,
    shutting_down,
)
from memagent.serve.listen import BACKLOG, CLOSE_SECONDS, bound, port_errors, server_config, url_of
from memagent.serve.wire import (
    INTERNAL,
    MEANINGS,
    ApiError,
    ErrorBody,
    WireModel,
    from_memagent,
    parse,
)

T = TypeVar("T")
W = TypeVar("W", bound=WireModel)
Json = dict[str, Any]
DESCRIBED: dict[int | str, Json] = {
    status: {"model": ErrorBody, "description": text} for status, text in MEANINGS.items()
}
"""The errors of all routes, as the description of the API has them."""
STREAMED: Json = {"responses": {"200": {"content": {"text/event-stream": {}}}}}
"""What the description adds for a route that streams where it is asked to."""
MODELS = "/v1/models"
END_OF_EVENTS = "data: [DONE]\n\n"
QUICK_BYTES = 20_000
"""Bodies up to this size are parsed at once; larger ones in a thread."""
log = logging.getLogger(__name__)


def web_app(
    routes: Sequence[Route],
    config: ServeConfig,
    check_key: CheckKey,
    *,
    gate: AdmissionGate,
    metrics: Metrics,
    on_request: OnRequest | None = None,
) -> FastAPI:
    """The ASGI application of some routes behind the guard, with errors in OpenAI's format."""
    title = "memagent"
    app = FastAPI(title=title, version=__version__, docs_url=None, redoc_url=None, openapi_url=None)
    app.router.route_class = _Route
    for route in routes:
        app.add_api_route(
            route.path,
            route.handler,
            methods=[route.method],
            response_model=None,
            responses=DESCRIBED,
            openapi_extra=route.more,
        )
    for kind in (ApiError, MemagentError, HTTPException, ClientDisconnect, Exception):
        app.add_exception_handler(kind, _error_response)
    app.add_middleware(
        Guard,
        routes=routes,
        config=config,
        check_key=check_key,
        gate=gate,
        metrics=metrics,
        on_request=on_request,
    )
    return app


class _Route(APIRoute):
    """A route whose body is parsed by `parsed`; FastAPI only describes it."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        kind = get_type_hints(self.endpoint).get("body")

        async def handle(request: Request) -> Response:
            body = {} if kind is None else {"body": await parsed(kind, request)}
            response: Response = await self.endpoint(request, **request.path_params, **body)
            return response

        return handle


async def parsed(kind: type[W], request: Request) -> W:
    """The body of a request, parsed without holding up others. Raises ApiError."""
    body = b"".join([piece async for piece in request.stream()])  # which keeps no copy
    if len(body) <= QUICK_BYTES:
        return parse(kind, body)
    return await asyncio.to_thread(parse, kind, body)


def health_routes(
    gate: AdmissionGate, metrics: Metrics, engine: BaseEngine, *, metrics_need_key: bool
) -> list[Route]:
    """/health and /metrics."""

    async def health(request: Request) -> Response:
        """Whether requests are accepted."""
        if gate.is_draining:
            raise shutting_down()
        if not engine.is_alive:
            raise engine_ended()
        return Response('{"status":"ok"}', media_type=JSON_TYPE)

    async def render(request: Request) -> Response:
        """Prometheus metrics."""
        page, content_type = metrics.render(request.headers.get("accept", ""))
        return Response(page, headers={"Content-Type": content_type})

    return [
        Route("GET", "/health", health, needs_key=False),
        Route("GET", "/metrics", render, needs_key=metrics_need_key),
    ]


def model_routes(names: Sequence[str], card: Callable[[str], Json]) -> list[Route]:
    """/v1/models with the cards of some models, and the card of each; `card` raises for others."""

    async def models(request: Request) -> Response:
        """List the models."""
        return JSONResponse({"object": "list", "data": list(map(card, names))})

    async def model(request: Request, name: str) -> Response:
        """Show a model."""
        return JSONResponse(card(name))

    return [Route("GET", MODELS, models), Route("GET", f"{MODELS}/{{name:path}}", model)]


# --- streams --------------------------------------------------------------------------------------


class EventStream(StreamingResponse):
    """Server-sent events whose source is closed whenever the response ends."""

    def __init__(self, events: AsyncGenerator[str, None]) -> None:
        super().__init__(
            events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"}
        )
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._events):
            await super().__call__(scope, receive, send)


def event(chunk: Json, name: str | None = None) -> str:
    """One server-sent event."""
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {json.dumps(chunk, separators=(',', ':'))}\n\n"


def error_event(error: ApiError) -> str:
    """An error as the last event of a stream."""
    return event(error.body())


async def with_error_event(
    events: AsyncGenerator[str, None], write: Callable[[ApiError], str] = error_event
) -> AsyncGenerator[str, None]:
    """Turn a failure into the last event: the status has already been sent."""
    async with aclosing(events):
        try:
            async for one in events:
                yield one
        except ApiError as error:
            yield write(error)
        except MemagentError as error:
            yield write(from_memagent(error))
        except Exception:
            log.exception("a stream failed")
            yield write(INTERNAL)


async def unless_disconnected(request: Request, work: Awaitable[T]) -> T | None:
    """The result of `work`; None if the client disconnects first, which cancels it."""
    task = asyncio.ensure_future(work)
    disconnect = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait((task, disconnect), return_when=asyncio.FIRST_COMPLETED)
        return await task if task.done() else None
    finally:
        task.cancel()
        disconnect.cancel()
        await asyncio.gather(task, disconnect, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


# --- errors ---------------------------------------------------------------------------------------


async def _error_response(request: Request, error: Exception) -> Response:
    if isinstance(error, ClientDisconnect):
        return Response(status_code=CLIENT_GONE)
    if isinstance(error, HTTPException):  # raised by the framework: no such path or method
        error = ApiError(error.status_code, f"{request.method} {request.url.path}: {error.detail}")
    elif isinstance(error, MemagentError):
        error = from_memagent(error)
    elif not isinstance(error, ApiError):  # the framework raises it again: the traceback is logged
        error = INTERNAL
    return error.response()


# --- the process ------------------------------------------------------------------------------------

#     SIGTERM or Ctrl-C ─▶ new requests get 503, running ones finish ─▶ shut down
#                          a second signal, or after drain_seconds ──▶ running ones get an error, shut down
#
# `serving` runs it in a thread, for notebooks and tests; `serving_here` in the event loop of the caller.


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
