"""Answers of /v1/responses: whole, or as events with progress as a reasoning summary."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing

from memagent.serve.chat import (
    AnswerEvent,
    AnswerEvents,
    AnswerSoFar,
    Done,
    Progress,
    citation_fields,
    reading_fields,
)
from memagent.serve.http import Json, event
from memagent.serve.reading.requests import ResponsesRequest
from memagent.serve.wire import ApiError

INCOMPLETE = {"length": "max_output_tokens", "content_filter": "content_filter"}
"""Why an answer is incomplete, by the reason of its end in chat completions."""


class ResponseAnswer:
    """Writes the answer to one request."""

    def __init__(self, model: str, request: ResponsesRequest) -> None:
        self._number = 0
        """The number of the next event."""
        self._head: Json = {
            "id": f"resp_{secrets.token_hex(16)}",
            "object": "response",
            "created_at": int(time.time()),
            "model": model,
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

    def whole(self, answer: AnswerSoFar, end: Done) -> Json:
        """The response to a request that does not stream."""
        reason = INCOMPLETE.get(end.finish_reason)
        status = "incomplete" if reason else "completed"
        used = end.usage
        return {
            **self._head,
            "status": status,
            "incomplete_details": {"reason": reason} if reason else None,
            "output": [*self._reasoning_items(answer), self._message(status, answer)],
            "usage": {
                "input_tokens": used.prompt_tokens,
                "input_tokens_details": {"cached_tokens": used.cached_tokens},
                "output_tokens": used.completion_tokens,
                "output_tokens_details": {"reasoning_tokens": end.reasoning_tokens},
                "total_tokens": used.prompt_tokens + used.completion_tokens,
            },
            **reading_fields(end),
        }

    async def chunks(self, events: AnswerEvents) -> AsyncGenerator[str, None]:
        """The events of a stream."""
        started = {**self._head, "status": "in_progress", "output": [], "usage": None}
        yield self._event("response.created", response=started)
        yield self._event("response.in_progress", response=started)
        answer = AnswerSoFar()
        async with aclosing(events):
            async for one in events:
                for written in self._written(one, answer):
                    yield written

    def error_event(self, error: ApiError) -> str:
        """An error as the last event of a stream."""
        values = error.body()["error"]
        return self._event(
            "error", code=values["code"], message=values["message"], param=values["param"]
        )

    # --- parts of a stream ---------------------------------------------------------------------

    def _written(self, one: AnswerEvent, answer: AnswerSoFar) -> Iterator[str]:
        """What an event adds to the stream, and to the answer so far."""
        is_first = not (answer.progress if isinstance(one, Progress) else answer.texts)
        answer.add(one)
        if isinstance(one, Progress):
            if is_first:
                yield self._item("added", 0, self._reasoning_item([]))
                yield self._summary("part.added", part={"type": "summary_text", "text": ""})
            yield self._summary("text.delta", delta=one.text)
            return
        if is_first:
            yield from self._open_message(answer)
        if isinstance(one, Done):
            yield from self._close(answer, one)
        else:
            yield self._content("output_text.delta", answer, delta=one.text, logprobs=[])

    def _open_message(self, answer: AnswerSoFar) -> Iterator[str]:
        for item in self._reasoning_items(answer):
            part = item["summary"][0]
            yield self._summary("text.done", text=part["text"])
            yield self._summary("part.done", part=part)
            yield self._item("done", 0, item)
        empty = {**self._message("in_progress", answer), "content": []}
        yield self._item("added", _place(answer), empty)
        yield self._content("content_part.added", answer, part=_output_text(AnswerSoFar()))

    def _close(self, answer: AnswerSoFar, end: Done) -> Iterator[str]:
        part = _output_text(answer)
        for number, one in enumerate(part["annotations"]):
            yield self._content(
                "output_text.annotation.added", answer, annotation=one, annotation_index=number
            )
        yield self._content("output_text.done", answer, text=answer.text, logprobs=[])
        yield self._content("content_part.done", answer, part=part)
        yield self._item("done", _place(answer), self._message("completed", answer))
        response = self.whole(answer, end)
        yield self._event(f"response.{response['status']}", response=response)

    def _summary(self, what: str, **fields: object) -> str:
        place = {"item_id": self._reasoning_id, "output_index": 0, "summary_index": 0}
        return self._event(f"response.reasoning_summary_{what}", **place, **fields)

    def _content(self, what: str, answer: AnswerSoFar, **fields: object) -> str:
        place = {"item_id": self._message_id, "output_index": _place(answer), "content_index": 0}
        return self._event(f"response.{what}", **place, **fields)

    def _item(self, what: str, place: int, item: Json) -> str:
        return self._event(f"response.output_item.{what}", output_index=place, item=item)

    def _event(self, name: str, **fields: object) -> str:
        number, self._number = self._number, self._number + 1
        return event({"type": name, "sequence_number": number, **fields}, name)

    # --- items of the output -------------------------------------------------------------------

    def _reasoning_items(self, answer: AnswerSoFar) -> list[Json]:
        if not answer.progress:
            return []
        text = "".join(answer.progress)
        return [self._reasoning_item([{"type": "summary_text", "text": text}])]

    def _reasoning_item(self, summary: list[Json]) -> Json:
        return {"id": self._reasoning_id, "type": "reasoning", "summary": summary}

    def _message(self, status: str, answer: AnswerSoFar) -> Json:
        return {
            "id": self._message_id,
            "type": "message",
            "status": status,
            "role": "assistant",
            "content": [_output_text(answer)],
        }


def _place(answer: AnswerSoFar) -> int:
    """The place of the message among the items of the output."""
    return 1 if answer.progress else 0


def _output_text(answer: AnswerSoFar) -> Json:
    cited = answer.end.citations if answer.end else ()
    annotations = [{"type": "file_citation", **citation_fields(one)} for one in cited]
    return {"type": "output_text", "text": answer.text, "annotations": annotations, "logprobs": []}
