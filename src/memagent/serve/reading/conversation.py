"""A conversation that may be longer than the window: what is read, and what is asked.

    system     short: part of the question         long: part of the text
    earlier    user and assistant                        part of the text
    last user  short parts: the question           long parts and files: part of the text

Where the last message is one long text, its last paragraph, line or sentence is the question, or its first
paragraph if only that asks something.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from memagent.documents.document import Document
from memagent.serve.wire import ApiError
from memagent.types import Message

SYSTEM_ROLES = ("system", "developer")
QUESTION_MARKS = "?\N{FULLWIDTH QUESTION MARK}\N{ARABIC QUESTION MARK}"
_blank_line = re.compile(r"\n[ \t]*\n")
_sentence_end = re.compile(r"(?<=[.!?\u3002\uff01\uff1f])\s+")


@dataclass(frozen=True, slots=True, kw_only=True)
class MessagePart:
    """A part of a message: its text, or a file that is attached to it."""

    text: str
    file: Document | None = None
    file_id: str | None = None
    """Of a file that is stored here."""

    @property
    def shown(self) -> str:
        """As a model sees it; a file is headed by its name."""
        return f"===== {self.file.source} =====\n{self.file.text}" if self.file else self.text

    def document(self, role: str) -> Document:
        """As a text to read."""
        return self.file or Document.from_text(self.text, role)


@dataclass(frozen=True, slots=True, kw_only=True)
class Utterance:
    """One message."""

    role: str
    pieces: tuple[MessagePart, ...]

    @property
    def text(self) -> str:
        """All of it."""
        separator = "\n\n" if any(piece.file for piece in self.pieces) else ""
        return separator.join(piece.shown for piece in self.pieces)

    @property
    def num_chars(self) -> int:
        """Characters of all of it, without headings."""
        return sum(len(piece.file.text if piece.file else piece.text) for piece in self.pieces)

    @property
    def is_system(self) -> bool:
        return self.role in SYSTEM_ROLES


@dataclass(frozen=True, slots=True, kw_only=True)
class LongText:
    """What the reader gets."""

    question: str
    document: Document
    file_ids: Mapping[str, str] = field(default_factory=dict)
    """Ids of stored files, by the name under which the document has them; not those of several with one name."""
    all_file_ids: frozenset[str] = frozenset()
    """All stored files in the conversation."""


IsShort = Callable[[str], bool]
"""Whether a text may be part of a question."""


def as_messages(conversation: Sequence[Utterance]) -> list[Message]:
    """The whole conversation for a model."""
    return [
        Message(role="system" if one.is_system else one.role, content=one.text)
        for one in conversation
    ]


def split_long(conversation: Sequence[Utterance], is_short: IsShort) -> LongText:
    """The question and the text. Raises ApiError where there is no question, or nothing else."""
    users = [number for number, one in enumerate(conversation) if one.role == "user"]
    number = users[-1] if users else len(conversation) - 1
    instructions = "\n\n".join(one.text for one in conversation if one.is_system).strip()
    is_part = bool(instructions) and is_short(instructions)
    before = [one for one in conversation[:number] if not (is_part and one.is_system)]
    question, long = _asked(conversation[number], is_short)
    texts = [piece.document(one.role) for one in before for piece in one.pieces]
    texts += long
    after = conversation[number + 1 :]
    texts += [piece.document(one.role) for one in after for piece in one.pieces]
    texts = [document for document in texts if document.text.strip()]
    if not question or not texts:
        raise ApiError(
            400,
            "the messages do not fit the window, and the question cannot be separated from the text; send the "
            "text and the question in separate messages, or in separate parts of one message",
            param="messages",
            code="question_not_found",
        )
    asked = f"{instructions}\n\n{question}" if is_part else question
    ids = {
        (piece.file.source, piece.file_id)
        for one in conversation
        for piece in one.pieces
        if piece.file and piece.file_id
    }
    num_with = Counter(name for name, _ in ids)
    # a message is always headed, so that sections stay the same when others follow it
    is_file = any(piece.file is texts[0] for one in conversation for piece in one.pieces)
    document = Document.join(texts, heads_one=not is_file)
    return LongText(
        question=asked,
        document=document,
        file_ids={name: file_id for name, file_id in ids if num_with[name] == 1},
        all_file_ids=frozenset(file_id for _, file_id in ids),
    )


def _asked(last: Utterance, is_short: IsShort) -> tuple[str, list[Document]]:
    """The question in the last message, and its other texts."""
    long: list[MessagePart] = []
    short: list[str] = []
    for piece in last.pieces:
        if piece.file or not is_short(piece.text):
            long.append(piece)
        else:
            short.append(piece.text.strip())
    question = "\n".join(filter(None, short))
    texts = [piece.document(last.role) for piece in long]
    if question:
        return question, texts
    plain = [number for number, piece in enumerate(long) if not piece.file]
    if not plain:
        return "", texts
    number = plain[-1]
    question, rest = cut_question(long[number].text, is_short)
    texts[number] = Document.from_text(rest, last.role)
    return question, texts


def cut_question(text: str, is_short: IsShort) -> tuple[str, str]:
    """The question in a long text, and the rest of it; the question is empty where none is found.

    >>> cut_question("Once upon a time.\\n\\nThe end.\\n\\nWho ended?", lambda part: len(part) < 20)
    ('Who ended?', 'Once upon a time.\\n\\nThe end.')
    >>> cut_question("Summarise:\\n\\nOnce upon a time.\\n\\nThe end.", lambda part: len(part) < 20)
    ('Summarise:', 'Once upon a time.\\n\\nThe end.')
    """
    text = text.strip()
    tail = _tail(text, is_short)
    if not any(mark in tail for mark in QUESTION_MARKS):
        found = _blank_line.search(text)
        head = text[: found.start()].strip() if found else ""
        asks = head.endswith(":") or any(mark in head for mark in QUESTION_MARKS)
        if found and asks and is_short(head):
            return head, text[found.end() :].lstrip()
    return tail, text.removesuffix(tail).rstrip() if tail else text


def _tail(text: str, is_short: IsShort) -> str:
    """The last paragraph, else line, else sentence that is short."""
    for end in (_blank_line, re.compile("\n"), _sentence_end):
        last = None
        for last in end.finditer(text):  # noqa: B007  only the last one counts
            pass
        if last is not None and is_short(tail := text[last.end() :].strip()):
            return tail
    return ""
