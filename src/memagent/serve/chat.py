"""Chat completions in OpenAI's format, whole and as the chunks of a stream: of a local model, which answers plain
completions too, and of the reading gateway.

The functions have what all chats share, those of agents in training included. The two classes each write the answer
to one request.
"""

from __future__ import annotations

import secrets
import time
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from itertools import accumulate, zip_longest
from typing import TYPE_CHECKING

from memagent.serve.http import END_OF_EVENTS, Json, event
from memagent.serve.wire import ApiError, ChatRequest, LocalRequest
from memagent.types import Completion, Usage

if TYPE_CHECKING:
    from memagent.serve.app import ReplyJob, ServedEngine, StreamPart

WHOLE, CHUNK, PLAIN = "chat.completion", "chat.completion.chunk", "text_completion"
REASONS = ("stop", "length", "content_filter")
"""Reasons of OpenAI's that an answer can end with."""
Sampled = tuple[int | None, float | None]
"""A token and its log-probability."""


def new_head(prefix: str, model: str) -> Json:
    """What the response to a request and each chunk of it begin with."""
    return {"id": f"{prefix}-{secrets.token_hex(12)}", "created": int(time.time()), "model": model}


def choice(
    index: int, text: str, reason: str | None, logprobs: Json | None = None, **message: object
) -> Json:
    """A whole reply, with further fields of its message."""
    return {
        "index": index,
        "message": {"role": "assistant", "content": text, "refusal": None, **message},
        "logprobs": logprobs,
        "finish_reason": reason,
    }


def delta(
    index: int, change: Json, reason: str | None = None, logprobs: Json | None = None
) -> Json:
    """A piece of a reply."""
    return {"index": index, "delta": change, "logprobs": logprobs, "finish_reason": reason}


def usage_of(prompt_tokens: int, completion_tokens: int) -> Json:
    """Usage as OpenAI counts it."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


def total(completions: Sequence[Completion]) -> Usage:
    """The usage of several replies combined."""
    return sum((one.usage for one in completions if one.usage), Usage())


# --- a local model --------------------------------------------------------------------------------


class LocalAnswer:
    """Writes the replies to a chat or a plain completion."""

    def __init__(self, request: LocalRequest, engine: ServedEngine) -> None:
        self._request = request
        self._engine = engine
        self._is_chat = isinstance(request, ChatRequest)
        self._head = {
            **new_head("chatcmpl" if self._is_chat else "cmpl", engine.public_name),
            "system_fingerprint": f"policy-{engine.policy_version}",
        }
        self._text_starts = Counter[int]()
        """Offset of the next token of each streamed choice."""

    def whole(self, jobs: Sequence[ReplyJob], completions: Sequence[Completion]) -> Json:
        """The response to a request that does not stream."""
        return {
            **self._head,
            "object": WHOLE if self._is_chat else PLAIN,
            "choices": [self._choice(*numbered) for numbered in enumerate(completions)],
            "usage": self._usage(completions),
            **self._prompt_ids(jobs),
        }

    def first_chunks(self, jobs: Sequence[ReplyJob]) -> list[Json]:
        """The chunks of a stream before the first token."""
        if not self._is_chat:
            return []
        opening = {"role": "assistant", "content": ""}
        first, *others = (self._chunk([delta(number, opening)]) for number in range(len(jobs)))
        return [{**first, **self._prompt_ids(jobs)}, *others]

    def chunk(self, part: StreamPart) -> Json:
        """A piece of one choice."""
        sampled = [(token.token_id, token.logprob) for token in part.tokens]
        reason = part.completion.finish_reason if part.completion else None
        start = self._text_starts[part.choice]
        self._text_starts[part.choice] += len(part.text)
        logprobs = self._logprobs(sampled, start) if sampled else None
        if self._is_chat:
            content = {"content": part.text} if part.text else {}
            piece = delta(part.choice, content, reason, logprobs)
        else:
            piece = _plain(part.choice, part.text, reason, logprobs)
        return self._chunk([{**piece, **self._token_ids(sampled)}])

    def usage_chunk(self, completions: Sequence[Completion]) -> Json:
        """The last chunk of a stream with `include_usage`."""
        return {**self._chunk([]), "usage": self._usage(completions)}

    def _choice(self, number: int, completion: Completion) -> Json:
        ids, logprobs = completion.completion_ids or (), completion.logprobs or ()
        sampled: list[Sampled] = list(zip_longest(ids, logprobs))
        written = choice if self._is_chat else _plain
        values = written(
            number, completion.text, completion.finish_reason, self._logprobs(sampled, 0)
        )
        prompt: Json = {}
        if self._request.return_token_ids and not self._is_chat:
            prompt = {"prompt_token_ids": list(completion.prompt_ids or ())}
        return {**values, **self._token_ids(sampled), **prompt}

    def _chunk(self, choices: list[Json]) -> Json:
        usage = {"usage": None} if self._request.wants_usage else {}
        kind = CHUNK if self._is_chat else PLAIN
        return {**self._head, "object": kind, "choices": choices, **usage}

    def _usage(self, completions: Sequence[Completion]) -> Json:
        """A prompt counts once, regardless of the number of choices."""
        prompts = total(completions[:: self._request.num_choices])
        return {
            **usage_of(prompts.prompt_tokens, total(completions).completion_tokens),
            "prompt_tokens_details": {"cached_tokens": prompts.cached_tokens},
        }

    def _prompt_ids(self, jobs: Sequence[ReplyJob]) -> Json:
        if not self._request.return_token_ids or not self._is_chat:
            return {}
        return {"prompt_token_ids": list(jobs[0].prompt_ids)}

    def _token_ids(self, sampled: Sequence[Sampled]) -> Json:
        if not self._request.return_token_ids:
            return {}
        return {"token_ids": [token_id for token_id, _ in sampled if token_id is not None]}

    def _logprobs(self, sampled: Sequence[Sampled], text_start: int) -> Json | None:
        known = [(one, p) for one, p in sampled if one is not None and p is not None]
        if not self._request.wants_logprobs or not known or len(known) < len(sampled):
            return None
        texts = [self._engine.vocabulary.token_text(token_id) for token_id, _ in known]
        logprobs = [logprob for _, logprob in known]
        if self._is_chat:
            entries = map(_logprob_entry, texts, logprobs)
            return {"content": list(entries), "refusal": None}
        starts = accumulate(map(len, texts), initial=text_start)
        return {
            "tokens": texts,
            "token_logprobs": logprobs,
            "top_logprobs": None,
            "text_offset": list(starts)[:-1],
        }


def _plain(index: int, text: str, reason: str | None, logprobs: Json | None) -> Json:
    """A choice of a plain completion, whole or a piece."""
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}


def _logprob_entry(text: str, logprob: float) -> Json:
    is_whole = "\N{REPLACEMENT CHARACTER}" not in text
    return {
        "token": text,
        "logprob": logprob,
        "bytes": list(text.encode()) if is_whole else None,
        "top_logprobs": [],
    }


# --- the reading gateway --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """A line about the reading, for people who wait."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """A piece of the answer."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceQuote:
    """A quote of the text that an answer rests on."""

    number: int
    """As the answer may name it, from 1."""
    quote: str
    where: str
    """File, page or line."""
    source: str
    """Name of the file, or role of the message."""
    start: int
    """Character offsets into the file or message."""
    end: int
    file_id: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """The end of an answer: what it took."""

    finish_reason: str
    usage: Usage
    """All calls of this request; steps of earlier requests cost nothing."""
    reasoning_tokens: int = 0
    """Completion tokens of the memories before the answer."""
    num_sections: int | None = None
    """Sections that were read for the answer, earlier requests included; None where nothing was read."""
    num_stored: int = 0
    """Steps that earlier requests had finished."""
    citations: tuple[SourceQuote, ...] = ()
    """What the answer rests on, where evidence is kept."""

    @property
    def openai_reason(self) -> str:
        """The finish reason, if it is one of OpenAI's."""
        return self.finish_reason if self.finish_reason in REASONS else "stop"


AnswerEvent = Progress | Delta | Done
AnswerEvents = AsyncGenerator[AnswerEvent, None]

BEGUN = Progress(text="")
"""The first event: there is room for the answer."""


@dataclass(slots=True)
class AnswerSoFar:
    """An answer as far as it has come."""

    progress: list[str] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    end: Done | None = None

    @property
    def text(self) -> str:
        """The text of the answer."""
        return "".join(self.texts)

    def add(self, event: AnswerEvent) -> None:
        """Take the next event."""
        if isinstance(event, Done):
            self.end = event
        else:
            (self.progress if isinstance(event, Progress) else self.texts).append(event.text)


async def whole_answer(events: AnswerEvents) -> tuple[AnswerSoFar, Done]:
    """All of an answer and its end. Raises ApiError where there is none."""
    answer = AnswerSoFar()
    async with aclosing(events):
        async for event in events:
            answer.add(event)
            if answer.end:
                return answer, answer.end
    raise no_answer()


def no_answer() -> ApiError:
    """The error of an answer that never came."""
    return ApiError(503, "the reading ended without an answer", code="engine_error")


class ChatAnswer:
    """Writes the answer of the gateway, with progress as `reasoning_content`."""

    def __init__(self, model: str, *, has_usage: bool) -> None:
        """`has_usage`: whether a stream ends with its usage."""
        self._has_usage = has_usage
        self._head = new_head("chatcmpl", model)

    def whole(self, answer: AnswerSoFar, end: Done) -> Json:
        """The response to a request that does not stream."""
        progress = "".join(answer.progress)
        reasoning: Json = {"reasoning_content": progress} if progress else {}
        cited = [_annotation(one) for one in end.citations]
        reason = end.openai_reason
        return {
            **self._head,
            "object": WHOLE,
            "choices": [choice(0, answer.text, reason, annotations=cited, **reasoning)],
            "usage": _usage(end),
            **reading_fields(end),
        }

    async def chunks(self, events: AnswerEvents) -> AsyncGenerator[str, None]:
        """The events of a stream."""
        yield self._chunk({"role": "assistant", "content": ""})
        async with aclosing(events):
            async for one in events:
                if isinstance(one, Progress):
                    yield self._chunk({"reasoning_content": one.text})
                elif isinstance(one, Delta):
                    yield self._chunk({"content": one.text})
                else:
                    if one.citations:
                        cited = [_annotation(each) for each in one.citations]
                        yield self._chunk({"annotations": cited})
                    yield self._chunk({}, one.openai_reason)
                    if self._has_usage:
                        yield event({**self._frame([]), "usage": _usage(one)})
        yield END_OF_EVENTS

    def _chunk(self, change: Json, reason: str | None = None) -> str:
        return event(self._frame([delta(0, change, reason)]))

    def _frame(self, choices: list[Json]) -> Json:
        usage = {"usage": None} if self._has_usage else {}
        return {**self._head, "object": CHUNK, "choices": choices, **usage}


def _usage(end: Done) -> Json:
    """The memories before the answer count as reasoning."""
    used = end.usage
    return {
        **usage_of(used.prompt_tokens, used.completion_tokens),
        "prompt_tokens_details": {"cached_tokens": used.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": end.reasoning_tokens},
    }


def _annotation(cited: SourceQuote) -> Json:
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


def reading_fields(end: Done) -> Json:
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
