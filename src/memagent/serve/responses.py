"""Replies in OpenAI's format, whole and as the chunks of a stream.

One `ResponseWriter` per request: it builds the JSON objects of its endpoint.
"""

from __future__ import annotations

import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import accumulate

from memagent.engines.local.engine import LocalEngine
from memagent.serve.generate import ReplyJob, StreamPart
from memagent.serve.http import Json
from memagent.serve.wire import ApiRequest, ChatRequest, CompletionRequest
from memagent.types import Completion, Usage

Sampled = tuple[int, float]
"""A token and its log-probability."""


class ResponseWriter(ABC):
    """Builds the response to one request."""

    prefix: str
    kind: str
    chunk_kind: str

    def __init__(self, request: ApiRequest, engine: LocalEngine) -> None:
        self._request = request
        self._engine = engine
        self._head: Json = {
            "id": f"{self.prefix}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": engine.public_name,
            "system_fingerprint": f"policy-{engine.policy_version}",
        }

    def whole(self, jobs: Sequence[ReplyJob], completions: Sequence[Completion]) -> Json:
        """The response to a request that does not stream."""
        choices = [
            self._choice(number, completion) for number, completion in enumerate(completions)
        ]
        return {
            **self._head,
            "object": self.kind,
            "choices": choices,
            "usage": usage_of(completions, num_choices=self._request.num_choices),
            **self._prompt_ids(jobs),
        }

    def first_chunks(self, jobs: Sequence[ReplyJob]) -> list[Json]:
        """The chunks of a stream before the first token."""
        return []

    def chunk(self, part: StreamPart) -> Json:
        """A piece of one choice."""
        return self._chunk([self._delta(part)])

    def usage_chunk(self, completions: Sequence[Completion]) -> Json:
        """The last chunk of a stream with `include_usage`."""
        usage = usage_of(completions, num_choices=self._request.num_choices)
        return {**self._chunk([]), "usage": usage}

    @abstractmethod
    def _choice(self, number: int, completion: Completion) -> Json: ...

    @abstractmethod
    def _delta(self, part: StreamPart) -> Json: ...

    @abstractmethod
    def _logprobs(self, sampled: Sequence[Sampled], *, text_start: int) -> Json: ...

    def _prompt_ids(self, jobs: Sequence[ReplyJob]) -> Json:
        return {}

    def _chunk(self, choices: list[Json]) -> Json:
        usage = {"usage": None} if self._request.wants_usage else {}
        return {**self._head, "object": self.chunk_kind, "choices": choices, **usage}

    def _logprobs_or_none(self, sampled: Sequence[Sampled], *, text_start: int = 0) -> Json | None:
        if not self._request.wants_logprobs:
            return None
        return self._logprobs(sampled, text_start=text_start)

    def _token_ids(self, sampled: Sequence[Sampled]) -> Json:
        if not self._request.return_token_ids:
            return {}
        return {"token_ids": [token_id for token_id, _ in sampled]}


class ChatWriter(ResponseWriter):
    """/v1/chat/completions."""

    prefix = "chatcmpl"
    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def first_chunks(self, jobs: Sequence[ReplyJob]) -> list[Json]:
        roles = [
            self._chunk([_streamed(number, {"role": "assistant", "content": ""})])
            for number in range(len(jobs))
        ]
        return [{**roles[0], **self._prompt_ids(jobs)}, *roles[1:]]

    def _choice(self, number: int, completion: Completion) -> Json:
        sampled = _sampled(completion)
        return {
            "index": number,
            "message": {"role": "assistant", "content": completion.text, "refusal": None},
            "logprobs": self._logprobs_or_none(sampled),
            "finish_reason": completion.finish_reason,
            **self._token_ids(sampled),
        }

    def _delta(self, part: StreamPart) -> Json:
        sampled = [(token.token_id, token.logprob) for token in part.tokens]
        delta = {"content": part.text} if part.text else {}
        return {
            **_streamed(part.choice, delta),
            "logprobs": self._logprobs_or_none(sampled) if sampled else None,
            "finish_reason": part.completion.finish_reason if part.completion else None,
            **self._token_ids(sampled),
        }

    def _logprobs(self, sampled: Sequence[Sampled], *, text_start: int) -> Json:
        entries = []
        for token_id, logprob in sampled:
            text = self._engine.token_text(token_id)
            is_whole = "\N{REPLACEMENT CHARACTER}" not in text
            entries.append(
                {
                    "token": text,
                    "logprob": logprob,
                    "bytes": list(text.encode()) if is_whole else None,
                    "top_logprobs": [],
                }
            )
        return {"content": entries, "refusal": None}

    def _prompt_ids(self, jobs: Sequence[ReplyJob]) -> Json:
        if not self._request.return_token_ids:
            return {}
        return {"prompt_token_ids": list(jobs[0].prompt_ids)}


class CompletionWriter(ResponseWriter):
    """/v1/completions."""

    prefix = "cmpl"
    kind = "text_completion"
    chunk_kind = "text_completion"

    def __init__(self, request: ApiRequest, engine: LocalEngine) -> None:
        super().__init__(request, engine)
        self._text_starts: dict[int, int] = {}
        """Offset of the next token of each streamed choice."""

    def _choice(self, number: int, completion: Completion) -> Json:
        sampled = _sampled(completion)
        prompt = {"prompt_token_ids": list(completion.prompt_ids or ())}
        return {
            "index": number,
            "text": completion.text,
            "logprobs": self._logprobs_or_none(sampled),
            "finish_reason": completion.finish_reason,
            **self._token_ids(sampled),
            **(prompt if self._request.return_token_ids else {}),
        }

    def _delta(self, part: StreamPart) -> Json:
        sampled = [(token.token_id, token.logprob) for token in part.tokens]
        start = self._text_starts.get(part.choice, 0)
        self._text_starts[part.choice] = start + len(part.text)
        return {
            "index": part.choice,
            "text": part.text,
            "logprobs": self._logprobs_or_none(sampled, text_start=start) if sampled else None,
            "finish_reason": part.completion.finish_reason if part.completion else None,
            **self._token_ids(sampled),
        }

    def _logprobs(self, sampled: Sequence[Sampled], *, text_start: int) -> Json:
        texts = [self._engine.token_text(token_id) for token_id, _ in sampled]
        starts = accumulate((len(text) for text in texts), initial=text_start)
        return {
            "tokens": texts,
            "token_logprobs": [logprob for _, logprob in sampled],
            "top_logprobs": None,
            "text_offset": list(starts)[:-1],
        }


def writer_of(request: ChatRequest | CompletionRequest, engine: LocalEngine) -> ResponseWriter:
    """The writer for a request's endpoint."""
    kind = ChatWriter if isinstance(request, ChatRequest) else CompletionWriter
    return kind(request, engine)


def model_card(engine: LocalEngine, *, created: int, has_root: bool) -> Json:
    """The served model in vLLM's format; with `has_root`, `root` is the folder of its tokenizer."""
    return {
        "id": engine.public_name,
        "object": "model",
        "created": created,
        "owned_by": "memagent",
        "root": engine.tokenizer if has_root else engine.public_name,
        "parent": None,
        "max_model_len": engine.served_window,
    }


def total(completions: Sequence[Completion]) -> Usage:
    """The usage of several replies combined."""
    return sum((one.usage for one in completions if one.usage), Usage())


def usage_of(completions: Sequence[Completion], *, num_choices: int) -> Json:
    """Usage as OpenAI counts it: a prompt once, regardless of the number of choices."""
    prompts = total(completions[::num_choices])
    completion_tokens = total(completions).completion_tokens
    return {
        "prompt_tokens": prompts.prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompts.prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": prompts.cached_tokens},
    }


def _sampled(completion: Completion) -> list[Sampled]:
    return list(zip(completion.completion_ids or (), completion.logprobs or (), strict=True))


def _streamed(number: int, delta: Json) -> Json:
    return {"index": number, "delta": delta, "logprobs": None, "finish_reason": None}
