"""The routes of the reading gateway.

POST /v1/chat/completions    POST /v1/responses    /v1/files    GET /v1/models
GET /health                  GET /metrics          GET /openapi.json
"""

from __future__ import annotations

import time
from functools import partial

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse

from memagent.agent.reader import Reader
from memagent.config import GatewayConfig, ServeConfig
from memagent.engines.base import BaseEngine
from memagent.errors import ConfigError
from memagent.serve.chat import AnswerEvents, ChatAnswer, whole_answer
from memagent.serve.guard import CLIENT_GONE, AdmissionGate, Metrics, OnRequest, Route
from memagent.serve.http import (
    STREAMED,
    EventStream,
    Json,
    health_routes,
    model_routes,
    unless_disconnected,
    web_app,
    with_error_event,
)
from memagent.serve.keys import KeyCheck, KeyStore, OneKey, checked_holder
from memagent.serve.reading.files import FileStore
from memagent.serve.reading.gateway import Gateway
from memagent.serve.reading.requests import (
    MODEL,
    GatewayChat,
    GatewayRequest,
    ResponsesRequest,
    settings_in_name,
)
from memagent.serve.reading.state import GatewayState, keys_file
from memagent.serve.responses import ResponseAnswer
from memagent.types import Usage

MODELS_LISTED = (
    MODEL,
    f"{MODEL}:evidence=true",
    f"{MODEL}:mode=parallel",
    f"{MODEL}:mode=parallel,evidence=true",
)
"""What programs that choose a model by its name are offered; any other setting works too."""


def gateway_app(
    engine: BaseEngine,
    reader: Reader,
    state: GatewayState,
    config: GatewayConfig,
    server: ServeConfig,
    *,
    gate: AdmissionGate | None = None,
    on_request: OnRequest | None = None,
) -> FastAPI:
    """The ASGI application. `reader` has the server's reading settings; the caller closes engine and state."""
    gate = gate or AdmissionGate(server.max_concurrency)
    gateway = Gateway(engine, reader, state, config)
    metrics = Metrics(gateway.gauges, gateway.counters)
    files = FileStore(
        state,
        max_stored_bytes=config.max_stored_bytes,
        max_request_bytes=server.max_request_bytes,
        on_delete=gateway.forget_deleted,
    )
    service = GatewayService(gateway, files, metrics)
    return web_app(
        [
            Route("POST", "/v1/chat/completions", service.chat, more=STREAMED),
            Route("POST", "/v1/responses", service.responses, more=STREAMED),
            *files.routes,
            *model_routes(MODELS_LISTED, service.card),
            Route("GET", "/openapi.json", service.description),
            *health_routes(gate, metrics, engine, metrics_need_key=True),
        ],
        server,
        partial(checked_holder, keys_of(config, server)),
        gate=gate,
        metrics=metrics,
        on_request=on_request,
    )


def keys_of(config: GatewayConfig, server: ServeConfig) -> KeyCheck:
    """Who may use the gateway: the holders of keys in the state folder, or without any those of the one key, or anyone."""
    named = keys_file(config)
    one_key = OneKey(server.api_key.get_secret_value() if server.api_key else None)
    store = KeyStore(named, without_file=one_key)
    if not store.exists:
        return store
    if server.api_key is not None:
        raise ConfigError(f"give either `api_key` or keys in {named}, not both")
    limited = [stored.name for stored in store.list() if stored.limits.max_cost is not None]
    if limited and config.prices is None:
        raise ConfigError(
            f"the key {limited[0]!r} has a limit on cost, which needs prices; give `price_in` and `price_out`"
        )
    return store


class GatewayService:
    """The handlers of the routes."""

    def __init__(self, gateway: Gateway, files: FileStore, metrics: Metrics) -> None:
        self._gateway = gateway
        self._files = files
        self._metrics = metrics
        self._created = int(time.time())

    def card(self, name: str) -> Json:
        """The model with settings in its name."""
        settings_in_name(name)
        return {"id": name, "object": "model", "created": self._created, "owned_by": "memagent"}

    async def description(self, request: Request) -> Response:
        """Describe the API."""
        return JSONResponse(request.app.openapi())

    async def chat(self, request: Request, body: GatewayChat) -> Response:
        """Answer a conversation of any length."""
        events = await self._prepared(request, body.request)
        writer = ChatAnswer(MODEL, has_usage=body.wants_usage)
        if body.stream:
            return EventStream(with_error_event(writer.chunks(events)))
        return await self._whole(request, writer, events)

    async def responses(self, request: Request, body: ResponsesRequest) -> Response:
        """Answer an input of any length."""
        events = await self._prepared(request, body.request)
        writer = ResponseAnswer(MODEL, body)
        if body.stream:
            return EventStream(with_error_event(writer.chunks(events), writer.error_event))
        return await self._whole(request, writer, events)

    async def _prepared(self, request: Request, asked: GatewayRequest) -> AnswerEvents:
        """The events of the answer, once there is room for it."""
        holder = request.state.holder

        def count(usage: Usage) -> None:
            self._metrics.count_tokens(usage)
            request.state.usage += usage

        files = self._files.opener(holder)
        events = await self._gateway.prepare(asked, holder, files, count)
        await anext(events)  # raises what a stream could say only after its status
        return events

    async def _whole(
        self, request: Request, writer: ChatAnswer | ResponseAnswer, events: AnswerEvents
    ) -> Response:
        answered = await unless_disconnected(request, whole_answer(events))
        if answered is None:
            return Response(status_code=CLIENT_GONE)
        return JSONResponse(writer.whole(*answered))
