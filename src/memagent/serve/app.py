"""The routes of the server, over one local engine.

POST /v1/chat/completions    POST /v1/completions    GET /v1/models
GET /health                  GET /metrics
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial
from typing import TYPE_CHECKING

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse

from memagent.config import ServeConfig
from memagent.serve.chat import LocalAnswer, total
from memagent.serve.errors import ApiError
from memagent.serve.generate import ReplyJob, jobs_of, parts, replies, streams
from memagent.serve.guard import CLIENT_GONE, AdmissionGate, Route
from memagent.serve.http import (
    END_OF_EVENTS,
    EventStream,
    Json,
    event,
    health_routes,
    unless_disconnected,
    web_app,
    with_error_event,
)
from memagent.serve.keys import OneKey, checked_holder
from memagent.serve.listen import HostCheck
from memagent.serve.metrics import Metrics, OnRequest, load_gauges
from memagent.serve.wire import ChatRequest, CompletionRequest, LocalRequest
from memagent.types import Completion

if TYPE_CHECKING:
    from memagent.serve.generate import ServedEngine

MODELS = "/v1/models"


def make_app(
    engine: ServedEngine,
    config: ServeConfig | None = None,
    *,
    gate: AdmissionGate | None = None,
    on_request: OnRequest | None = None,
) -> FastAPI:
    """The ASGI application over an engine, which the caller closes."""
    config = config or ServeConfig()
    gate = gate or AdmissionGate(config.max_concurrency)
    metrics = Metrics(lambda: load_gauges(engine.load))
    is_local = HostCheck(config.host, None).is_local
    service = Service(engine, metrics, shows_root=is_local)
    keys = OneKey(config.api_key.get_secret_value() if config.api_key else None)
    return web_app(
        [
            Route("POST", "/v1/chat/completions", service.chat),
            Route("POST", "/v1/completions", service.complete),
            Route("GET", MODELS, service.models),
            Route("GET", f"{MODELS}/{{name:path}}", service.model),
            *health_routes(gate, metrics, engine, metrics_need_key=False),
        ],
        config,
        partial(checked_holder, keys),
        gate=gate,
        metrics=metrics,
        on_request=on_request,
    )


class Service:
    """The handlers of the routes."""

    def __init__(self, engine: ServedEngine, metrics: Metrics, *, shows_root: bool) -> None:
        """`shows_root`: whether responses name the folder of the tokenizer, which clients can open."""
        self._engine = engine
        self._metrics = metrics
        self._shows_root = shows_root
        self._created = int(time.time())

    async def chat(self, request: Request, body: ChatRequest) -> Response:
        return await self._generate(request, body)

    async def complete(self, request: Request, body: CompletionRequest) -> Response:
        return await self._generate(request, body)

    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._card]})

    async def model(self, request: Request, name: str) -> Response:
        self._check_model(name)
        return JSONResponse(self._card)

    @property
    def _card(self) -> Json:
        """The served model in vLLM's format."""
        engine = self._engine
        return {
            "id": engine.public_name,
            "object": "model",
            "created": self._created,
            "owned_by": "memagent",
            "root": engine.tokenizer if self._shows_root else engine.public_name,
            "parent": None,
            "max_model_len": engine.served_window,
        }

    # --- generating ----------------------------------------------------------------------------

    async def _generate(self, request: Request, body: LocalRequest) -> Response:
        self._check_model(body.model)
        jobs = await jobs_of(body, self._engine)
        writer = LocalAnswer(body, self._engine)
        if body.stream:
            return EventStream(self._events(request, writer, jobs, has_usage=body.wants_usage))
        completions = await unless_disconnected(request, replies(self._engine, jobs))
        if completions is None:
            return Response(status_code=CLIENT_GONE)
        self._count(request, completions)
        return JSONResponse(writer.whole(jobs, completions))

    def _count(self, request: Request, completions: list[Completion]) -> None:
        usage = total(completions)
        self._metrics.count_tokens(usage)
        request.state.usage += usage

    def _events(
        self, request: Request, writer: LocalAnswer, jobs: list[ReplyJob], *, has_usage: bool
    ) -> AsyncGenerator[str, None]:
        """The chunks of a stream. An invalid job raises here, before the first byte."""
        tokens = streams(self._engine, jobs)

        async def events() -> AsyncGenerator[str, None]:
            completions: dict[int, Completion] = {}
            for chunk in writer.first_chunks(jobs):
                yield event(chunk)
            async with aclosing(tokens) as opened, aclosing(parts(opened)) as all_parts:
                async for part in all_parts:
                    if part.completion:
                        completions[part.choice] = part.completion
                        self._count(request, [part.completion])
                    yield event(writer.chunk(part))
            if has_usage:
                in_order = [completions[number] for number in range(len(jobs))]
                yield event(writer.usage_chunk(in_order))
            yield END_OF_EVENTS

        return with_error_event(events())

    # --- checks --------------------------------------------------------------------------------

    def _check_model(self, name: str | None) -> None:
        if name is not None and name not in (self._engine.public_name, self._engine.model):
            raise ApiError(
                404,
                f"the model {name!r} does not exist; this server has {self._engine.public_name!r}",
                param="model",
                code="model_not_found",
            )
