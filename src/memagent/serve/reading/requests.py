"""Requests of the gateway, validated: chats, and the simpler part of the Responses API.

`reading` in a request holds settings of the reader, such as {"chunk_tokens": 2000}. They may also stand in
the name of the model, for programs that can choose nothing else: `memagent:chunk_tokens=2000,seed=1`.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import BeforeValidator, Field, model_validator

from memagent.agent.prompts import PROMPT_SETS
from memagent.config import AgentConfig, with_override
from memagent.errors import ConfigError
from memagent.names import hint
from memagent.serve.reading.conversation import MessagePart, Utterance
from memagent.serve.wire import ApiError, ChatFields, GeneratingRequest, WireModel

if TYPE_CHECKING:  # built on this module
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
