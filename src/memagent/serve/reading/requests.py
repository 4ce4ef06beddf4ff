"""Requests of the gateway, validated: chats, and the simpler part of the Responses API; and what of a conversation is
read, and what is asked.

`reading` in a request holds settings of the reader, such as {"chunk_tokens": 2000}. They may also stand in
the name of the model, for programs that can choose nothing else: `memagent:chunk_tokens=2000,seed=1`.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import BeforeValidator, Field, model_validator

from memagent.agent.prompts import PROMPT_SETS
from memagent.config import AgentConfig, with_override
from memagent.documents.document import Document
from memagent.errors import ConfigError
from memagent.names import hint
from memagent.serve.wire import ApiError, ChatFields, GeneratingRequest, WireModel
from memagent.types import Message

if TYPE_CHECKING:
    from memagent.serve.reading.files import RequestFiles

MODEL = "memagent"
MAX_PARTS = 10_000
"""Parts of one message."""
MAX_MESSAGES = 10_000
MAX_MODEL = 1000
"""Characters of a model's name, with settings in it."""
TEXT_TYPES = ("text", "input_text", "output_text", "refusal")
"""Types of parts that are text."""
MAX_NAME = 200
"""Characters of a file's name."""


# --- parts of messages ----------------------------------------------------------------------------


class AttachedFile(WireModel):
    """A file in a message: stored before, or with its contents."""

    file_id: str | None = Field(default=None, max_length=100)
    file_data: str | None = None
    """The contents in base64, as a data URL or alone."""
    filename: str | None = Field(default=None, max_length=1000)

    def part(self, files: RequestFiles) -> MessagePart:
        """The file as a part of a message."""
        if self.file_id is not None:
            return MessagePart(text="", file=files.stored(self.file_id), file_id=self.file_id)
        if self.file_data is None:
            raise ApiError(400, "a file needs file_id or file_data", param="messages")
        _, _, encoded = self.file_data.rpartition(",")
        try:
            data = base64.b64decode(encoded, validate=True)
        except (binascii.Error, ValueError):
            raise ApiError(400, "file_data is not base64", param="messages") from None
        return MessagePart(text="", file=files.given(data, file_name(self.filename)))


class ContentPart(AttachedFile):
    """A part of a message: text, or a file. The Responses API has the fields of a file in the part itself."""

    type: str
    text: str | None = None
    file: AttachedFile | None = None

    def piece(self, files: RequestFiles) -> MessagePart:
        """The part with the text of its file."""
        if self.type in TEXT_TYPES:
            return MessagePart(text=self.text or "")
        if self.type == "file" and self.file is not None:
            return self.file.part(files)
        if self.type == "input_file":
            return self.part(files)
        raise ApiError(
            400,
            f"parts of type {self.type[:40]!r} are not supported; send text or files with text",
            param="messages",
            code="unsupported_parameter",
        )


Content = str | Annotated[list[ContentPart], Field(max_length=MAX_PARTS)] | None


class GatewayMessage(WireModel):
    """One message."""

    role: str = Field(max_length=40)
    content: Content = None
    type: str | None = None

    def utterance(self, files: RequestFiles) -> Utterance:
        """The message with the texts of its files."""
        if isinstance(self.content, list):
            pieces = tuple(part.piece(files) for part in self.content)
        else:
            pieces = (MessagePart(text=self.content or ""),)
        return Utterance(role=self.role, pieces=pieces)


Messages = Annotated[list[GatewayMessage], Field(min_length=1, max_length=MAX_MESSAGES)]


# --- requests -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayRequest:
    """A request of either API."""

    messages: Sequence[GatewayMessage]
    settings: dict[str, Any]
    """Settings of the reader, not validated yet."""
    max_tokens: int | None
    temperature: float | None
    top_p: float | None
    seed: int | None = None
    stop: tuple[str, ...] = ()

    @property
    def has_files(self) -> bool:
        """Whether a part of a message is anything but text."""
        return any(
            part.type not in TEXT_TYPES
            for message in self.messages
            if isinstance(message.content, list)
            for part in message.content
        )

    def conversation(self, files: RequestFiles) -> list[Utterance]:
        """The messages with the texts of their files, which takes time where there are files."""
        return [message.utterance(files) for message in self.messages]

    def reading_config(self, base: AgentConfig) -> AgentConfig:
        """How a long text is read: the server's settings, and those of the request."""
        asked = {"temperature": self.temperature, "top_p": self.top_p, "seed": self.seed}
        given = {name: value for name, value in asked.items() if value is not None}
        settings = {**given, **self.settings}
        prompts = settings.get("prompts")
        if prompts is not None and str(prompts) not in PROMPT_SETS:  # a path would be the server's
            raise ConfigError(
                f"there are no prompts {prompts!r}; {hint(str(prompts), PROMPT_SETS)}"
            )
        config = AgentConfig.parse({**base.model_dump(), **settings})
        config.check_used(self.settings)
        if config.window > base.window:
            raise ConfigError(f"`window` of this server is at most {base.window}")
        return config


class GatewayChat(ChatFields):
    """POST /v1/chat/completions."""

    messages: Messages
    n: int | None = Field(default=None, ge=1, le=1)
    reading: dict[str, Any] | None = None
    """Settings of the reader."""

    @model_validator(mode="after")
    def _without_logprobs(self) -> GatewayChat:
        if self.logprobs:
            raise ValueError("logprobs are not supported by the gateway; omit them")
        return self

    @property
    def request(self) -> GatewayRequest:
        return GatewayRequest(
            messages=self.messages,
            settings={**settings_in_name(self.model), **(self.reading or {})},
            max_tokens=self.token_limit,
            temperature=self.temperature,
            top_p=self.top_p,
            seed=self.seed,
            stop=self.stop,
        )


NOT_KEPT = "responses are not kept on this server; send the whole conversation as input"


def _as_messages(value: Any) -> Any:
    return [{"role": "user", "content": value}] if isinstance(value, str) else value


class ResponsesRequest(GeneratingRequest):
    """POST /v1/responses."""

    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = {
        "previous_response_id": (None,),
        "conversation": (None,),
        "background": (None, False),
        "tools": (None, []),
        "prompt": (None,),
    }
    reasons: ClassVar[dict[str, str]] = {
        "previous_response_id": NOT_KEPT,
        "conversation": NOT_KEPT,
        "background": "responses are not computed in the background; omit it",
        "tools": "tools are not supported by this server; omit them",
        "prompt": "stored prompts are not supported; send the text as input",
    }

    input: Annotated[Messages, BeforeValidator(_as_messages)]
    instructions: str | None = None
    max_output_tokens: int | None = Field(default=None, ge=1)
    text: dict[str, Any] | None = None
    reading: dict[str, Any] | None = None
    """Settings of the reader."""

    @model_validator(mode="after")
    def _only_text(self) -> ResponsesRequest:
        if (self.text or {}).get("format") not in (None, {"type": "text"}):
            raise ValueError("text.format must be text; other formats are not supported")
        for item in self.input:
            if item.type not in (None, "message"):
                raise ValueError(f"input items of type {item.type[:40]!r} are not supported")
        return self

    @property
    def request(self) -> GatewayRequest:
        first = [GatewayMessage(role="system", content=self.instructions)]
        return GatewayRequest(
            messages=[*(first if self.instructions else ()), *self.input],
            settings={**settings_in_name(self.model), **(self.reading or {})},
            max_tokens=self.max_output_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
        )


def settings_in_name(model: str | None) -> dict[str, Any]:
    """The settings in the name of the model. Raises ApiError 404 for another model.

    >>> settings_in_name("memagent:chunk_tokens=2000,seed=1")
    {'chunk_tokens': 2000, 'seed': 1}
    """
    name, _, changes = (model or MODEL).partition(":")
    if name != MODEL or len(changes) > MAX_MODEL:
        raise ApiError(
            404,
            f"the model {(model or '')[:100]!r} does not exist; this server has {MODEL!r}",
            param="model",
            code="model_not_found",
        )
    values: dict[str, Any] = {}
    for change in filter(None, changes.split(",")):
        values = with_override(values, change)
    return values


def file_name(name: str | None) -> str:
    """A name that clients gave to a file, without folders and control characters."""
    plain = PurePosixPath((name or "").replace("\\", "/")).name
    visible = "".join(letter for letter in plain if letter.isprintable())
    return visible[-MAX_NAME:] or "file.txt"


# --- a conversation that may be longer than the window ----------------------------------------------

#     system     short: part of the question         long: part of the text
#     earlier    user and assistant                        part of the text
#     last user  short parts: the question           long parts and files: part of the text
#
# Where the last message is one long text, its last paragraph, line or sentence is the question, or its first paragraph if
# only that asks something.


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
    """The id of a file that is stored here."""

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
