"""The routes of the server over one local engine, and from a request to its replies: whole or streamed, several choices at once.

POST /v1/chat/completions    POST /v1/completions    GET /v1/models
GET /health                  GET /metrics
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse

from memagent.config import ServeConfig
from memagent.serve.chat import LocalAnswer, total
from memagent.serve.guard import CLIENT_GONE, AdmissionGate, Metrics, OnRequest, Route, load_gauges
from memagent.serve.http import (
    END_OF_EVENTS,
    EventStream,
    Json,
    event,
    health_routes,
    model_routes,
    unless_disconnected,
    web_app,
    with_error_event,
)
from memagent.serve.keys import OneKey, checked_holder
from memagent.serve.listen import HostCheck
from memagent.serve.wire import ApiError, ChatRequest, CompletionRequest, LocalRequest
from memagent.types import Completion, Sampling, StreamedToken

if TYPE_CHECKING:
    from memagent.engines.llamacpp.engine import LlamaEngine
    from memagent.engines.local.engine import LocalEngine

    ServedEngine = LocalEngine | LlamaEngine


def make_app(
    engine: ServedEngine,
    config: ServeConfig | None = None,
    *,
    gate: AdmissionGate | None = None,
    on_request: OnRequest | None = None,
) -> FastAPI:
    """The ASGI application over an engine, which the caller closes."""
    config = config or ServeConfig()
    gate = gate or AdmissionGate(config.max_concurrency)
    metrics = Metrics(lambda: load_gauges(engine.load))
    is_local = HostCheck(config.host, None).is_local
    service = Service(engine, metrics, shows_root=is_local)
    keys = OneKey(config.api_key.get_secret_value() if config.api_key else None)
    return web_app(
        [
            Route("POST", "/v1/chat/completions", service.chat),
            Route("POST", "/v1/completions", service.complete),
            *model_routes([engine.public_name], service.card),
            *health_routes(gate, metrics, engine, metrics_need_key=False),
        ],
        config,
        partial(checked_holder, keys),
        gate=gate,
        metrics=metrics,
        on_request=on_request,
    )


class Service:
    """The handlers of the routes."""

    def __init__(self, engine: ServedEngine, metrics: Metrics, *, shows_root: bool) -> None:
        """`shows_root`: whether responses name the folder of the tokenizer, which clients can open."""
        self._engine = engine
        self._metrics = metrics
        self._shows_root = shows_root
        self._created = int(time.time())

    async def chat(self, request: Request, body: ChatRequest) -> Response:
        return await self._generate(request, body)

    async def complete(self, request: Request, body: CompletionRequest) -> Response:
        return await self._generate(request, body)

    def card(self, name: str) -> Json:
        """The served model in vLLM's format."""
        self._check_model(name)
        engine = self._engine
        return {
            "id": engine.public_name,
            "object": "model",
            "created": self._created,
            "owned_by": "memagent",
            "root": engine.tokenizer if self._shows_root else engine.public_name,
            "parent": None,
            "max_model_len": engine.served_window,
        }

    # --- generating ----------------------------------------------------------------------------

    async def _generate(self, request: Request, body: LocalRequest) -> Response:
        self._check_model(body.model)
        # in a thread: tokenising long texts takes time
        prompts = await asyncio.to_thread(_prompts, body, self._engine)
        jobs = [job for prompt in prompts for job in _choices(body, prompt, self._engine)]
        writer = LocalAnswer(body, self._engine)
        if body.stream:
            return EventStream(self._events(request, writer, jobs, has_usage=body.wants_usage))
        completions = await unless_disconnected(request, replies(self._engine, jobs))
        if completions is None:
            return Response(status_code=CLIENT_GONE)
        self._count(request, completions)
        return JSONResponse(writer.whole(jobs, completions))

    def _count(self, request: Request, completions: list[Completion]) -> None:
        usage = total(completions)
        self._metrics.count_tokens(usage)
        request.state.usage += usage

    def _events(
        self, request: Request, writer: LocalAnswer, jobs: list[ReplyJob], *, has_usage: bool
    ) -> AsyncGenerator[str, None]:
        """The chunks of a stream. An invalid job raises here, before the first byte."""
        tokens = streams(self._engine, jobs)

        async def events() -> AsyncGenerator[str, None]:
            completions: dict[int, Completion] = {}
            for chunk in writer.first_chunks(jobs):
                yield event(chunk)
            async with aclosing(tokens) as opened, aclosing(parts(opened)) as all_parts:
                async for part in all_parts:
                    if part.completion:
                        completions[part.choice] = part.completion
                        self._count(request, [part.completion])
                    yield event(writer.chunk(part))
            if has_usage:
                in_order = [completions[number] for number in range(len(jobs))]
                yield event(writer.usage_chunk(in_order))
            yield END_OF_EVENTS

        return with_error_event(events())

    # --- checks --------------------------------------------------------------------------------

    def _check_model(self, name: str | None) -> None:
        if name is not None and name not in (self._engine.public_name, self._engine.model):
            raise ApiError(
                404,
                f"the model {name!r} does not exist; this server has {self._engine.public_name!r}",
                param="model",
                code="model_not_found",
            )


PROBED_CHARS_PER_TOKEN = 16
"""If a text has more characters for each token of the window, its start is tokenised first."""
MARGIN = 2
"""How far above the window a text is refused unseen; normalisation may shorten it."""

StreamItem = StreamedToken | Completion


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyJob:
    """One reply to generate."""

    prompt_ids: tuple[int, ...]
    sampling: Sampling


def _prompts(request: LocalRequest, engine: ServedEngine) -> list[tuple[int, ...]]:
    if isinstance(request, ChatRequest):
        _check_length([message["content"] for message in request.conversation], engine, "messages")
        return [tuple(engine.prompt_ids(request.conversation))]
    for prompt in request.prompt:
        if isinstance(prompt, str):
            _check_length([prompt], engine, "prompt")
    return [
        tuple(engine.vocabulary.text_ids(prompt)) if isinstance(prompt, str) else prompt
        for prompt in request.prompt
    ]


def _check_length(texts: Sequence[str], engine: ServedEngine, param: str) -> None:
    """Refuse a text far above the window without tokenising all of it."""
    num_chars = sum(map(len, texts))
    probed = PROBED_CHARS_PER_TOKEN * engine.served_window
    if num_chars <= probed:
        return
    start = "".join(texts)[:probed]
    if (
        num_chars > MARGIN * engine.vocabulary.max_token_chars * engine.served_window
        or engine.vocabulary.count(start) > MARGIN * engine.served_window
    ):
        raise ApiError(
            400,
            f"the prompt has {num_chars:,} characters; the window of {engine.public_name} has "
            f"{engine.served_window} tokens. Shorten the prompt",
            param=param,
            code="context_length_exceeded",
        )


def _choices(
    request: LocalRequest, prompt_ids: tuple[int, ...], engine: ServedEngine
) -> list[ReplyJob]:
    room = engine.served_window - len(prompt_ids)
    max_tokens = room if request.token_limit is None else request.token_limit
    if room < 1 or max_tokens > room:
        reply = f" and the reply up to {max_tokens}" if room >= 1 else ""
        raise ApiError(
            400,
            f"the prompt has {len(prompt_ids)} tokens{reply}; the window of {engine.public_name} has "
            f"{engine.served_window}. Shorten the prompt or lower max_tokens",
            param="prompt" if isinstance(request, CompletionRequest) else "messages",
            code="context_length_exceeded",
        )
    return [
        ReplyJob(
            prompt_ids=prompt_ids, sampling=request.sampling(max_tokens=max_tokens, choice=choice)
        )
        for choice in range(request.num_choices)
    ]


async def replies(engine: ServedEngine, jobs: Sequence[ReplyJob]) -> list[Completion]:
    """All replies, whole. If one fails or the caller is cancelled, the others are cancelled."""
    tasks = [asyncio.ensure_future(engine.generate(job.prompt_ids, job.sampling)) for job in jobs]
    try:
        return await asyncio.gather(*tasks)
    finally:
        await _end(tasks)


def streams(
    engine: ServedEngine, jobs: Sequence[ReplyJob]
) -> AsyncGenerator[tuple[int, StreamItem], None]:
    """Tokens of all replies as they are sampled, with the index of their job; each completion last.

    An invalid job raises here, not at the first token.
    """
    return _merged([engine.stream(job.prompt_ids, job.sampling) for job in jobs])


async def _merged(
    sources: Sequence[AsyncGenerator[StreamItem, None]],
) -> AsyncGenerator[tuple[int, StreamItem], None]:
    items: asyncio.Queue[tuple[int, StreamItem] | Exception] = asyncio.Queue()

    async def pump(number: int, source: AsyncGenerator[StreamItem, None]) -> None:
        try:
            async with aclosing(source) as opened:
                async for item in opened:
                    items.put_nowait((number, item))
        except Exception as error:  # raised again where the stream is read
            items.put_nowait(error)

    tasks = [asyncio.ensure_future(pump(number, source)) for number, source in enumerate(sources)]
    num_left = len(tasks)
    try:
        while num_left:
            item = await items.get()
            if isinstance(item, Exception):
                raise item
            num_left -= isinstance(item[1], Completion)
            yield item
    finally:
        await _end(tasks)


async def _end(tasks: Sequence[asyncio.Future[Completion]] | Sequence[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamPart:
    """The content of one chunk of a stream, for one choice."""

    choice: int
    text: str
    tokens: tuple[StreamedToken, ...]
    completion: Completion | None = None
    """Set in the last part of a choice."""


async def parts(items: AsyncIterator[tuple[int, StreamItem]]) -> AsyncGenerator[StreamPart, None]:
    """Tokens grouped until they give text; the last part of each choice has its completion."""
    waiting: dict[int, list[StreamedToken]] = {}
    async for choice, item in items:
        if isinstance(item, Completion):
            tokens = tuple(waiting.pop(choice, ()))
            yield StreamPart(choice=choice, text="", tokens=tokens, completion=item)
            continue
        waiting.setdefault(choice, []).append(item)
        if item.text:
            yield StreamPart(choice=choice, text=item.text, tokens=tuple(waiting.pop(choice)))
