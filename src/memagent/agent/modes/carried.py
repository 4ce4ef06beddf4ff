"""What a new reading takes over from an earlier one: whole steps, and replies to prompts that come again.

    earlier run ─▶ key of each call ─▶ reply
    new run     ─▶ key of the next call ─▶ known: the reply is used again, the step is flagged `carried`
                                        └▶ new: the model is asked

Where sections are read apart from each other, what a call depends on may become known only during the new reading:
the memory of a second round depends on what was found in the first. So replies are carried over by what they were
replies to, everything that a prompt is made of: for a section its text and the memory, for a merge its notes. The
question, the wording and the settings are those of the run. Offsets and places are found again in the new text.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from memagent.agent.evidence.quotes import Quote
from memagent.agent.model_call import ModelCall
from memagent.agent.trace import Step
from memagent.errors import RunError
from memagent.jsonl import read_lines, sealed
from memagent.types import Completion, Usage

CARRIED = "carried.jsonl"
"""File of a run with the replies that it may use again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CarriedReply:
    """What a model replied in an earlier run."""

    reply: str
    """Without reasoning."""
    reasoning: str | None
    was_cut: bool
    logprob: float | None = None

    @classmethod
    def of(cls, step: Step) -> CarriedReply:
        """The reply of a step."""
        return cls(
            reply=step.reply,
            reasoning=step.reasoning,
            was_cut="reply_cut" in step.flags,
            logprob=step.logprob,
        )


Replies = Mapping[str, CarriedReply]
"""Replies of an earlier run to one question, by the key of what they were replies to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Carried:
    """What a run takes over from an earlier one, by question number."""

    steps: Mapping[int, Sequence[Step]] = field(default_factory=dict)
    """Steps that the run begins with."""
    replies: Mapping[int, Replies] = field(default_factory=dict)
    """Replies that are used where the reading comes to their prompts again."""


def carried_call(replies: Replies, key: str) -> ModelCall | None:
    """The call with a key as an earlier run made it; it costs nothing now."""
    found = replies.get(key)
    if found is None:
        return None
    completion = Completion(
        text=found.reply,
        reasoning=found.reasoning,
        finish_reason="length" if found.was_cut else "stop",
        logprobs=None if found.logprob is None else (found.logprob,),
    )
    return ModelCall(completion, Usage(), time.time(), 0.0, is_carried=True)


# --- what a reply depends on ----------------------------------------------------------------------


def read_key(section_sha256: str, memory: str, number: int | None = None) -> str:
    """Key of a section that is read with a memory; `number` where the prompt numbers sections."""
    return _key("read", section_sha256, memory, number)


def merge_key(notes: Sequence[tuple[str, str]], memory: str) -> str:
    """Key of a merge of notes, each with its sections, into a memory."""
    return _key("merge", [list(note) for note in notes], memory)


def answer_key(
    memory: str,
    ledger: Sequence[Quote],
    *,
    num_sections: int,
    answer_tokens: int,
    ledger_tokens: int,
) -> str:
    """Key of an answer from a memory and quotes."""
    quotes = [[quote.text, quote.item, quote.value] for quote in ledger]
    return _key("answer", memory, quotes, num_sections, answer_tokens, ledger_tokens)


def _key(*parts: object) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


# --- on disk --------------------------------------------------------------------------------------


def lines_of(replies: Mapping[int, Replies]) -> Iterator[bytes]:
    """The replies as lines of a file."""
    for number, known in replies.items():
        for key, reply in known.items():
            record = {"question": number, "key": key, **asdict(reply)}
            yield sealed(json.dumps(record).encode()) + b"\n"


def read_replies(run: Path) -> dict[int, dict[str, CarriedReply]]:
    """The replies that the run in a folder may use again. Raises RunError where the file is damaged."""
    path = run / CARRIED
    found: dict[int, dict[str, CarriedReply]] = {}
    for number, line in enumerate(read_lines(path) if path.exists() else (), start=1):
        record = line.record
        try:
            question = _question.validate_python(record.pop("question", None))
            key = _text.validate_python(record.pop("key", None))
            reply = _reply.validate_python(record)
        except ValidationError:
            raise RunError(
                f"{path}, line {number}, is damaged; the run cannot be resumed"
            ) from None
        found.setdefault(question, {})[key] = reply
    return found


_question = TypeAdapter(int)
_text = TypeAdapter(str)
_reply = TypeAdapter(CarriedReply)
