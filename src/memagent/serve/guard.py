"""Middleware for every request: host and origin, API key, body, admission, counting; and what a server reports:
counters and gauges in Prometheus' formats, and a line for each request; never text.

    127.0.0.1 POST /v1/chat/completions 200, 31 + 10 tokens, 0.42 s, req_5f0c...

A place of the server is taken when the body has arrived, so clients that send half a request do not lock out
others; a place of the key when the request begins.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from memagent.config import ServeConfig
from memagent.serve.keys import ANYONE, KeyHolder
from memagent.serve.listen import ForeignRequest, HostCheck
from memagent.serve.wire import INTERNAL, ApiError
from memagent.types import Usage

if TYPE_CHECKING:
    from memagent.types import EngineLoad

Measure = tuple[str, str, float]
"""Name, meaning and value of a metric."""
PROBES = ("/health", "/metrics")
"""Monitors send them all the time: successful ones are no lines."""
MAX_PATH = 200
"""Characters of a path that a line shows; clients choose them."""


class Metrics(Collector):
    """What happened since the server started, and how busy it is.

    Each server has its own registry, so that several can run in one process.
    """

    def __init__(
        self,
        gauges: Callable[[], Iterable[Measure]],
        counters: Callable[[], Iterable[Measure]] = tuple,
    ) -> None:
        """`gauges` and further `counters` are read when the metrics are."""
        self._requests: Counter[tuple[str, int]] = Counter()
        self._usage = Usage()
        self._gauges = gauges
        self._counters = counters
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def count_request(self, path: str, status: int) -> None:
        """Count a request and the status of its response."""
        self._requests[path, status] += 1

    def count_tokens(self, usage: Usage) -> None:
        """Count the tokens of completed replies."""
        self._usage += usage

    def render(self, accept: str = "") -> tuple[bytes, str]:
        """The metrics and their content type, in the format that an Accept header asks for."""
        encode, content_type = choose_encoder(accept)
        return encode(self._registry), content_type

    def collect(self) -> Iterator[Metric]:
        """The metrics, as the registry reads them."""
        requests = CounterMetricFamily(
            "memagent_requests", "Requests by path and status.", labels=("path", "status")
        )
        for (path, status), count in sorted(self._requests.items()):
            requests.add_metric((path, str(status)), count)
        yield requests
        used = self._usage
        for name, text, value in (
            ("replies", "Completed replies.", used.calls),
            ("prompt_tokens", "Tokens of prompts.", used.prompt_tokens),
            ("completion_tokens", "Tokens of replies.", used.completion_tokens),
            (
                "prefix_cache_hit_tokens",
                "Tokens of prompts found in the cache.",
                used.cached_tokens,
            ),
            *self._counters(),
        ):
            yield CounterMetricFamily(f"memagent_{name}", text, value=value)
        for name, text, value in self._gauges():
            yield GaugeMetricFamily(f"memagent_{name}", text, value=value)


def load_gauges(load: EngineLoad) -> list[Measure]:
    """How busy a local engine is."""
    return [
        ("requests_running", "Replies being generated.", load.num_running),
        ("requests_waiting", "Replies waiting for slots.", load.num_waiting),
        ("cache_slots", "Capacity of the cache in tokens.", load.num_slots),
        ("cache_slots_used", "Tokens in the cache, in use or kept.", load.num_used_slots),
    ]


# --- the lines of requests ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """A request that has ended."""

    client: str
    method: str
    path: str
    """As it was sent, percent-encoded."""
    status: int
    seconds: float
    usage: Usage
    """Tokens of the replies that were completed."""
    request_id: str
    """As the client gets it in the header `x-request-id`."""
    is_cut: bool
    """True if the shutdown of the server ended it."""

    @property
    def is_probe(self) -> bool:
        """Whether it is a monitor's request, and succeeded."""
        return self.path in PROBES and self.status == 200

    def __str__(self) -> str:
        path = self.path if len(self.path) <= MAX_PATH else f"{self.path[:MAX_PATH]}..."
        used = self.usage
        tokens = f", {used.prompt_tokens:,} + {used.completion_tokens:,} tokens"
        cut = ", cut off by the shutdown" if self.is_cut else ""
        return (
            f"{self.client} {self.method} {path} {self.status}{tokens if used.calls else ''}, "
            f"{self.seconds:.2f} s, {self.request_id}{cut}"
        )


OnRequest = Callable[[RequestRecord], None]


def path_of(scope: Scope) -> str:
    """The path of a request as it was sent, in visible ASCII."""
    raw = scope.get("raw_path") or scope["path"].encode()
    return "".join(chr(byte) if 32 < byte < 127 else f"%{byte:02X}" for byte in raw)


def client_of(scope: Scope) -> str:
    """The address of the client."""
    client = scope.get("client")
    return str(client[0]) if client else "-"


# --- the guard --------------------------------------------------------------------------------------


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


class Route(NamedTuple):
    """A path and its handler, and how the guard treats requests for it."""

    method: str
    path: str
    handler: Callable[..., Awaitable[Response]]
    needs_key: bool = True
    is_form: bool = False
    """Whether its body is a form; bodies of other POST requests are JSON."""
    is_download: bool = False
    """Whether its response is a file, which takes a place."""
    more: dict[str, Any] | None = None
    """What its signature does not tell of it, in OpenAPI's words."""


CheckKey = Callable[[Headers], KeyHolder]
"""Who sends a request; raises ApiError where the key is missing or wrong."""


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


class Guard:
    """The outermost middleware. It holds a request's place until the last byte is sent."""

    def __init__(
        self,
        app: ASGIApp,
        routes: Sequence[Route],
        config: ServeConfig,
        check_key: CheckKey,
        gate: AdmissionGate,
        metrics: Metrics,
        on_request: OnRequest | None,
    ) -> None:
        self._app = app
        self._known = sorted({route.path.partition("/{")[0] for route in routes})
        """Paths that are counted by name; what clients invent is counted together."""
        self._types = {
            route.path: FORM_TYPE if route.is_form else JSON_TYPE
            for route in routes
            if route.method == "POST"
        }
        """The content type of paths whose POST has a body and takes a place."""
        self._without_key = {route.path for route in routes if not route.needs_key}
        self._downloads = tuple(
            route.path.rpartition("}")[2] for route in routes if route.is_download
        )
        self._hosts = HostCheck(config.host, config.allowed_hosts)
        self._bodies = _Bodies(config.max_request_bytes)
        self._check_key = check_key
        self._gate = gate
        self._metrics = metrics
        self._on_request = on_request
        self._key_gates: dict[tuple[str, int], AdmissionGate] = {}
        """The gates of holders with a limit of their own, by id and limit, which may change."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        exchange = _Exchange(scope, receive, send)
        state = scope.setdefault("state", {})
        state.update(usage=Usage(), request_id=exchange.request_id)
        started = time.monotonic()
        is_cut = False
        try:
            await self._guarded(scope, exchange)
        except ApiError as error:
            await error.response()(scope, exchange.receive, exchange.send)
        except asyncio.CancelledError:
            if not self._gate.is_draining:
                raise
            is_cut = True
            await _cut_off(scope, exchange)
        except Exception:  # a bug: the framework logs it
            if not exchange.is_started:
                await INTERNAL.response()(scope, exchange.receive, exchange.send)
            raise
        finally:
            path = scope["path"]
            is_at = (known for known in self._known if f"{path}/".startswith(f"{known}/"))
            self._metrics.count_request(next(is_at, "other"), exchange.status)
            if self._on_request is not None:
                self._on_request(
                    RequestRecord(
                        client=client_of(scope),
                        method=scope["method"],
                        path=path_of(scope),
                        status=exchange.status,
                        seconds=time.monotonic() - started,
                        usage=state["usage"],
                        request_id=exchange.request_id,
                        is_cut=is_cut,
                    )
                )

    async def _guarded(self, scope: Scope, exchange: _Exchange) -> None:
        headers = Headers(scope=scope)
        try:
            self._hosts.check(headers)
        except ForeignRequest as error:
            raise ApiError(403, str(error), code=error.code) from None
        path = scope["path"]
        holder = KeyHolder() if path in self._without_key else self._check_key(headers)
        scope["state"]["holder"] = holder
        has_body = scope["method"] == "POST" and path in self._types
        if not has_body and not path.endswith(self._downloads):
            await self._app(scope, exchange.receive, exchange.send)
            return
        self._gate.check_open()
        limit = holder.limits.max_concurrency
        own_place: AbstractContextManager[None] = nullcontext()
        if limit is not None:
            gate = self._key_gates.setdefault((holder.id, limit), AdmissionGate(limit))
            own_place = gate.admit()
        with own_place:
            if has_body:
                expected = self._types[path]
                kind = headers.get("content-type", "").partition(";")[0].strip().lower()
                # cross-site requests of web pages cannot have the type of JSON
                if kind != expected:
                    raise ApiError(
                        400, f"send `Content-Type: {expected}`", code="invalid_content_type"
                    )
                body = await self._bodies.receive(exchange.receive, holder)
                if body is None:  # the client has left
                    return
                exchange.body = body
                del body  # a reading takes long, and does not need it
            with self._gate.admit():
                await self._app(scope, exchange.receive, exchange.send)


class _Exchange:
    """A request and its response on their way.

    It records the status and adds the id of the request. A response to half a request closes the connection, so that
    the server does not read the rest.
    """

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        has_body = "transfer-encoding" in headers or headers.get("content-length", "0") != "0"
        self.request_id = f"req_{secrets.token_hex(12)}"
        self.status = CLIENT_GONE
        self.is_started = False
        self.body: bytes | None = None
        """A body that has arrived, until it is received again."""
        self._has_arrived = not has_body
        self._receive = receive
        self._send = send

    async def receive(self) -> Message:
        if self.body is not None:
            body, self.body = self.body, None
            return {"type": "http.request", "body": body, "more_body": False}
        message = await self._receive()
        self._has_arrived |= not message.get("more_body", False)
        return message

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.is_started = True
            closing = () if self._has_arrived else ((b"connection", b"close"),)
            own = (REQUEST_ID.encode(), self.request_id.encode())
            message = {**message, "headers": [*message.get("headers", ()), own, *closing]}
        await self._send(message)


async def _cut_off(scope: Scope, exchange: _Exchange) -> None:
    """Answer a request that ends with the server: with an error, in a stream as its last event."""
    error = shutting_down()
    with suppress(asyncio.CancelledError):  # the server cancels what is left when it closes
        if not exchange.is_started:
            await error.response()(scope, exchange.receive, exchange.send)
        else:
            event = f"data: {json.dumps(error.body())}\n\n".encode()
            await exchange.send({"type": "http.response.body", "body": event, "more_body": False})


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
