"""A socket to listen on, with errors a user can act on, and what every server has in common.

with bound("127.0.0.1", 8000) as listener:
    with port_errors("127.0.0.1", 8000):
        listener.listen()
    print(url_of("127.0.0.1", listener))
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from starlette.types import ASGIApp

from memagent.errors import ConfigError
from memagent.web.deadline import deadline_protocol

BACKLOG = 2048
KEEP_ALIVE_SECONDS = 75
"""Longer than clients keep idle connections, so that none is closed during a request."""
CLOSE_SECONDS = 1
"""Time to close connections when a server shuts down."""


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
        http=deadline_protocol(),
        lifespan="off",
        ws="none",
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=CLOSE_SECONDS,
    )
