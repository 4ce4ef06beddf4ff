"""The addresses of the server, over one local engine.

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

from memagent.engines.local.engine import LocalEngine
from memagent.errors import MemagentError
from memagent.serve.errors import INTERNAL, ApiError, from_memagent
from memagent.serve.generate import Job, jobs_of, parts, replies, streams
from memagent.serve.guard import CLIENT_GONE, Gate, Guard, shutting_down
from memagent.serve.metrics import CONTENT_TYPE, Metrics
from memagent.serve.responses import Json, Shape, model_card, shape_of, total
from memagent.serve.settings import ServeConfig
from memagent.serve.wire import ChatRequest, CompletionRequest, parse
from memagent.types import Completion

BODY_SECONDS = 60.0
"""A body that takes longer to arrive is given up."""

T = TypeVar("T")
log = logging.getLogger(__name__)


def make_app(
    engine: LocalEngine, config: ServeConfig | None = None, *, gate: Gate | None = None
) -> FastAPI:
    """The server over an engine, which stays the caller's to close."""
    config = config or ServeConfig()
    gate = gate or Gate(config.max_concurrency)
    metrics = Metrics()
    service = Service(engine, gate, metrics, max_request_bytes=config.max_request_bytes)
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
    app.add_exception_handler(ApiError, _answer_refusal)
    app.add_exception_handler(MemagentError, _answer_refusal)
    app.add_exception_handler(HTTPException, _answer_refusal)
    app.add_exception_handler(ClientDisconnect, _answer_nobody)
    app.add_exception_handler(Exception, _answer_bug)
    app.add_middleware(
        Guard,
        gate=gate,
        metrics=metrics,
        api_key=config.api_key.get_secret_value() if config.api_key else None,
    )
    return app


class Service:
    """What stands behind each address."""

    def __init__(
        self, engine: LocalEngine, gate: Gate, metrics: Metrics, *, max_request_bytes: int
    ) -> None:
        self._engine = engine
        self._gate = gate
        self._metrics = metrics
        self._max_request_bytes = max_request_bytes
        self._created = int(time.time())

    async def chat(self, request: Request) -> Response:
        return await self._generate(request, parse(ChatRequest, await self._body(request)))

    async def complete(self, request: Request) -> Response:
        return await self._generate(request, parse(CompletionRequest, await self._body(request)))

    async def models(self) -> Response:
        card = model_card(self._engine, created=self._created)
        return JSONResponse({"object": "list", "data": [card]})

    async def model(self, name: str) -> Response:
        self._check_model(name)
        return JSONResponse(model_card(self._engine, created=self._created))

    async def health(self) -> Response:
        if self._gate.is_draining:
            raise shutting_down()
        return JSONResponse({"status": "ok"})

    async def metrics(self) -> Response:
        page = self._metrics.render(self._engine.load)
        return Response(page, headers={"Content-Type": CONTENT_TYPE})

    # --- generating ----------------------------------------------------------------------------

    async def _generate(
        self, request: Request, wanted: ChatRequest | CompletionRequest
    ) -> Response:
        self._check_model(wanted.model)
        jobs = await jobs_of(wanted, self._engine)
        shape = shape_of(wanted, self._engine)
        if wanted.stream:
            return EventStream(self._events(shape, jobs, has_usage=wanted.wants_usage))
        completions = await _unless_gone(request, replies(self._engine, jobs))
        if completions is None:
            return Response(status_code=CLIENT_GONE)
        self._metrics.count_tokens(total(completions))
        return JSONResponse(shape.whole(jobs, completions))

    def _events(
        self, shape: Shape, jobs: list[Job], *, has_usage: bool
    ) -> AsyncGenerator[str, None]:
        """The chunks of a stream; a job that is wrong is refused here, before the first byte."""
        tokens = streams(self._engine, jobs)

        async def events() -> AsyncGenerator[str, None]:
            completions: dict[int, Completion] = {}
            for chunk in shape.first_chunks(jobs):
                yield _event(chunk)
            async with aclosing(tokens) as opened, aclosing(parts(opened)) as all_parts:
                async for part in all_parts:
                    if part.completion:
                        completions[part.choice] = part.completion
                        self._metrics.count_tokens(total([part.completion]))
                    yield _event(shape.chunk(part))
            if has_usage:
                in_order = [completions[number] for number in range(len(jobs))]
                yield _event(shape.usage_chunk(in_order))
            yield "data: [DONE]\n\n"

        return _with_errors_told(events())

    # --- checks --------------------------------------------------------------------------------

    def _check_model(self, name: str | None) -> None:
        if name is not None and name != self._engine.model:
            raise ApiError(
                404,
                f"the model {name!r} does not exist here; this server has {self._engine.model!r}",
                param="model",
                code="model_not_found",
            )

    async def _body(self, request: Request) -> bytes:
        """The body, if it is JSON by its own account and not too large."""
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":  # what a web page may send unasked never has this type
            raise ApiError(
                400, "send `Content-Type: application/json`", code="invalid_content_type"
            )
        body = bytearray()
        try:
            async with asyncio.timeout(BODY_SECONDS):
                async for piece in request.stream():
                    body += piece
                    if len(body) > self._max_request_bytes:
                        raise ApiError(
                            413,
                            f"the request is larger than {self._max_request_bytes:,} bytes; "
                            "shorten it",
                            code="request_too_large",
                        )
        except TimeoutError:
            raise ApiError(408, "the request took too long to arrive", code="timeout") from None
        return bytes(body)


class EventStream(StreamingResponse):
    """Server-sent events whose source is closed when the response ends, however it ends."""

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


async def _with_errors_told(events: AsyncGenerator[str, None]) -> AsyncGenerator[str, None]:
    """A failure after the first byte is the last event: the status has been sent already."""
    async with aclosing(events):
        try:
            async for event in events:
                yield event
        except MemagentError as error:
            yield _event(from_memagent(error).body())
        except Exception:
            log.exception("a stream failed")
            yield _event(INTERNAL.body())


async def _unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T | None:
    """The result of some work; None, and the work is given up, when the client leaves first."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        return await task if task.done() else None
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


# --- errors ---------------------------------------------------------------------------------------


async def _answer_refusal(request: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException):  # of the framework: no such address or method
        error = ApiError(error.status_code, f"{request.method} {request.url.path}: {error.detail}")
    elif isinstance(error, MemagentError):
        error = from_memagent(error)
    assert isinstance(error, ApiError)
    return error.response()


async def _answer_nobody(request: Request, error: Exception) -> Response:
    return Response(status_code=CLIENT_GONE)


async def _answer_bug(request: Request, error: Exception) -> Response:
    """The client learns that, the log why: the framework raises the error again after this."""
    return INTERNAL.response()
