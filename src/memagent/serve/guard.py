"""Middleware for every request: host and origin, API key, body, admission, counting.

A place of the server is taken when the body has arrived, so clients that send half a request do not lock out
others; a place of the key when the request begins.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from memagent.serve.errors import INTERNAL, ApiError
from memagent.serve.keys import ANYONE, KeyCheck, KeyHolder, checked_holder
from memagent.serve.listen import ForeignRequest, HostCheck
from memagent.serve.metrics import Metrics, OnRequest, RequestRecord, client_of, path_of
from memagent.types import Usage

JSON_TYPE = "application/json"
FORM_TYPE = "multipart/form-data"
REQUEST_ID = "x-request-id"
"""Header of a response with the id of its request."""
CLIENT_GONE = 499
"""The status counted when a client disconnects before the response."""
BODY_SECONDS = 60.0
"""Time limit for receiving a request body."""
MAX_WAITING_BODIES = 16
"""Memory for bodies that are arriving, in bodies of the maximum size."""
MAX_WAITING_OF_KEY = 4
"""The same for bodies with one key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardedPaths:
    """How the guard treats paths."""

    bodies: dict[str, str]
    """Paths whose POST has a body and takes a place, with its content type."""
    others: tuple[str, ...]
    """Further paths that are counted by name; what clients invent is counted together."""
    without_key: tuple[str, ...]
    """Paths that need no key."""
    downloads: tuple[str, ...] = ()
    """Endings of paths whose response is a file, and takes a place."""

    def counted(self, path: str) -> str:
        """The name under which a path is counted."""
        known = (*self.bodies, *self.others)
        return next((one for one in known if path == one or path.startswith(f"{one}/")), "other")


def shutting_down() -> ApiError:
    """The response while the server drains."""
    return ApiError(503, "the server is shutting down; use another one", code="shutting_down")


def engine_ended() -> ApiError:
    """The response where the engine has ended by itself, for good."""
    reason = (
        "the engine of this server has ended; restart the server, and use another one until then"
    )
    return ApiError(503, reason, code="engine_ended")


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


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardRules:
    """Who may send what to a server, and where it is counted."""

    gate: AdmissionGate
    metrics: Metrics
    hosts: HostCheck
    keys: KeyCheck
    paths: GuardedPaths
    max_request_bytes: int
    on_request: OnRequest | None = None


class Guard:
    """The outermost middleware. It holds a request's place until the last byte is sent."""

    def __init__(self, app: ASGIApp, rules: GuardRules) -> None:
        self._app = app
        self._paths = rules.paths
        self._on_request = rules.on_request
        self._hosts = rules.hosts
        self._bodies = _Bodies(rules.max_request_bytes)
        self._gate = rules.gate
        self._metrics = rules.metrics
        self._keys = rules.keys
        self._key_gates: dict[tuple[str, int], AdmissionGate] = {}
        """Of holders with a limit of their own, by id and limit, which may change."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = f"req_{secrets.token_hex(12)}"
        scope.setdefault("state", {}).update(usage=Usage(), request_id=request_id)
        receive = arriving = _Arriving(scope, receive)
        counted = _CountedSend(send, request_id, arriving)
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
        except Exception:  # a bug: the framework logs it
            if not counted.is_started:
                await INTERNAL.response()(scope, receive, counted)
            raise
        finally:
            self._metrics.count_request(self._paths.counted(scope["path"]), counted.status)
            if self._on_request is not None:
                self._on_request(
                    RequestRecord(
                        client=client_of(scope),
                        method=scope["method"],
                        path=path_of(scope),
                        status=counted.status,
                        seconds=time.monotonic() - started,
                        usage=scope["state"]["usage"],
                        request_id=request_id,
                        is_cut=is_cut,
                    )
                )

    async def _guarded(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        try:
            self._hosts.check(headers)
        except ForeignRequest as error:
            raise ApiError(403, str(error), code=error.code) from None
        path = scope["path"]
        holder = KeyHolder()
        if path not in self._paths.without_key:
            holder = checked_holder(self._keys, headers)
        scope["state"]["holder"] = holder
        has_body = scope["method"] == "POST" and path in self._paths.bodies
        if not has_body and not path.endswith(self._paths.downloads):
            await self._app(scope, receive, send)
            return
        self._gate.check_open()
        with self._own_place(holder):
            if has_body:
                _check_type(headers, self._paths.bodies[path])
                body = await self._bodies.receive(receive, holder)
                if body is None:  # the client has left
                    return
                receive = _replayed(body, receive)
                del body  # a reading takes long, and does not need it
            with self._gate.admit():
                await self._app(scope, receive, send)

    def _own_place(self, holder: KeyHolder) -> AbstractContextManager[None]:
        """One of the places of a key, where it has a limit."""
        limit = holder.limits.max_concurrency
        if limit is None:
            return nullcontext()
        return self._key_gates.setdefault((holder.id, limit), AdmissionGate(limit)).admit()


async def _cut_off(scope: Scope, receive: Receive, send: _CountedSend) -> None:
    """Answer a request that ends with the server: with an error, in a stream as its last event."""
    error = shutting_down()
    with suppress(asyncio.CancelledError):  # the server cancels what is left when it closes
        if not send.is_started:
            await error.response()(scope, receive, send)
        else:
            event = f"data: {json.dumps(error.body())}\n\n".encode()
            await send({"type": "http.response.body", "body": event, "more_body": False})


def _check_type(headers: Headers, expected: str) -> None:
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != expected:  # cross-site requests of web pages cannot have the type of JSON
        raise ApiError(400, f"send `Content-Type: {expected}`", code="invalid_content_type")


class _Bodies:
    """Receives request bodies within a time limit, and within limits of each, of those with one key, and of all."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._arriving: Counter[str] = Counter()
        """Bytes of bodies that are arriving, by their holder."""

    async def receive(self, receive: Receive, holder: KeyHolder) -> bytes | None:
        """A whole body; None if the client disconnects."""
        most = min(holder.limits.max_request_bytes or self._max_bytes, self._max_bytes)
        pieces: list[bytes] = []
        num_bytes = 0
        try:
            async with asyncio.timeout(BODY_SECONDS):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    pieces.append(message.get("body", b""))
                    num_bytes += len(pieces[-1])
                    self._arriving[holder.id] += len(pieces[-1])
                    self._check(holder, num_bytes, most)
                    if not message.get("more_body", False):
                        return b"".join(pieces)
        except TimeoutError:
            raise ApiError(408, "the request took too long to arrive", code="timeout") from None
        finally:
            self._arriving[holder.id] -= num_bytes
            self._arriving += Counter()  # forgets holders with none

    def _check(self, holder: KeyHolder, num_bytes: int, most: int) -> None:
        """Raise ApiError if a body, those of its holder or all together are too large."""
        if num_bytes > most:
            raise ApiError(
                413,
                f"the request is larger than {most:,} bytes; shorten it",
                code="request_too_large",
            )
        share = MAX_WAITING_BODIES if holder.id == ANYONE else MAX_WAITING_OF_KEY
        is_full = self._arriving.total() > MAX_WAITING_BODIES * self._max_bytes
        if is_full or self._arriving[holder.id] > share * self._max_bytes:
            raise ApiError(
                429,
                "too many large requests are arriving; try again soon",
                code="too_many_requests",
            )


def _replayed(body: bytes, receive: Receive) -> Receive:
    """`receive` of a request whose body has arrived."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def next_message() -> Message:
        return messages.pop() if messages else await receive()

    return next_message


class _Arriving:
    """Forwards messages, and knows whether all of the request has arrived."""

    def __init__(self, scope: Scope, receive: Receive) -> None:
        headers = Headers(scope=scope)
        has_body = "transfer-encoding" in headers or headers.get("content-length", "0") != "0"
        self.is_whole = not has_body
        self._receive = receive

    async def __call__(self) -> Message:
        message = await self._receive()
        self.is_whole |= not message.get("more_body", False)
        return message


class _CountedSend:
    """Forwards messages, records the status and adds the id of the request.

    A response to half a request closes the connection, so that the server does not read the rest.
    """

    def __init__(self, send: Send, request_id: str, arriving: _Arriving) -> None:
        self._send = send
        self._arriving = arriving
        self._header = (REQUEST_ID.encode(), request_id.encode())
        self.status = CLIENT_GONE
        self.is_started = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.is_started = True
            closing = () if self._arriving.is_whole else ((b"connection", b"close"),)
            headers = [*message.get("headers", ()), self._header, *closing]
            message = {**message, "headers": headers}
        await self._send(message)
