"""Addresses of endpoints: where they are set, what may be shown of them, which are valid."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Mapping
from functools import lru_cache
from typing import Any, NamedTuple
from urllib.parse import urlsplit, urlunsplit

from pydantic import SecretStr

from memagent.config import EngineConfig
from memagent.errors import ConfigError

ADDRESS_VARIABLES = ("MEMAGENT_BASE_URL", "OPENAI_BASE_URL")
"""Where an address is looked for, in this order, when none is given."""
OPENAI_URL = "https://api.openai.com/v1"
"""Where calls go that name no address; OPENAI_API_KEY is for this host where OPENAI_BASE_URL is not set."""
NO_KEY = "none"
"""Sent where no key is set: local servers take anything, and the header must not be empty."""
NO_ENDPOINT = (
    "no endpoint is set; give `base_url` (and `api_key`), set MEMAGENT_BASE_URL, or use "
    "`engine=local:memagent-135m` for a small model on this machine"
)


LOOPBACK = ("localhost", "127.0.0.1", "::1")


class Address(NamedTuple):
    """Where an endpoint is, and the key for it."""

    base_url: str | None
    api_key: str | SecretStr | None


def endpoint_from(
    environment: Mapping[str, str],
    base_url: str | None = None,
    api_key: str | SecretStr | None = None,
) -> Address:
    """Address and key as given, else from the environment. A key goes only to the host it was set for."""
    base_url = base_url or next(filter(None, map(environment.get, ADDRESS_VARIABLES)), None)
    usual = base_url or OPENAI_URL
    return Address(base_url, api_key or _key_for(usual, environment, free_for=usual))


def key_of_named(named: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """The key for the address among settings that a file names, as a setting; empty where the file has the key, or no address.

    It is that of the user's own settings, `given`, if they have this address; else one that was set for this address in the
    environment; else none.
    """
    address = named.get("base_url")
    if address is None or named.get("api_key") is not None:
        return {}
    if origins(str(address)) <= origins(str(given.get("base_url") or "")):
        return {"api_key": given["api_key"]} if given.get("api_key") is not None else {}
    return {"api_key": _key_for(str(address), os.environ) or NO_KEY}


def _key_for(
    base_url: str, environment: Mapping[str, str], *, free_for: str | None = None
) -> str | None:
    """The key in the environment that was set for the hosts of an address.

    MEMAGENT_API_KEY without an address of its own is for whatever endpoint the user names, `free_for`.
    """
    pairs = (
        (environment.get("MEMAGENT_BASE_URL") or free_for, environment.get("MEMAGENT_API_KEY")),
        (environment.get("OPENAI_BASE_URL") or OPENAI_URL, environment.get("OPENAI_API_KEY")),
        (environment.get("URL"), environment.get("API_KEY")),
    )
    hosts = origins(base_url)
    return next((key for url, key in pairs if key and url and hosts <= origins(url)), None)


def origins(base_url: str) -> frozenset[str]:
    """Scheme, host and port of each address: `http://localhost:8000`."""
    return frozenset(origin(address) for address in addresses(base_url))


@lru_cache(maxsize=256)
def origin(address: str) -> str:
    """Scheme, host and port of an address; an address that is not valid is its own."""
    try:
        parts = urlsplit(address)
        port = parts.port or {"http": 80, "https": 443}.get(parts.scheme)
    except ValueError:
        return address
    return f"{parts.scheme}://{parts.hostname}:{port}" if parts.hostname else address


def addresses(base_url: str | None) -> tuple[str, ...]:
    """The addresses in a setting that may hold several, separated by commas."""
    return tuple(filter(None, (part.strip() for part in (base_url or "").split(","))))


def is_here(base_url: str | None) -> bool:
    """Whether all addresses are those of this machine."""
    return all(urlsplit(one).hostname in LOOPBACK for one in addresses(base_url or OPENAI_URL))


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


def likely_address(url: str) -> str | None:
    """The address that was probably meant by one where nothing is found; None if it looks right.

    >>> likely_address("http://localhost:8000")
    'http://localhost:8000/v1'
    >>> likely_address("http://localhost:8000/v1/chat/completions")
    'http://localhost:8000/v1'
    """
    parts = urlsplit(public_url(url))
    path = parts.path.rstrip("/").removesuffix("/chat/completions").removesuffix("/completions")
    path = path.removesuffix("/models") or "/v1"
    meant = urlunsplit((parts.scheme, parts.netloc, path, "", ""))
    return None if meant == public_url(url).rstrip("/") else meant


def check_address(config: EngineConfig) -> None:
    """Raise ConfigError where no endpoint can be called with these settings."""
    key = config.api_key.get_secret_value() if config.api_key else ""
    if not (key.isascii() and key.isprintable()):
        raise ConfigError(
            "the key holds a line break or a character that no key has; check `api_key` or "
            "MEMAGENT_API_KEY"
        )
    if config.base_url is None:
        if config.api_key is None:
            raise ConfigError(NO_ENDPOINT)
        return
    if not addresses(config.base_url):
        raise ConfigError("the address of the endpoint is empty; give one, or leave `base_url` out")
    for address in addresses(config.base_url):
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
        if parts.username or parts.password:  # they cannot be sent beside a key
            raise ConfigError(
                f"leave user and password out of the address {public_url(address)}; "
                "a key goes into `api_key` or MEMAGENT_API_KEY"
            )


# --- windows that servers tell of -----------------------------------------------------------------

# Ollama loads a model with the first call for it, and with another window where the last call set one. So it is asked to
# load the model as a call would have it, which the first call needs anyway. Its /v1 takes no window (`num_ctx`): a
# model that was loaded with one is loaded again without it.


Page = Callable[..., Awaitable[Any]]
"""A page of the server by method, path and body, parsed; an empty object where there is none."""


async def told_window(page: Page, model: str) -> int | None:
    """Tokens that the server says a prompt and its reply may have; None where it says nothing."""
    llama_cpp, lm_studio, ollama = await asyncio.gather(
        page("GET", "/props"), page("GET", "/api/v0/models"), page("GET", "/api/ps")
    )
    try:
        if "models" in ollama:
            await page("POST", "/api/generate", {"model": model})
            ollama = await page("GET", "/api/ps")
        told = [llama_cpp.get("default_generation_settings", {}).get("n_ctx")]
        for entry in [*lm_studio.get("data", ()), *ollama.get("models", ())]:
            if {model, f"{model}:latest"} & {entry.get("id"), entry.get("name")}:
                told += [entry.get("loaded_context_length"), entry.get("context_length")]
    except (AttributeError, TypeError):  # another server, with pages of its own
        return None
    return next((window for window in told if type(window) is int and window > 0), None)
