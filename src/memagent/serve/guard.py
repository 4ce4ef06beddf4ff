"""What every request passes before it is read: the key, the limit, the count."""

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
"""Counted by name; others are counted together, as anybody can invent them."""
CLIENT_GONE = 499
"""The status that is counted when a client left before it was answered."""


def shutting_down() -> ApiError:
    """What is answered while the server drains."""
    return ApiError(503, "the server is shutting down; ask another one", code="shutting_down")


class Gate:
    """How many requests are under way, and whether further ones may come in."""

    def __init__(self, max_active: int) -> None:
        self.num_active = 0
        self.is_draining = False
        """True when the server is about to stop: what runs is finished, nothing new is taken."""
        self._max_active = max_active

    @contextmanager
    def place(self) -> Iterator[None]:
        """A place for one request, if there is one."""
        if self.is_draining:
            raise shutting_down()
        if self.num_active >= self._max_active:
            raise ApiError(
                429,
                f"{self.num_active} requests are under way, as many as this server takes; "
                "try again soon",
                code="too_many_requests",
            )
        self.num_active += 1
        try:
            yield
        finally:
            self.num_active -= 1


class Guard:
    """The outermost layer. It holds a request's place until the last byte is sent."""

    def __init__(self, app: ASGIApp, *, gate: Gate, metrics: Metrics, api_key: str | None) -> None:
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
            with self._gate.place():
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
    """Passes messages on and remembers the status."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.status = CLIENT_GONE

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        await self._send(message)
