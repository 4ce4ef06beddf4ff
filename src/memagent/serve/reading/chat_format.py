"""Answers of /v1/chat/completions: whole, or as chunks with progress as `reasoning_content`."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing

from memagent.serve.http import END_OF_EVENTS, Json, event
from memagent.serve.reading.answering import (
    AnswerEvent,
    AnswerText,
    Finished,
    Progress,
    SourceQuote,
    no_answer,
)
from memagent.serve.reading.requests import MODEL

REASONS = ("stop", "length", "content_filter")
"""Reasons of OpenAI's that an answer can end with."""


class ChatAnswer:
    """Writes the answer to one request."""

    def __init__(self, *, has_usage: bool) -> None:
        """`has_usage`: whether a stream ends with its usage."""
        self._has_usage = has_usage
        self._head: Json = {
            "id": f"chatcmpl-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": MODEL,
        }

    async def whole(self, events: AsyncGenerator[AnswerEvent, None]) -> tuple[Json, Finished]:
        """The response to a request that does not stream."""
        texts: list[str] = []
        progress: list[str] = []
        async with aclosing(events):
            async for one in events:
                if isinstance(one, AnswerText):
                    texts.append(one.text)
                elif isinstance(one, Progress):
                    progress.append(one.text)
                else:
                    return self._response("".join(texts), "".join(progress), one), one
        raise no_answer()

    def _response(self, text: str, progress: str, end: Finished) -> Json:
        message: Json = {"role": "assistant", "content": text, "refusal": None}
        message["annotations"] = [chat_annotation(one) for one in end.citations]
        if progress:
            message["reasoning_content"] = progress
        return {
            **self._head,
            "object": "chat.completion",
            "choices": [
                {
                    "index": 0,
                    "message": message,
                    "logprobs": None,
                    "finish_reason": reason_of_end(end),
                }
            ],
            "usage": chat_usage(end),
            **reading_fields(end),
        }

    async def chunks(
        self, events: AsyncGenerator[AnswerEvent, None]
    ) -> AsyncGenerator[str | Finished, None]:
        """The events of a stream, and among them what the answer took."""
        yield self._chunk({"role": "assistant", "content": ""})
        async with aclosing(events):
            async for one in events:
                if isinstance(one, Progress):
                    yield self._chunk({"reasoning_content": one.text})
                elif isinstance(one, AnswerText):
                    yield self._chunk({"content": one.text})
                else:
                    yield one
                    if one.citations:
                        cited = [chat_annotation(each) for each in one.citations]
                        yield self._chunk({"annotations": cited})
                    yield self._chunk({}, finish_reason=reason_of_end(one))
                    if self._has_usage:
                        yield event({**self._frame([]), "usage": chat_usage(one)})
        yield END_OF_EVENTS

    def _chunk(self, delta: Json, *, finish_reason: str | None = None) -> str:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        return event(self._frame([choice]))

    def _frame(self, choices: list[Json]) -> Json:
        usage = {"usage": None} if self._has_usage else {}
        return {**self._head, "object": "chat.completion.chunk", "choices": choices, **usage}


def reason_of_end(end: Finished) -> str:
    """Why an answer ended, in OpenAI's words."""
    return end.finish_reason if end.finish_reason in REASONS else "stop"


def chat_usage(end: Finished) -> Json:
    """Usage as OpenAI counts it; the memories before the answer count as reasoning."""
    used = end.usage
    return {
        "prompt_tokens": used.prompt_tokens,
        "completion_tokens": used.completion_tokens,
        "total_tokens": used.prompt_tokens + used.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": used.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": end.reasoning_tokens},
    }


def chat_annotation(cited: SourceQuote) -> Json:
    """A quote that an answer rests on, as an annotation of its message."""
    return {"type": "file_citation", "file_citation": citation_fields(cited)}


def citation_fields(cited: SourceQuote) -> Json:
    """What an annotation tells of a quote."""
    return {
        "file_id": cited.file_id or "",
        "filename": cited.source,
        "index": cited.number,
        "quote": cited.quote,
        "where": cited.where,
        "start": cited.start,
        "end": cited.end,
    }


def reading_fields(end: Finished) -> Json:
    """What was read for the answer, as a further field of a response."""
    if end.num_sections is None:
        return {}
    return {
        "reading": {
            "sections": end.num_sections,
            "calls": end.usage.calls,
            "stored_steps": end.num_stored,
        }
    }
