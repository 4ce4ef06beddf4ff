"""Addresses of endpoints: where they are set, what may be shown of them, which are valid."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple
from urllib.parse import urlsplit, urlunsplit

from pydantic import SecretStr

from memagent.config import EngineConfig
from memagent.errors import ConfigError

ENVIRONMENT = (
    ("MEMAGENT_BASE_URL", "MEMAGENT_API_KEY"),
    ("OPENAI_BASE_URL", "OPENAI_API_KEY"),
    ("URL", "API_KEY"),
)
"""Where address and key are looked for, in this order, when they are not given."""


class Address(NamedTuple):
    """Where an endpoint is, and the key for it."""

    base_url: str | None
    api_key: str | SecretStr | None


def endpoint_from(
    environment: Mapping[str, str],
    base_url: str | None = None,
    api_key: str | SecretStr | None = None,
) -> Address:
    """Address and key as given, else from the environment; an address's own key comes first."""
    pairs = [(environment.get(url), environment.get(key)) for url, key in ENVIRONMENT]
    base_url = base_url or next((url for url, _ in pairs if url), None)
    keys = [key for url, key in pairs if key and url == base_url]
    keys += [key for _, key in pairs if key]
    return Address(base_url, api_key or next(iter(keys), None))


def addresses(base_url: str | None) -> tuple[str, ...]:
    """The addresses in a setting that may hold several, separated by commas."""
    return tuple(filter(None, (part.strip() for part in (base_url or "").split(","))))


def public_url(url: str) -> str:
    """An address, or several, without user, password and query: they can be secrets."""
    if "," in url:
        return ",".join(public_url(address) for address in addresses(url))
    parts = urlsplit(url)
    if not parts.hostname:
        return url
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    host = f"{host}:{parts.port}" if parts.port else host
    return urlunsplit((parts.scheme, host, parts.path, "", ""))


def check_address(config: EngineConfig) -> None:
    """Raise ConfigError where no endpoint can be called with these settings."""
    if config.base_url is None:
        if config.api_key is None:
            raise ConfigError(
                "no endpoint is set; give `base_url` (and `api_key`), set MEMAGENT_BASE_URL, or use "
                "`engine=local:smollm2-135m` for a small model on this machine"
            )
        return
    if not addresses(config.base_url):
        raise ConfigError("the address of the endpoint is empty; give one, or leave `base_url` out")
    for address in addresses(config.base_url):
        _check_one(address)


def _check_one(address: str) -> None:
    try:
        parts = urlsplit(address)
        _ = parts.port
    except ValueError as error:
        raise ConfigError(f"the address of the endpoint is not valid: {error}") from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        shown = public_url(address)
        raise ConfigError(
            f"{shown!r} is no endpoint address; it looks like http://localhost:8000/v1"
        )
    if parts.username or parts.password:  # the client library cannot send them beside a key
        raise ConfigError(
            f"leave user and password out of the address {public_url(address)}; "
            "a key goes into `api_key` or MEMAGENT_API_KEY"
        )
