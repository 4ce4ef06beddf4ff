"""Answers of /v1/responses: whole, or as events with progress as a reasoning summary."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing

from memagent.serve.errors import ApiError
from memagent.serve.http import Json, event
from memagent.serve.reading.answering import AnswerEvent, AnswerText, Finished, Progress, no_answer
from memagent.serve.reading.chat_format import citation_fields, reading_fields
from memagent.serve.reading.requests import MODEL, ResponsesRequest

INCOMPLETE = {"length": "max_output_tokens", "content_filter": "content_filter"}
"""Why an answer is incomplete, by the reason of its end in chat completions."""


class ResponseAnswer:
    """Writes the answer to one request."""

    def __init__(self, request: ResponsesRequest) -> None:
        self._number = 0
        """Of the next event."""
        self._answer: list[str] = []
        self._progress: list[str] = []
        self._annotations: list[Json] = []
        self._head: Json = {
            "id": f"resp_{secrets.token_hex(16)}",
            "object": "response",
            "created_at": int(time.time()),
            "model": MODEL,
            "error": None,
            "incomplete_details": None,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "metadata": {},
            "parallel_tool_calls": False,
            "previous_response_id": None,
            "store": False,
            "temperature": request.temperature,
            "text": {"format": {"type": "text"}},
            "tool_choice": "none",
            "tools": [],
            "top_p": request.top_p,
        }
        self._reasoning_id = f"rs_{secrets.token_hex(12)}"
        self._message_id = f"msg_{secrets.token_hex(12)}"

    async def whole(self, events: AsyncGenerator[AnswerEvent, None]) -> tuple[Json, Finished]:
        """The response to a request that does not stream."""
        async with aclosing(events):
            async for one in events:
                self._keep(one)
                if isinstance(one, Finished):
                    return self._response(one), one
        raise no_answer()

    async def chunks(
        self, events: AsyncGenerator[AnswerEvent, None]
    ) -> AsyncGenerator[str | Finished, None]:
        """The events of a stream, and among them what the answer took."""
        started = {**self._head, "status": "in_progress", "output": [], "usage": None}
        yield self._event("response.created", response=started)
        yield self._event("response.in_progress", response=started)
        async with aclosing(events):
            async for one in events:
                if isinstance(one, Finished):
                    self._keep(one)
                    for last in self._end_of_stream(one):
                        yield last
                    yield one
                    yield self._event(self._last_event(one), response=self._response(one))
                    return
                for written in self._parts(one):
                    yield written
                self._keep(one)

    def error_event(self, error: ApiError) -> str:
        """An error as the last event of a stream."""
        values = error.body()["error"]
        return self._event(
            "error", code=values["code"], message=values["message"], param=values["param"]
        )

    # --- parts of a stream ---------------------------------------------------------------------

    def _parts(self, one: Progress | AnswerText) -> list[str]:
        if isinstance(one, Progress):
            opening = [] if self._progress else self._open_reasoning()
            return [*opening, self._reasoning("delta", delta=one.text)]
        opening = [] if self._answer else [*self._close_reasoning(), *self._open_message()]
        return [*opening, self._content("response.output_text.delta", delta=one.text, logprobs=[])]

    def _end_of_stream(self, end: Finished) -> list[str]:
        opening = [] if self._answer else [*self._close_reasoning(), *self._open_message()]
        text = "".join(self._answer)
        annotations = [
            self._content(
                "response.output_text.annotation.added", annotation=one, annotation_index=number
            )
            for number, one in enumerate(self._annotations)
        ]
        return [
            *opening,
            *annotations,
            self._content("response.output_text.done", text=text, logprobs=[]),
            self._content("response.content_part.done", part=self._output_text()),
            self._item("done", self._message("completed")),
        ]

    def _open_reasoning(self) -> list[str]:
        item = {"id": self._reasoning_id, "type": "reasoning", "summary": []}
        part = {"type": "summary_text", "text": ""}
        return [self._item("added", item), self._summary_part("added", part)]

    def _close_reasoning(self) -> list[str]:
        if not self._progress:
            return []
        text = "".join(self._progress)
        return [
            self._reasoning("done", text=text),
            self._summary_part("done", {"type": "summary_text", "text": text}),
            self._item("done", self._reasoning_item()),
        ]

    def _open_message(self) -> list[str]:
        item = {**self._message("in_progress"), "content": []}
        return [
            self._item("added", item),
            self._content("response.content_part.added", part=_output_text("", [])),
        ]

    def _reasoning(self, what: str, **fields: object) -> str:
        place = {"item_id": self._reasoning_id, "output_index": 0, "summary_index": 0}
        return self._event(f"response.reasoning_summary_text.{what}", **place, **fields)

    def _summary_part(self, what: str, part: Json) -> str:
        place = {"item_id": self._reasoning_id, "output_index": 0, "summary_index": 0}
        return self._event(f"response.reasoning_summary_part.{what}", **place, part=part)

    def _content(self, name: str, **fields: object) -> str:
        place = {"item_id": self._message_id, "output_index": self._place, "content_index": 0}
        return self._event(name, **place, **fields)

    def _item(self, what: str, item: Json) -> str:
        place = 0 if item["type"] == "reasoning" else self._place
        return self._event(f"response.output_item.{what}", output_index=place, item=item)

    def _event(self, name: str, **fields: object) -> str:
        number, self._number = self._number, self._number + 1
        return event({"type": name, "sequence_number": number, **fields}, name)

    # --- the response --------------------------------------------------------------------------

    @property
    def _place(self) -> int:
        """Of the message among the items of the output."""
        return 1 if self._progress else 0

    def _keep(self, one: AnswerEvent) -> None:
        if isinstance(one, Finished):
            self._annotations = [
                {"type": "file_citation", **citation_fields(cited)} for cited in one.citations
            ]
        else:
            kept = self._progress if isinstance(one, Progress) else self._answer
            kept.append(one.text)

    def _reasoning_item(self) -> Json:
        summary = [{"type": "summary_text", "text": "".join(self._progress)}]
        return {"id": self._reasoning_id, "type": "reasoning", "summary": summary}

    def _message(self, status: str) -> Json:
        return {
            "id": self._message_id,
            "type": "message",
            "status": status,
            "role": "assistant",
            "content": [self._output_text()],
        }

    def _output_text(self) -> Json:
        return _output_text("".join(self._answer), self._annotations)

    def _last_event(self, end: Finished) -> str:
        return f"response.{'incomplete' if end.finish_reason in INCOMPLETE else 'completed'}"

    def _response(self, end: Finished) -> Json:
        reason = INCOMPLETE.get(end.finish_reason)
        reasoning = [self._reasoning_item()] if self._progress else []
        return {
            **self._head,
            "status": "incomplete" if reason else "completed",
            "incomplete_details": {"reason": reason} if reason else None,
            "output": [*reasoning, self._message("incomplete" if reason else "completed")],
            "usage": _usage(end),
            **reading_fields(end),
        }


def _output_text(text: str, annotations: list[Json]) -> Json:
    return {"type": "output_text", "text": text, "annotations": annotations, "logprobs": []}


def _usage(end: Finished) -> Json:
    used = end.usage
    return {
        "input_tokens": used.prompt_tokens,
        "input_tokens_details": {"cached_tokens": used.cached_tokens},
        "output_tokens": used.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": end.reasoning_tokens},
        "total_tokens": used.prompt_tokens + used.completion_tokens,
    }
