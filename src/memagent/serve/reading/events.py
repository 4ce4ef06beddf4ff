"""What happens while a request is answered: lines of progress, pieces of the answer, and its end."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field

from memagent.serve.errors import ApiError
from memagent.types import Usage


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """A line about the reading, for people who wait."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerText:
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
class Finished:
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


AnswerEvent = Progress | AnswerText | Finished
AnswerEvents = AsyncGenerator[AnswerEvent, None]

BEGUN = Progress(text="")
"""The first event: there is room for the answer."""


@dataclass(slots=True)
class AnswerSoFar:
    """An answer as far as it has come."""

    progress: list[str] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    end: Finished | None = None

    @property
    def text(self) -> str:
        """The text of the answer."""
        return "".join(self.texts)

    def add(self, event: AnswerEvent) -> None:
        """Take the next event."""
        if isinstance(event, Finished):
            self.end = event
        else:
            (self.progress if isinstance(event, Progress) else self.texts).append(event.text)


async def whole_answer(events: AnswerEvents) -> tuple[AnswerSoFar, Finished]:
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
