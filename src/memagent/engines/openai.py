"""The endpoint engine: any server that speaks OpenAI's chat completions, Azure included.

Transient failures (no connection, stalls, 429, 5xx, broken replies) are retried until `patience`
runs out; refusals (key, model, size) are reported at once. The key appears in no
message, trace or log. Several addresses, separated by commas, are one engine: see `balance.py`.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any, NamedTuple, TypeVar
from urllib.parse import urlsplit
from weakref import WeakKeyDictionary

import httpx
from httpx_aiohttp import HttpxAiohttpClient
from pydantic import SecretStr

from memagent import blocking
from memagent.config import EngineConfig
from memagent.engines import store
from memagent.engines.addresses import (
    NO_KEY,
    OPENAI_URL,
    addresses,
    check_address,
    endpoint_from,
    is_here,
    likely_address,
    origin,
    origins,
    public_url,
    told_window,
)
from memagent.engines.base import BaseEngine, Serving
from memagent.engines.limit import Failure, FailureKind, Patience, RetryListener, Slots, retry_after
from memagent.errors import ConfigError, EngineError, EngineRefused, MemagentError, PromptTooLong
from memagent.tokens.control import Shield, ShieldedMessages, cached_tokenizer
from memagent.types import Completion, Message, Sampling, Usage

T = TypeVar("T")

AZURE_API_VERSION = "2024-10-21"
CONNECT_SECONDS = 10.0
MODELS_SECONDS = 5.0
PLAIN = {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
"""Values without effect; without them a server takes those of the model's generation_config.json."""
MAX_REPLY_BYTES = 64_000_000
"""A longer reply is cut off and counts as failed."""
MAX_COUNT = 1_000_000_000
"""Counts of tokens above this are not believed."""
TRANSIENT_STATUSES = frozenset({408, 409, 425, 429})
MEMAGENT = "memagent"
"""The owner that `memagent serve` reports for its model."""
SALTED_OWNERS = frozenset({MEMAGENT, "vllm"})
"""What servers that know `cache_salt` report as the owner of their models."""
OPENAI_HEADERS = {"OpenAI-Organization": "OPENAI_ORG_ID", "OpenAI-Project": "OPENAI_PROJECT_ID"}

_azure_path = re.compile(r"/openai/deployments/([^/]+)/?$")
_window_words = re.compile(
    r"context.?length|context window|context size|maximum context|too long|too many tokens|max_model_len",
    re.I,
)


def open_endpoint(model: str, **settings: Any) -> EndpointEngine:
    """An endpoint engine that knows what is served where the endpoint says so.

    Address and key come from the settings or the environment.
    """
    address = endpoint_from(os.environ, settings.get("base_url"), settings.get("api_key"))
    base_url = ",".join(addresses(address.base_url)) or address.base_url
    given = {**settings, "model": model, "base_url": base_url, "api_key": address.api_key}
    config = EngineConfig.parse(given)
    from memagent.engines.balance import BalancedEngine  # here, because it is built on this module

    engine = EndpointEngine(config) if len(addresses(base_url)) < 2 else BalancedEngine(config)
    blocking.run(_inspect(engine))
    return engine


def open_endpoint_at(model: str, **settings: Any) -> EndpointEngine:
    """An engine for one model at one address; the endpoint is not asked what it serves."""
    address = endpoint_from(os.environ, settings.get("base_url"), settings.get("api_key"))
    given = {**settings, "model": model, "base_url": address.base_url, "api_key": address.api_key}
    return EndpointEngine(EngineConfig.parse(given))


async def _inspect(engine: EndpointEngine) -> None:
    """Ask what is served, over connections that are closed afterwards."""
    try:
        await engine.inspect()
    finally:
        await engine.aclose()


class Answer(NamedTuple):
    """The response to a request that is not for a completion."""

    status: int
    """HTTP status; 200 for success."""
    text: str


class EndpointEngine(BaseEngine):
    """An OpenAI-compatible endpoint."""

    limits_itself = True

    def __init__(self, config: EngineConfig, on_retry: RetryListener | None = None) -> None:
        check_address(config)
        self.config = config
        self.model = config.model or _azure_deployment(config)
        self.tokenizer = self.model
        self.served_window: int | None = None  # until `inspect` is called
        self.calls_at_once = config.concurrency
        self.serving = Serving()
        self._read: Callable[[bytes], Any] = json.loads
        """Parses a reply, not further than JSON."""
        self.endpoints: tuple[EndpointEngine, ...] = (self,)
        """One for each address."""
        self.on_retry = on_retry
        self._is_plain = False
        self._policy_version: int | None = None
        """The version that completions carry; None while the weights do not change."""
        self._has_answered = False
        self._unlisted: Exception | None = None
        """Why the endpoint did not list its models."""
        self._limit_name = "max_tokens"
        self._encodes_as_text = False
        """True of `memagent serve`: control strings in messages are text there."""
        self._knows_salt = False
        """True of servers that keep the cached prompts of different salts apart."""
        self._shield: tuple[tuple[str, str], Shield] | None = None
        """The control strings of a model with its tokenizer."""
        # connections belong to the event loop they were opened in
        self._clients: WeakKeyDictionary[asyncio.AbstractEventLoop, _Client] = WeakKeyDictionary()

    @property
    def address(self) -> str:
        """The endpoint's address without credentials, fit to be shown."""
        return public_url(self.config.base_url or "the default OpenAI endpoint")

    @property
    def kept_address(self) -> str | None:
        """The address that a run is resumed with, without credentials; None if it is of no use then."""
        return public_url(self.config.base_url) if self.config.base_url else None

    async def complete(self, messages: Sequence[Message], sampling: Sampling) -> Completion:
        """One reply, retried until it comes or patience runs out."""
        if not self.model:
            raise ConfigError("no model is chosen; open the engine as openai:MODEL")
        patience = Patience(self.config.patience)
        result = await self._retried(patience, lambda: self._attempt(messages, sampling))
        return replace(result, num_attempts=patience.num_attempts + result.num_attempts)

    async def embed(self, texts: Sequence[str]) -> list[list[float]]:
        """A vector for each text, retried until they come or patience runs out."""
        body = {"model": self.model, "input": list(texts), "encoding_format": "float"}
        parse = partial(parse_embeddings, num=len(texts))
        patience = Patience(self.config.patience)
        return await self._retried(patience, lambda: self._post("/embeddings", body, parse))

    async def inspect(self) -> None:
        """Ask the endpoint what it serves: the model if only one, its tokenizer, its window.

        vLLM reports all of this; others report less, and what they do not report stays as it is.
        """
        models = await self.list_models()
        self._learn(models)
        if models:
            await self._learn_window()

    async def _learn_window(self) -> None:
        """Take over the window where the server tells it elsewhere."""
        base = (self.config.base_url or OPENAI_URL).rstrip("/")
        if self.served_window is None and base != OPENAI_URL:
            page = partial(self._page, base.removesuffix("/v1"))
            self.served_window = await told_window(page, self.model)

    async def _page(self, root: str, method: str, path: str, body: Any = None) -> Any:
        """A page beside OpenAI's API; an empty object where it cannot be read. Loading a model takes its time."""
        seconds = self.config.timeout if body else min(MODELS_SECONDS, self.config.timeout)
        try:
            return json.loads(await self._client().request(method, root + path, seconds, body))
        except (_BadStatus, EngineRefused, *UNREACHABLE, *UNREADABLE):
            return {}

    def _learn(self, models: list[dict[str, Any]]) -> None:
        """Take over what the endpoint reports about its models."""
        if not self.model:
            self.model = self._only_model(models)
        card = next((entry for entry in models if entry["id"] == self.model), {})
        if isinstance(root := card.get("root"), str) and self._may_open(root):
            self.tokenizer = root
        elif not self.tokenizer and self._may_open(self.model):
            self.tokenizer = self.model
        if card.get("owned_by") == MEMAGENT:  # a model of `memagent serve` by a name that we know
            self.reading_defaults = store.reading_defaults(self.model)
            self._encodes_as_text = True
        self._knows_salt = card.get("owned_by") in SALTED_OWNERS
        if (window := _count(card.get("max_model_len"))) is not None and window > 0:
            self.served_window = window

    def _may_open(self, name: str) -> bool:
        """Whether a tokenizer that the endpoint names is opened: a folder if it runs on this machine too, and
        nothing is fetched that the user did not name."""
        if os.path.exists(os.path.expanduser(name)):
            return is_here(self.config.base_url)
        return name == self.config.model or cached_tokenizer(name) is not None

    async def list_models(self) -> list[dict[str, Any]]:
        """What the endpoint reports about its models; empty when it reports nothing. Never raises."""
        client = self._client()
        timeout = min(MODELS_SECONDS, self.config.timeout)
        try:
            page = json.loads(await client.request("GET", "/models", timeout))
            entries = list(page["data"])
        except (_BadStatus, *UNREACHABLE, *UNREADABLE, KeyError, TypeError) as error:
            self._unlisted = error
            return []
        return [
            entry
            for entry in entries
            if isinstance(entry, dict) and isinstance(entry.get("id"), str)
        ]

    def switch_model(self, name: str, policy_version: int | None = None) -> None:
        """Request another model from now on, such as an adapter that the server has loaded.

        Completions of calls that start now carry the version.
        """
        for engine in (self, *self.endpoints):
            engine.model = name
            engine._policy_version = policy_version

    def sample_plainly(self) -> None:
        """Sample from the model's own distribution, for training: no default of the server applies, and an
        empty reply is one."""
        self.serving = None
        for engine in (self, *self.endpoints):
            engine._is_plain = True

    async def post(self, path: str, body: Mapping[str, Any]) -> Answer:
        """The response to a request that is not for a completion; retried while there is no connection."""

        async def attempt() -> Answer | Failure:
            try:
                reply = await self._client().request("POST", path, self.config.timeout, body)
                return Answer(200, reply.decode("utf-8", "replace"))
            except _BadStatus as error:
                return Answer(error.status, self._clean(str(error)))
            except (*UNREACHABLE, *UNREADABLE) as error:
                return Failure(kind="unreachable", reason=self._clean(_cause(error)))

        return await self._retried(Patience(self.config.patience), attempt)

    async def aclose(self) -> None:
        """Close the connections of this event loop."""
        client = self._clients.pop(asyncio.get_running_loop(), None)
        if client:
            await client.aclose()

    def _client(self) -> _Client:
        loop = asyncio.get_running_loop()
        client = self._clients.get(loop)
        if client is None:
            # only the connections: what a subclass has besides may be used from other loops
            blocking.when_loop_ends(loop, partial(EndpointEngine.aclose, self))
            client = self._clients[loop] = _Client(self.config)
        return client

    async def _retried(
        self, patience: Patience, attempt: Callable[[], Awaitable[T | Failure]]
    ) -> T:
        """The result of an attempt that succeeds. Raises EngineError when patience has run out."""
        while True:
            result = await attempt()
            if not isinstance(result, Failure):
                self._has_answered = True
                return result
            self._has_answered |= result.kind != "unreachable"
            delay = patience.delay(result, has_answered=self._has_answered)
            if delay is None:
                raise EngineError(self._gave_up(result, patience))
            if self.on_retry:
                self.on_retry(result, delay)
            await asyncio.sleep(delay)

    async def _attempt(
        self, messages: Sequence[Message], sampling: Sampling
    ) -> Completion | Failure:
        """One request: its completion, or a failure that can be retried. Raises EngineRefused.

        Control strings in the messages are broken on the way; see `tokens/control.py`.
        """
        sent, version = self._shielded(messages), self._policy_version
        result = await self._post(
            "/chat/completions", self._body(sent.messages, sampling), parse_completion
        )
        if isinstance(result, Completion) and version is not None:
            result = replace(result, policy_version=version)
        if isinstance(result, Completion) and result.served == self.model:
            result = replace(result, served=None)
        if isinstance(result, Failure) or not sent.originals:
            return result
        reasoning = None if result.reasoning is None else sent.restored(result.reasoning)
        return replace(result, text=sent.restored(result.text), reasoning=reasoning)

    def _shielded(self, messages: Sequence[Message]) -> ShieldedMessages:
        if not self.config.shield_text or self._encodes_as_text:
            return ShieldedMessages(messages, {})
        key = (self.model, self.tokenizer)
        if self._shield is None or self._shield[0] != key:
            self._shield = key, Shield.of_model(*key)
        return self._shield[1].shielded(messages)

    async def _post(
        self,
        path: str,
        body: dict[str, Any],
        parse: Callable[[Any], T],
        on_part: Callable[[bytes], None] | None = None,
    ) -> T | Failure:
        """One request: its parsed reply, or a failure that can be retried. Raises EngineRefused.

        `on_part` is called with the parts of a reply that is streamed, as they arrive.
        """
        client = self._client()
        try:
            async with client.slots.slot():
                reply = await client.request("POST", path, self.config.timeout, body, on_part)
            data = self._read(reply)
            if isinstance(data, dict) and data.get("error") and not data.get("choices"):
                raise _BadStatus(200, {}, data)  # as routers in front of several providers do
            return parse(data)
        except _BadStatus as error:
            return await self._classify(error)
        except (httpx.ReadTimeout, httpx.WriteTimeout, httpx.PoolTimeout, TimeoutError):
            reason = f"no reply within {self.config.timeout:g} s"
            return Failure(kind="failed" if self._has_answered else "unreachable", reason=reason)
        except UNREACHABLE as error:
            return Failure(kind="unreachable", reason=self._clean(_cause(error)))
        except UNREADABLE as error:
            reason = self._clean(f"a reply that is not valid ({error})")
            return Failure(kind="failed", reason=reason)

    def _body(self, messages: Sequence[Message], sampling: Sampling) -> dict[str, Any]:
        fields = {
            "model": self.model,
            "messages": messages,
            self._limit_name: sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "seed": sampling.seed,
            "stop": list(sampling.stop) or None,
            "cache_salt": sampling.cache_salt if self._knows_salt else None,
            **(self.config.extra_body or {}),
        }
        given = {name: value for name, value in fields.items() if value is not None}
        return {**(PLAIN if self._is_plain else {}), **given}

    async def _classify(self, error: _BadStatus) -> Failure:
        """A status that can be retried, as a Failure. Raises EngineRefused for the others."""
        status, code = error.status, error.code
        reason = self._clean(f"HTTP {status}: {error}")
        if status == 429 and code == "insufficient_quota":
            raise EngineRefused(f"the endpoint says the quota of this key is spent ({reason})")
        if status in TRANSIENT_STATUSES or status >= 500:
            kind: FailureKind = "busy" if status in (429, 503) else "failed"
            wait = retry_after(error.headers)
            return Failure(kind=kind, reason=reason, retry_after=wait)
        if "max_completion_tokens" in reason and self._limit_name == "max_tokens":
            self._limit_name = "max_completion_tokens"  # newer OpenAI models take only this name
            return Failure(kind="failed", reason=reason, retry_after=0.0)
        is_long = code == "context_length_exceeded" or _window_words.search(reason)
        refusal = PromptTooLong if is_long and status == 400 else EngineRefused
        raise refusal(await self._refusal(status, code, reason))

    async def _refusal(self, status: int, code: str | None, reason: str) -> str:
        if status in (401, 403):
            return f"{self.address} refused the key ({reason}); give `api_key`, or MEMAGENT_API_KEY with MEMAGENT_BASE_URL"
        if status == 404:
            known = [str(entry["id"]) for entry in await self.list_models()]
            if not known:
                return (
                    f"{self.address} has no such path or model ({reason}); {self._address_advice()}"
                )
            names = ", ".join(known[:8])
            return f"{self.address} has no model {self.model!r}; use `model` with one of: {names}"
        if code == "context_length_exceeded" or _window_words.search(reason):
            return (
                f"the prompt is too long for {self.model} ({reason}); raise the window of the server, or begin "
                "a new run with a smaller `window`"
            )
        return f"{self.address} refused the request ({reason})"

    def _only_model(self, models: list[dict[str, Any]]) -> str:
        if len(models) == 1:
            return str(models[0]["id"])
        names = ", ".join(str(entry["id"]) for entry in models[:8])
        why = f"served are {names}" if names else f"{self.address} lists none"
        error = None if models else self._unlisted
        status = error.status if isinstance(error, _BadStatus) else None
        told = "" if error is None else f"HTTP {status}: {error}" if status else _cause(error)
        reason = f" ({self._clean(told)})" if told else ""
        if status in (401, 403):
            raise EngineRefused(
                f"{self.address} refused the key{reason}; give `api_key`, or MEMAGENT_API_KEY with MEMAGENT_BASE_URL"
            )
        if isinstance(error, UNREACHABLE):
            raise ConfigError(
                f"{self.address} cannot be reached{reason}; check `base_url` and that the server runs"
            )
        advice = f"; {self._address_advice()}" if status == 404 else ""
        raise ConfigError(f"say which model: `model=NAME`; {why}{reason}{advice}")

    def _address_advice(self) -> str:
        meant = likely_address(self.config.base_url or OPENAI_URL)
        return f"did you mean `base_url={meant}`?" if meant else "check `base_url`"

    def _gave_up(self, failure: Failure, patience: Patience) -> str:
        if failure.retry_after is not None and failure.retry_after > self.config.patience:
            return (
                f"{self.address} asks to wait {failure.retry_after:.0f} s ({failure.reason}), longer "
                f"than `patience={self.config.patience:g}`"
            )
        attempts = f"{patience.num_attempts} attempt{'s' if patience.num_attempts > 1 else ''}"
        is_there = self._has_answered or failure.kind != "unreachable"
        advice = "" if is_there else "; check `base_url` and that the server runs"
        return f"{self.address} failed for {patience.waited:.0f} s ({attempts}): {failure.reason}{advice}"

    def _clean(self, text: str) -> str:
        """A message on one line, without the key and without control characters."""
        shown = redact(" ".join(text[:10_000].split()), self.config.api_key)[:300]
        return "".join(char if char.isprintable() else "?" for char in shown)


class _Client:
    """The connections of an event loop, and what every request over them carries.

    Requests are written here and not by the HTTP client, which would take as long as all the rest.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.slots = Slots(config.concurrency)
        self._config = config
        hosts = origins(config.base_url or OPENAI_URL)
        self._connections = HttpxAiohttpClient(
            event_hooks=_hooks(hosts),
            verify=_certificates(hosts),
            follow_redirects=True,
            limits=httpx.Limits(),  # calls wait for their slot instead
        )
        self.headers = httpx.Headers(_headers(config))
        self._urls: dict[str, Any] = {}

    async def request(
        self,
        method: str,
        path: str,
        seconds: float,
        body: Mapping[str, Any] | None = None,
        on_part: Callable[[bytes], None] | None = None,
    ) -> bytes:
        """The body of a reply, headers included within so many seconds.

        Raises _BadStatus, one of UNREACHABLE or one of UNREADABLE.
        """
        content = None
        if body is not None:
            options: dict[str, Any] = {"separators": (",", ":"), "allow_nan": False}
            content = json.dumps(body, ensure_ascii=False, **options).encode()
        limits = {"connect": min(CONNECT_SECONDS, seconds)}
        limits |= dict.fromkeys(("read", "write", "pool"), seconds)
        sent = httpx.Request(
            method,
            self._url(path),
            headers=self.headers,
            content=content,
            extensions={"timeout": limits, "on_part": on_part},
        )
        response = await _within(seconds, self._connections.send(sent))
        if not response.is_success:
            try:
                told = json.loads(response.content)
            except UNREADABLE:
                told = response.text
            raise _BadStatus(response.status_code, response.headers, told)
        received: bytes = response.content
        return received

    async def aclose(self) -> None:
        await self._connections.aclose()

    def _url(self, path: str) -> Any:
        """The address of a path below the endpoint's; one that is an address already stays as it is."""
        if path not in self._urls:
            base = (self._config.base_url or OPENAI_URL).rstrip("/")
            url = httpx.URL(path if "://" in path else base + path)
            if _azure_deployment(self._config):
                version = self._config.api_version or AZURE_API_VERSION
                url = url.copy_merge_params({"api-version": version})
            self._urls[path] = url
        return self._urls[path]


class _BadStatus(Exception):
    """A reply that is an error; its text is what the endpoint says of it."""

    def __init__(self, status: int, headers: Mapping[str, str], body: Any) -> None:
        error = body.get("error", body) if isinstance(body, dict) else body
        code, message = (
            (error.get("code"), error.get("message")) if isinstance(error, dict) else (None, None)
        )
        if status == 200:  # the error says its own status
            status = code if type(code) is int and 400 <= code < 600 else 500
        self.status = status
        self.headers = headers
        self.code = code if isinstance(code, str) else None
        super().__init__(message if isinstance(message, str) and message else _shown(error))


def _shown(value: Any) -> str:
    try:
        return str(value or "no reason is given")[:200]
    except RecursionError:
        return "an error that cannot be shown"


UNREACHABLE = (httpx.RequestError, TimeoutError, ssl.SSLError)
"""What a request raises that got no reply."""
UNREADABLE = (ValueError, RecursionError, OverflowError)
"""What parsing a reply of nonsense raises; too deep JSON is a RecursionError."""


class _BadReply(ValueError):
    """A reply that is not read to its end."""


class _LimitedStream(httpx.AsyncByteStream):
    """The body of a reply, cut off when it is too long."""

    def __init__(self, body: Any, on_part: Callable[[bytes], None] | None) -> None:
        self._body = body
        self._on_part = on_part

    async def __aiter__(self) -> AsyncIterator[bytes]:
        num_bytes = 0
        async for part in self._body:
            num_bytes += len(part)
            if num_bytes > MAX_REPLY_BYTES:
                raise _BadReply(f"a reply longer than {MAX_REPLY_BYTES:,} bytes")
            if self._on_part is not None:
                self._on_part(part)
            yield part

    async def aclose(self) -> None:
        await self._body.aclose()


def _is_short(headers: Any) -> bool:
    """Whether a reply says how long it is and is within the limit; the HTTP library reads no more then."""
    length = headers.get("content-length", "")
    if "transfer-encoding" in headers or not (length.isascii() and length.isdecimal()):
        return False
    return len(length) < 12 and int(length) <= MAX_REPLY_BYTES


async def _within(seconds: float, call: Awaitable[Any]) -> Any:
    """The result of a call, headers and body included, or TimeoutError.

    Errors that nobody knows become _BadReply.
    """
    try:
        async with asyncio.timeout(seconds):
            return await call
    except (MemagentError, *UNREACHABLE, *UNREADABLE):
        raise
    except Exception as error:
        raise _BadReply(str(error) or type(error).__name__) from None


def parse_completion(data: Any) -> Completion:
    """The completion in a reply. Raises ValueError with the reason when there is none."""
    if not isinstance(data, dict):
        raise ValueError("broken JSON")
    try:
        choice = data["choices"][0]
        message = choice["message"]
        text = _content_text(message.get("content"))
        reasoning = message.get("reasoning_content") or message.get("reasoning")
        refusal = message.get("refusal")
        names = (data.get("model"), data.get("system_fingerprint"))
        completion_ids = _token_ids(choice.get("token_ids"))
        finish_reason = choice.get("finish_reason")
    except (KeyError, IndexError, TypeError, AttributeError):
        raise ValueError("no message in it") from None
    return Completion(
        text=_valid_unicode(text),
        finish_reason=finish_reason if isinstance(finish_reason, str) else None,
        refusal=_valid_unicode(refusal) if refusal and isinstance(refusal, str) else None,
        usage=_usage(data.get("usage"), has_text=bool(text)),
        reasoning=_valid_unicode(reasoning) if isinstance(reasoning, str) else None,
        prompt_ids=_token_ids(data.get("prompt_token_ids") or choice.get("prompt_token_ids")),
        served=_valid_unicode(" ".join(name for name in names if isinstance(name, str))) or None,
        completion_ids=completion_ids,
        logprobs=_logprobs(choice.get("logprobs"), completion_ids),
    )


def parse_embeddings(data: Any, *, num: int) -> list[list[float]]:
    """The vectors in a reply, in the order of the texts. Raises ValueError with the reason."""
    entries = data.get("data") if isinstance(data, dict) else None
    if not isinstance(entries, list) or len(entries) != num:
        raise ValueError(f"not {num} embeddings")
    found: dict[int, list[float]] = {}
    for number, entry in enumerate(entries):
        values = entry.get("embedding") if isinstance(entry, dict) else None
        if not isinstance(values, list) or not values:
            raise ValueError("an embedding that is no list of numbers")
        if not all(type(value) in (int, float) and math.isfinite(value) for value in values):
            raise ValueError("an embedding that is no list of numbers")
        index = entry.get("index", number)
        found[index if type(index) is int else number] = [float(value) for value in values]
    if sorted(found) != list(range(num)) or len({len(one) for one in found.values()}) != 1:
        raise ValueError("embeddings of different sizes or with wrong numbers")
    return [found[number] for number in range(num)]


def redact(text: str, key: SecretStr | None) -> str:
    """The text without the key."""
    secret = key.get_secret_value() if key else ""
    return text.replace(secret, "***") if len(secret) >= 4 else text


def _azure_deployment(config: EngineConfig) -> str:
    """The name of the Azure deployment that the address stands for, or nothing."""
    match = _azure_path.search(urlsplit(config.base_url or "").path)
    return match.group(1) if match else ""


def _certificates(hosts: frozenset[str]) -> ssl.SSLContext:
    """The certificates that are trusted: none where no host needs them, since redirects to others are refused."""
    named = (os.environ.get("SSL_CERT_FILE"), os.environ.get("SSL_CERT_DIR"))
    return _read_certificates(not all(host.startswith("http:") for host in hosts), *named)


@cache  # reading them takes as long as many calls
def _read_certificates(are_needed: bool, *named: str | None) -> ssl.SSLContext:
    if not are_needed:
        return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context: ssl.SSLContext = httpx.create_ssl_context()  # the environment names the same places
    return context


def _hooks(hosts: frozenset[str]) -> dict[str, list[Callable[..., Any]]]:
    """Refuse redirects to other hosts, compressed replies, and replies without end."""

    async def on_request(request: Any) -> None:
        if origin(str(request.url)) not in hosts:
            raise EngineRefused(
                f"the endpoint redirects to another host, {public_url(str(request.url))}; nothing was "
                "sent there; if it is right, give it as `base_url`"
            )

    async def on_response(response: Any) -> None:
        if response.headers.get("content-encoding", "identity").lower() != "identity":
            raise _BadReply("a compressed reply, which was not asked for")
        if not _is_short(response.headers) and isinstance(response.stream, httpx.AsyncByteStream):
            response.stream = _LimitedStream(
                response.stream, response.request.extensions.get("on_part")
            )

    return {"request": [on_request], "response": [on_response]}


def _headers(config: EngineConfig) -> dict[str, str]:
    """What every request carries. OPENAI_ORG_ID and OPENAI_PROJECT_ID are for OpenAI only."""
    key = config.api_key.get_secret_value() if config.api_key else NO_KEY
    headers = {
        "Accept": "application/json",
        "Accept-Encoding": "identity",
        "Content-Type": "application/json",
        "User-Agent": "memagent",
    }
    if _azure_deployment(config):
        return {**headers, "api-key": key}
    headers["Authorization"] = f"Bearer {key}"
    own = origins(os.environ.get("OPENAI_BASE_URL") or OPENAI_URL)
    if origins(config.base_url or OPENAI_URL) <= own:
        for name, variable in OPENAI_HEADERS.items():
            if value := os.environ.get(variable):
                headers[name] = value
    return headers


def _usage(reported: Any, *, has_text: bool) -> Usage | None:
    """The usage that is reported; None where it cannot be right, so that it is counted here."""
    if not isinstance(reported, dict):
        return None
    details = reported.get("prompt_tokens_details")
    prompt = _count(reported.get("prompt_tokens"))
    completion = _count(reported.get("completion_tokens") or 0)
    cached = _count((details.get("cached_tokens") if isinstance(details, dict) else None) or 0)
    if not prompt or completion is None or (has_text and not completion):
        return None
    return Usage(
        calls=1,
        prompt_tokens=prompt,
        completion_tokens=completion,
        cached_tokens=min(cached or 0, prompt),
    )


def _count(value: Any) -> int | None:
    """A number of tokens; None where the value is none."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    is_count = isinstance(value, int) and not isinstance(value, bool)
    return value if is_count and 0 <= value <= MAX_COUNT else None


def _token_ids(value: Any) -> tuple[int, ...] | None:
    """Token ids, which vLLM sends on request; None where there are none."""
    if not isinstance(value, list) or not all(type(token) is int for token in value):
        return None
    return tuple(value)


def _logprobs(value: Any, ids: tuple[int, ...] | None) -> tuple[float, ...] | None:
    """The log-probability of each token of the reply; None unless they are there for every one."""
    entries = value.get("content") if isinstance(value, dict) else None
    if not isinstance(entries, list) or ids is None or len(entries) != len(ids):
        return None
    try:
        return tuple(float(entry["logprob"]) for entry in entries)
    except (KeyError, TypeError, ValueError):
        return None


def _content_text(content: Any) -> str:
    """The text of a message; some servers send a list of parts."""
    if isinstance(content, list):
        return "".join(part.get("text") or "" for part in content)
    if content is not None and not isinstance(content, str):
        raise TypeError("content that is no text")
    return content or ""


def _valid_unicode(text: str) -> str:
    """Halves of characters, which JSON can carry, become replacement marks."""
    return text.encode("utf-8", "replace").decode()


def _cause(error: BaseException) -> str:
    """The innermost reason of a failed connection, which is the most specific one."""
    while not isinstance(error, _BadReply) and (error.__cause__ or error.__context__):
        error = error.__cause__ or error.__context__ or error
    return str(error) or type(error).__name__
