"""Host and Origin headers, so that a web page cannot use the server through a visitor's browser.

A page whose own name is made to point to this machine sends that name as the host; a page of another site
sends its origin. Programs send neither.
"""

from __future__ import annotations

import ipaddress
import socket
from urllib.parse import urlsplit

from starlette.datastructures import Headers

LOCAL_NAME = "localhost"


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
