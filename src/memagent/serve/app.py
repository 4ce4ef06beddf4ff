"""The routes of the server, over one local engine.

POST /v1/chat/completions    POST /v1/completions    GET /v1/models
GET /health                  GET /metrics
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from memagent.config import ServeConfig
from memagent.engines.local.engine import LocalEngine
from memagent.errors import MemagentError
from memagent.serve.errors import INTERNAL, ApiError, from_memagent
from memagent.serve.generate import ReplyJob, jobs_of, parts, replies, streams
from memagent.serve.guard import CLIENT_GONE, AdmissionGate, Guard, shutting_down
from memagent.serve.metrics import Metrics
from memagent.serve.request_log import OnRequest
from memagent.serve.responses import Json, ResponseWriter, model_card, total, writer_of
from memagent.serve.wire import ChatRequest, CompletionRequest, parse
from memagent.types import Completion
from memagent.web.hosts import HostCheck

T = TypeVar("T")
log = logging.getLogger(__name__)


def make_app(
    engine: LocalEngine,
    config: ServeConfig | None = None,
    *,
    gate: AdmissionGate | None = None,
    on_request: OnRequest | None = None,
) -> FastAPI:
    """The ASGI application over an engine, which the caller closes."""
    config = config or ServeConfig()
    gate = gate or AdmissionGate(config.max_concurrency)
    metrics = Metrics(lambda: engine.load)
    hosts = HostCheck(config.host, config.allowed_hosts)
    service = Service(engine, gate, metrics, shows_root=hosts.is_local)
    app = FastAPI(title="memagent", docs_url=None, redoc_url=None, openapi_url=None)
    for path, method, endpoint in (
        ("/v1/chat/completions", "POST", service.chat),
        ("/v1/completions", "POST", service.complete),
        ("/v1/models", "GET", service.models),
        ("/v1/models/{name:path}", "GET", service.model),
        ("/health", "GET", service.health),
        ("/metrics", "GET", service.metrics),
    ):
        app.add_api_route(path, endpoint, methods=[method], response_model=None)
    for kind in (ApiError, MemagentError, HTTPException):
        app.add_exception_handler(kind, _error_response)
    app.add_exception_handler(ClientDisconnect, _no_response)
    app.add_exception_handler(Exception, _internal_error_response)
    app.add_middleware(
        Guard,
        gate=gate,
        metrics=metrics,
        hosts=hosts,
        api_key=config.api_key.get_secret_value() if config.api_key else None,
        max_request_bytes=config.max_request_bytes,
        on_request=on_request,
    )
    return app


class Service:
    """The handlers of the routes."""

    def __init__(
        self, engine: LocalEngine, gate: AdmissionGate, metrics: Metrics, *, shows_root: bool
    ) -> None:
        """`shows_root`: whether responses name the folder of the tokenizer, which clients can open."""
        self._engine = engine
        self._gate = gate
        self._metrics = metrics
        self._shows_root = shows_root
        self._created = int(time.time())

    async def chat(self, request: Request) -> Response:
        return await self._generate(request, parse(ChatRequest, await request.body()))

    async def complete(self, request: Request) -> Response:
        return await self._generate(request, parse(CompletionRequest, await request.body()))

    async def models(self) -> Response:
        return JSONResponse({"object": "list", "data": [self._card]})

    async def model(self, name: str) -> Response:
        self._check_model(name)
        return JSONResponse(self._card)

    @property
    def _card(self) -> Json:
        return model_card(self._engine, created=self._created, has_root=self._shows_root)

    async def health(self) -> Response:
        if self._gate.is_draining:
            raise shutting_down()
        return JSONResponse({"status": "ok"})

    async def metrics(self, request: Request) -> Response:
        page, content_type = self._metrics.render(request.headers.get("accept", ""))
        return Response(page, headers={"Content-Type": content_type})

    # --- generating ----------------------------------------------------------------------------

    async def _generate(self, request: Request, body: ChatRequest | CompletionRequest) -> Response:
        self._check_model(body.model)
        jobs = await jobs_of(body, self._engine)
        writer = writer_of(body, self._engine)
        if body.stream:
            return EventStream(self._events(request, writer, jobs, has_usage=body.wants_usage))
        completions = await _unless_disconnected(request, replies(self._engine, jobs))
        if completions is None:
            return Response(status_code=CLIENT_GONE)
        self._count(request, completions)
        return JSONResponse(writer.whole(jobs, completions))

    def _count(self, request: Request, completions: list[Completion]) -> None:
        usage = total(completions)
        self._metrics.count_tokens(usage)
        request.state.usage += usage

    def _events(
        self, request: Request, writer: ResponseWriter, jobs: list[ReplyJob], *, has_usage: bool
    ) -> AsyncGenerator[str, None]:
        """The chunks of a stream. An invalid job raises here, before the first byte."""
        tokens = streams(self._engine, jobs)

        async def events() -> AsyncGenerator[str, None]:
            completions: dict[int, Completion] = {}
            for chunk in writer.first_chunks(jobs):
                yield _event(chunk)
            async with aclosing(tokens) as opened, aclosing(parts(opened)) as all_parts:
                async for part in all_parts:
                    if part.completion:
                        completions[part.choice] = part.completion
                        self._count(request, [part.completion])
                    yield _event(writer.chunk(part))
            if has_usage:
                in_order = [completions[number] for number in range(len(jobs))]
                yield _event(writer.usage_chunk(in_order))
            yield "data: [DONE]\n\n"

        return _with_error_event(events())

    # --- checks --------------------------------------------------------------------------------

    def _check_model(self, name: str | None) -> None:
        if name is not None and name not in (self._engine.public_name, self._engine.model):
            raise ApiError(
                404,
                f"the model {name!r} does not exist; this server has {self._engine.public_name!r}",
                param="model",
                code="model_not_found",
            )


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


def _event(chunk: Json) -> str:
    return f"data: {json.dumps(chunk, separators=(',', ':'))}\n\n"


async def _with_error_event(events: AsyncGenerator[str, None]) -> AsyncGenerator[str, None]:
    """Turn a failure into the last event: the status has already been sent."""
    async with aclosing(events):
        try:
            async for event in events:
                yield event
        except MemagentError as error:
            yield _event(from_memagent(error).body())
        except Exception:
            log.exception("a stream failed")
            yield _event(INTERNAL.body())


async def _unless_disconnected(request: Request, work: Coroutine[Any, Any, T]) -> T | None:
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
