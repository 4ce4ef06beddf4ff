"""Middleware for every request: host and origin, API key, body, admission, counting.

A place is taken when the body has arrived, so clients that send half a request do not lock out others.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from memagent.serve.errors import ApiError
from memagent.serve.metrics import Metrics
from memagent.serve.request_log import OnRequest, RequestRecord, client_of, path_of
from memagent.types import Usage
from memagent.web.hosts import ForeignRequest, HostCheck

GENERATION_PATHS = ("/v1/chat/completions", "/v1/completions")
KNOWN_PATHS = (*GENERATION_PATHS, "/v1/models", "/health", "/metrics")
"""Counted separately; other paths are counted together, since clients can invent them."""
CLIENT_GONE = 499
"""The status counted when a client disconnects before the response."""
BODY_SECONDS = 60.0
"""Time limit for receiving a request body."""
MAX_WAITING_BODIES = 16
"""Memory for bodies that are arriving, in bodies of the maximum size."""


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

    def check_open(self) -> None:
        """Raise ApiError while the server drains."""
        if self.is_draining:
            raise shutting_down()

    @contextmanager
    def admit(self) -> Iterator[None]:
        """Hold a place for one request. Raises ApiError if there is none."""
        self.check_open()
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
        self,
        app: ASGIApp,
        *,
        gate: AdmissionGate,
        metrics: Metrics,
        hosts: HostCheck,
        api_key: str | None,
        max_request_bytes: int,
        on_request: OnRequest | None = None,
    ) -> None:
        self._app = app
        self._on_request = on_request
        self._hosts = hosts
        self._bodies = _Bodies(max_request_bytes)
        self._gate = gate
        self._metrics = metrics
        self._api_key = api_key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = scope["path"]
        scope.setdefault("state", {})["usage"] = Usage()
        counted = _CountedSend(send)
        started = time.monotonic()
        is_cut = False
        try:
            await self._guarded(scope, receive, counted)
        except ApiError as error:
            await error.response()(scope, receive, counted)
        except asyncio.CancelledError:
            if not self._gate.is_draining:
                raise
            is_cut = True
            await _cut_off(scope, receive, counted)
        finally:
            known = path if path in KNOWN_PATHS else "other"
            self._metrics.count_request(known, counted.status)
            if self._on_request is not None:
                self._on_request(
                    RequestRecord(
                        client=client_of(scope),
                        method=scope["method"],
                        path=path_of(scope),
                        status=counted.status,
                        seconds=time.monotonic() - started,
                        usage=scope["state"]["usage"],
                        is_cut=is_cut,
                    )
                )

    async def _guarded(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        try:
            self._hosts.check(headers)
        except ForeignRequest as error:
            raise ApiError(403, str(error), code=error.code) from None
        if scope["path"].startswith("/v1"):
            self._check_key(headers)
        if scope["path"] in GENERATION_PATHS and scope["method"] == "POST":
            self._gate.check_open()
            _check_type(headers)
            with self._bodies.arriving() as bodies:
                body = await bodies.receive(receive)
            if body is None:  # the client has left
                return
            with self._gate.admit():
                await self._app(scope, _replayed(body, receive), send)
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


async def _cut_off(scope: Scope, receive: Receive, send: _CountedSend) -> None:
    """Answer a request that ends with the server: with an error, in a stream as its last event."""
    error = shutting_down()
    with suppress(asyncio.CancelledError):  # the server cancels what is left when it closes
        if not send.is_started:
            await error.response()(scope, receive, send)
        else:
            event = f"data: {json.dumps(error.body())}\n\n".encode()
            await send({"type": "http.response.body", "body": event, "more_body": False})


def _check_type(headers: Headers) -> None:
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":  # cross-site requests of web pages cannot have this type
        raise ApiError(400, "send `Content-Type: application/json`", code="invalid_content_type")


class _Bodies:
    """Receives request bodies within a time limit, and within limits of each and of all together."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        """Bytes of bodies that are arriving."""

    @contextmanager
    def arriving(self) -> Iterator[_Body]:
        """A body to receive; its bytes count until the block ends."""
        body = _Body(self)
        try:
            yield body
        finally:
            self._num_bytes -= body.num_bytes

    def add(self, body: _Body, num_bytes: int) -> None:
        """Count bytes of a body. Raises ApiError if it or all together are too large."""
        body.num_bytes += num_bytes
        self._num_bytes += num_bytes
        if body.num_bytes > self._max_bytes:
            raise ApiError(
                413,
                f"the request is larger than {self._max_bytes:,} bytes; shorten it",
                code="request_too_large",
            )
        if self._num_bytes > MAX_WAITING_BODIES * self._max_bytes:
            raise ApiError(
                429,
                "too many large requests are arriving; try again soon",
                code="too_many_requests",
            )


class _Body:
    """One body that is arriving."""

    def __init__(self, bodies: _Bodies) -> None:
        self.num_bytes = 0
        self._bodies = bodies

    async def receive(self, receive: Receive) -> bytes | None:
        """The whole body; None if the client disconnects."""
        pieces: list[bytes] = []
        try:
            async with asyncio.timeout(BODY_SECONDS):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    pieces.append(message.get("body", b""))
                    self._bodies.add(self, len(pieces[-1]))
                    if not message.get("more_body", False):
                        return b"".join(pieces)
        except TimeoutError:
            raise ApiError(408, "the request took too long to arrive", code="timeout") from None


def _replayed(body: bytes, receive: Receive) -> Receive:
    """`receive` of a request whose body has arrived."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def next_message() -> Message:
        return messages.pop() if messages else await receive()

    return next_message


class _CountedSend:
    """Forwards messages and records the status."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.status = CLIENT_GONE
        self.is_started = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.is_started = True
        await self._send(message)
