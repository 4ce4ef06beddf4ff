"""What every HTTP server here needs: a socket to listen on, uvicorn with time limits, and a check of hosts and origins.

with bound("127.0.0.1", 8000) as listener:
    with port_errors("127.0.0.1", 8000):
        listener.listen()
    print(url_of("127.0.0.1", listener))

A web page must not use a server through its visitor's browser. A page whose own name is made to point to this
machine sends that name as the host; a page of another site sends its origin. Programs send neither.
"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import uvicorn
from starlette.datastructures import Headers
from starlette.types import ASGIApp
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from memagent.errors import ConfigError

LOCAL_NAME = "localhost"
BACKLOG = 2048
KEEP_ALIVE_SECONDS = 75
"""Longer than clients keep idle connections, so that none is closed during a request."""
CLOSE_SECONDS = 1
"""Time to close connections when a server shuts down."""
HEADER_SECONDS = 20.0
"""Time from the first byte of a request, or from connecting, to the end of its headers."""
WRITE_SECONDS = 60.0
"""Time in which a client has to take what was written to it, which is a piece of a response."""


@contextmanager
def bound(host: str, port: int) -> Iterator[socket.socket]:
    """A socket on a host and port. Raises ConfigError if they are taken.

    It does not listen yet, so that clients are refused while a model loads.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        with port_errors(host, port):
            listener.bind((host, port))
        yield listener


@contextmanager
def port_errors(host: str, port: int) -> Iterator[None]:
    """Turn errors of binding and listening into a ConfigError."""
    try:
        yield
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"port {port} of {host} is taken by another program; choose another `port`, or 0 for "
                "any free one"
            ) from None
        raise ConfigError(
            f"cannot listen on {host} port {port} ({error.strerror or error}); choose others with "
            "`host` and `port`"
        ) from None


def url_of(host: str, listener: socket.socket) -> str:
    """The address of a socket of `bound`, such as http://127.0.0.1:8000."""
    name = f"[{host}]" if ":" in host else host
    return f"http://{name}:{listener.getsockname()[1]}"


def server_config(app: ASGIApp) -> uvicorn.Config:
    """uvicorn's settings for an application: nothing is logged, headers have a time limit."""
    return uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        server_header=False,
        http=DeadlineProtocol,
        lifespan="off",
        ws="none",
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=CLOSE_SECONDS,
    )


class DeadlineProtocol(AutoHTTPProtocol):  # type: ignore[misc, valid-type]  # chosen at run time
    """uvicorn's HTTP protocol with time limits for headers, and for a client that does not take what it is sent."""

    _deadline: asyncio.TimerHandle | None = None
    _write_deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=0)  # whatever is not sent yet counts as waiting
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._unwatch()
        self._unwatch_writing()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        # not closed, which would wait until all is sent
        self._write_deadline = self.loop.call_later(WRITE_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        self._unwatch_writing()
        super().resume_writing()

    def _unwatch_writing(self) -> None:
        if self._write_deadline is not None:
            self._write_deadline.cancel()
            self._write_deadline = None

    def _watch(self) -> None:
        """Start the time limit between requests, and end it when a request has its headers."""
        if self.cycle is not None and not self.cycle.response_complete:
            self._unwatch()
        elif self._deadline is None:
            self._deadline = self.loop.call_later(HEADER_SECONDS, self._close)

    def _unwatch(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _close(self) -> None:
        self._deadline = None
        if self.cycle is None or self.cycle.response_complete:
            self.transport.close()


class ForeignRequest(Exception):
    """A request that is not meant for this server; `code` is what an API calls it."""

    def __init__(self, message: str, *, code: str) -> None:
        super().__init__(message)
        self.code = code


class HostCheck:
    """Refuses hosts that are not this server's and origins of other sites.

    Example: HostCheck("127.0.0.1", None).check(Headers({"host": "localhost:8000"}))
    """

    def __init__(self, host: str, allowed_hosts: str | None) -> None:
        """`host` is what the server listens on."""
        self.is_local = _is_loopback(host)
        """Whether only this machine can connect."""
        named = [name.strip() for name in (allowed_hosts or "").split(",")]
        self._names = {
            name.lower().rstrip(".") for name in (host, socket.gethostname(), *named) if name
        }

    def check(self, headers: Headers) -> None:
        """Raise ForeignRequest for a foreign host or origin."""
        hosts = headers.getlist("host")
        if len(hosts) > 1 or not all(self._is_own(host) for host in hosts):
            raise ForeignRequest(
                "this server has another name; use its address, or list the name in `allowed_hosts`",
                code="host_not_allowed",
            )
        for origin in headers.getlist("origin"):
            address = _authority(origin.partition("://")[2])
            if address not in map(_authority, hosts) and not _is_loopback(
                address.partition("/")[0]
            ):
                raise ForeignRequest(
                    "requests of other web sites are refused", code="origin_not_allowed"
                )

    def _is_own(self, host: str) -> bool:
        name = _name(host)
        return name in self._names or _is_loopback(host) or _is_address(name)


def _authority(value: str) -> str:
    return value.strip().lower()


def _name(authority: str) -> str:
    """The name or address in `name:port`; empty where there is none, or more than that."""
    try:
        parts = urlsplit(f"//{authority.strip()}")
        _ = parts.port  # raises where it is no number
    except ValueError:
        return ""
    return "" if "@" in parts.netloc else (parts.hostname or "").rstrip(".")


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _is_loopback(authority: str) -> bool:
    name = authority if _is_address(authority) else _name(authority)
    if name == LOCAL_NAME or name.endswith(f".{LOCAL_NAME}"):
        return True
    return _is_address(name) and ipaddress.ip_address(name).is_loopback
