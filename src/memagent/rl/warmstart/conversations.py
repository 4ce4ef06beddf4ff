"""Conversations to train on: messages whose assistant turns carry loss, and files of them.

{"id": "capital/0", "messages": [{"role": "user", "content": "..."}, {"role": "assistant", ...}]}

for example in read_conversations(Path("traces.jsonl")):      # the conversations of one example
    ...
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from memagent.agent.trace import StepKind
from memagent.data.formats.json_stream import place, read_records
from memagent.errors import ConfigError, DataError
from memagent.rl.agents.client import plain_message
from memagent.types import Message

ROLES = ("system", "user", "assistant", "tool")


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """Messages of a conversation; those of the assistant carry loss.

    Example: Conversation(id="capital/0", messages=({"role": "user", "content": "Capital of France?"},))
    """

    id: str
    """The id of the example; an example may have several conversations, such as one per section."""
    messages: tuple[Message, ...]
    task: str | None = None
    """Task of the example."""
    step: int | None = None
    """Position in the reading, from 0; None for a conversation that is not a step of one."""
    kind: StepKind | None = None

    def record(self) -> dict[str, Any]:
        """The conversation as a line of a file."""
        values = {"id": self.id, "task": self.task, "step": self.step, "kind": self.kind}
        known = {name: value for name, value in values.items() if value is not None}
        return {**known, "messages": list(self.messages)}


def read_conversations(path: Path) -> list[tuple[Conversation, ...]]:
    """The conversations of a file, grouped by example.

    A line has `messages`, and an `id` if it belongs to an example, as in files of `memagent data traces`.
    Without an id it is an example by itself.
    """
    found = list(_conversations(path))
    if not found:
        raise DataError(f"{path} holds no conversation")
    return [tuple(group) for _, group in groupby(found, key=lambda one: one.id)]


def _conversations(path: Path) -> Iterator[Conversation]:
    for number, record in read_records(path):
        where = place(path, number)
        if not isinstance(record, dict):
            raise DataError(f"{where}: a conversation is an object with messages")
        yield Conversation(
            id=str(record.get("id", where)), messages=_messages(record.get("messages"), where)
        )


def _messages(found: object, where: str) -> tuple[Message, ...]:
    if not isinstance(found, list) or not found:
        raise DataError(f"{where}: there are no messages")
    messages = tuple(_message(one, where) for one in found)
    if messages[0]["role"] == "assistant":
        raise DataError(f"{where}: the first message is the assistant's; start with a prompt")
    if not any(message["role"] == "assistant" for message in messages):
        raise DataError(f"{where}: there is no message of the assistant to train on")
    return messages


def _message(found: object, where: str) -> Message:
    try:
        message = plain_message(found) if isinstance(found, dict) else None
    except ConfigError as error:
        raise DataError(f"{where}: {error}") from None
    if message is None:
        raise DataError(f"{where}: a message is an object with role and content")
    if message["role"] not in ROLES:
        raise DataError(f"{where}: there is no role {message['role']!r}; use {', '.join(ROLES)}")
    return message
