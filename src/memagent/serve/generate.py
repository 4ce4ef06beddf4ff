"""From a request to its replies: whole or streamed, several choices at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING

from memagent.serve.errors import ApiError
from memagent.serve.wire import ChatRequest, CompletionRequest, LocalRequest
from memagent.types import Completion, Sampling, StreamedToken

if TYPE_CHECKING:  # each needs libraries of its own
    from memagent.engines.llamacpp.engine import LlamaEngine
    from memagent.engines.local.engine import LocalEngine

    ServedEngine = LocalEngine | LlamaEngine

PROBED_CHARS_PER_TOKEN = 16
"""Of a text with more characters for each token of the window, the start is tokenised first."""
MARGIN = 2
"""How far above the window a text is refused unseen; normalisation may shorten it."""

StreamItem = StreamedToken | Completion


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyJob:
    """One reply to generate."""

    prompt_ids: tuple[int, ...]
    sampling: Sampling


async def jobs_of(request: LocalRequest, engine: ServedEngine) -> list[ReplyJob]:
    """The jobs of a request: the choices of its first prompt, then of the next."""
    prompts = await asyncio.to_thread(_prompts, request, engine)  # tokenising long texts takes time
    return [job for prompt in prompts for job in _choices(request, prompt, engine)]


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
