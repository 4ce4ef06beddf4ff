"""Middleware for every request: API key, admission, counting."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from memagent.serve.errors import ApiError
from memagent.serve.metrics import Metrics

GENERATION_PATHS = ("/v1/chat/completions", "/v1/completions")
KNOWN_PATHS = (*GENERATION_PATHS, "/v1/models", "/health", "/metrics")
"""Counted separately; other paths are counted together, since clients can invent them."""
CLIENT_GONE = 499
"""The status counted when a client disconnects before the response."""


def shutting_down() -> ApiError:
    """The response while the server drains."""
    return ApiError(503, "the server is shutting down; use another one", code="shutting_down")


class AdmissionGate:
    """Admits a limited number of concurrent requests, and none while the server drains."""

    def __init__(self, max_active: int) -> None:
        self.num_active = 0
        self.is_draining = False
        """True while the server shuts down: running requests finish, new ones are refused."""
        self._max_active = max_active

    @contextmanager
    def admit(self) -> Iterator[None]:
        """Hold a place for one request. Raises ApiError if there is none."""
        if self.is_draining:
            raise shutting_down()
        if self.num_active >= self._max_active:
            raise ApiError(
                429,
                f"{self.num_active} requests are running, the limit of this server; try again soon",
                code="too_many_requests",
            )
        self.num_active += 1
        try:
            yield
        finally:
            self.num_active -= 1


class Guard:
    """The outermost middleware. It holds a request's place until the last byte is sent."""

    def __init__(
        self, app: ASGIApp, *, gate: AdmissionGate, metrics: Metrics, api_key: str | None
    ) -> None:
        self._app = app
        self._gate = gate
        self._metrics = metrics
        self._api_key = api_key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = scope["path"]
        counted = _CountedSend(send)
        try:
            await self._guarded(scope, receive, counted)
        except ApiError as error:
            await error.response()(scope, receive, counted)
        finally:
            known = path if path in KNOWN_PATHS else "other"
            self._metrics.count_request(known, counted.status)

    async def _guarded(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"].startswith("/v1"):
            self._check_key(Headers(scope=scope))
        if scope["path"] in GENERATION_PATHS and scope["method"] == "POST":
            with self._gate.admit():
                await self._app(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _check_key(self, headers: Headers) -> None:
        if self._api_key is None:
            return
        scheme, _, key = headers.get("authorization", "").partition(" ")
        is_right = secrets.compare_digest(key.strip().encode(), self._api_key.encode())
        if scheme.lower() != "bearer" or not is_right:
            raise ApiError(
                401,
                "the key is missing or wrong; send it as `Authorization: Bearer KEY`",
                code="invalid_api_key",
            )


class _CountedSend:
    """Forwards messages and records the status."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.status = CLIENT_GONE

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        await self._send(message)
