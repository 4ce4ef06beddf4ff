"""What all servers share: an application behind the guard, streams of events, clients that leave, errors."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

from fastapi import FastAPI, Request, Response
from fastapi.responses import StreamingResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from memagent.engines.base import BaseEngine
from memagent.errors import MemagentError
from memagent.serve.errors import INTERNAL, ApiError, from_memagent
from memagent.serve.guard import (
    CLIENT_GONE,
    AdmissionGate,
    Guard,
    GuardRules,
    engine_ended,
    shutting_down,
)
from memagent.serve.metrics import Metrics
from memagent.serve.wire import WireModel, parse

T = TypeVar("T")
W = TypeVar("W", bound=WireModel)
Json = dict[str, Any]
Endpoint = tuple[str, str, Callable[..., Any]]
"""Path, method and handler."""
END_OF_EVENTS = "data: [DONE]\n\n"
QUICK_BYTES = 20_000
"""Bodies up to this size are parsed at once; larger ones in a thread."""
log = logging.getLogger(__name__)


def guarded_app(endpoints: Sequence[Endpoint], rules: GuardRules) -> FastAPI:
    """The ASGI application of some endpoints, with errors in OpenAI's format."""
    app = FastAPI(title="memagent", docs_url=None, redoc_url=None, openapi_url=None)
    for path, method, handler in endpoints:
        app.add_api_route(path, handler, methods=[method], response_model=None)
    for kind in (ApiError, MemagentError, HTTPException):
        app.add_exception_handler(kind, _error_response)
    app.add_exception_handler(ClientDisconnect, _no_response)
    app.add_exception_handler(Exception, _internal_error_response)
    app.add_middleware(Guard, rules=rules)
    return app


async def parsed(kind: type[W], request: Request) -> W:
    """The body of a request, parsed without holding up others. Raises ApiError."""
    body = b"".join([piece async for piece in request.stream()])  # which keeps no copy
    if len(body) <= QUICK_BYTES:
        return parse(kind, body)
    return await asyncio.to_thread(parse, kind, body)


class Probes:
    """The handlers of /health and /metrics."""

    def __init__(self, gate: AdmissionGate, metrics: Metrics, engine: BaseEngine) -> None:
        self._gate = gate
        self._metrics = metrics
        self._engine = engine

    async def health(self) -> Response:
        if self._gate.is_draining:
            raise shutting_down()
        if not self._engine.is_alive:
            raise engine_ended()
        return Response('{"status":"ok"}', media_type="application/json")

    async def metrics(self, request: Request) -> Response:
        page, content_type = self._metrics.render(request.headers.get("accept", ""))
        return Response(page, headers={"Content-Type": content_type})

    @property
    def endpoints(self) -> list[Endpoint]:
        return [("/health", "GET", self.health), ("/metrics", "GET", self.metrics)]


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


async def unless_disconnected(request: Request, work: Coroutine[Any, Any, T]) -> T | None:
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
    if isinstance(error, HTTPException):  # raised by the framework: no such path or method
        error = ApiError(error.status_code, f"{request.method} {request.url.path}: {error.detail}")
    elif isinstance(error, MemagentError):
        error = from_memagent(error)
    assert isinstance(error, ApiError)
    return error.response()


async def _no_response(request: Request, error: Exception) -> Response:
    return Response(status_code=CLIENT_GONE)


async def _internal_error_response(request: Request, error: Exception) -> Response:
    """The framework raises the error again afterwards, so the traceback is logged."""
    return INTERNAL.response()
