"""Chat logs in JSON lines, rendered as turns.

    {"role": "user", "content": "Hello"}                  user: Hello
    {"role": "assistant", "content": [{"text": "Hi"}]}
                                                    ─▶    assistant: Hi

A line is one message, or a whole conversation under `messages` (OpenAI) or `conversations`
(ShareGPT); conversations are set apart by `---`. JSON lines of any other kind are plain text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from memagent.documents.document import Document
from memagent.documents.formats.raw import RawFile, tidy

CONVERSATION_KEYS = ("messages", "conversations")
BETWEEN_TURNS = "\n\n"
BETWEEN_CONVERSATIONS = "\n\n---\n\n"


def read_chat(raw: RawFile) -> Document:
    """A chat log as `role: text` turns, or the text unchanged where it is no chat log."""
    text = raw.text()
    turns = chat_text(text)
    if turns is None:
        return Document.from_text(text, raw.source, has_lines=True)
    return Document.from_text(tidy(turns), raw.source)


def chat_text(text: str) -> str | None:
    """The turns of a chat log; None if any line is something else."""
    conversations: list[list[str]] = []
    continues = False
    for line in filter(str.strip, text.split("\n")):
        record = _record(line)
        turn = _turn(record)
        turns = _conversation(record) if turn is None else [turn]
        if turns is None:
            return None
        if turn is not None and continues:
            conversations[-1] += turns
        else:
            conversations.append(turns)
        continues = turn is not None
    rendered = (BETWEEN_TURNS.join(filter(None, turns)) for turns in conversations)
    return BETWEEN_CONVERSATIONS.join(filter(None, rendered))


def _record(line: str) -> Mapping[str, Any]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return record if isinstance(record, dict) else {}


def _conversation(record: Mapping[str, Any]) -> list[str] | None:
    """The turns of a record that holds a whole conversation; None if it does not."""
    messages = next((record[key] for key in CONVERSATION_KEYS if key in record), None)
    if not isinstance(messages, list) or not messages:
        return None
    turns = [_turn(message) if isinstance(message, dict) else None for message in messages]
    known = [turn for turn in turns if turn is not None]
    return known if len(known) == len(turns) else None


def _turn(message: Mapping[str, Any]) -> str | None:
    """`role: text`, or "" for a message without text; None if it is no message."""
    role = message.get("role", message.get("from"))
    content = _content(message.get("content", message.get("value")))
    has_content = not message.keys().isdisjoint(("content", "value", "tool_calls"))
    if not isinstance(role, str) or not has_content or content is None:
        return None
    said = "\n".join(filter(None, [content, *_calls(message)]))
    return f"{role}: {said}" if said else ""


def _content(content: object) -> str | None:
    """Text of a content that is a string, missing, or a list of parts; None if it is none of these."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        return None
    texts = (part.get("text") if isinstance(part, dict) else part for part in content)
    return "\n".join(text for text in texts if isinstance(text, str))


def _calls(message: Mapping[str, Any]) -> list[str]:
    """Tool calls as `name(arguments)`."""
    calls = message.get("tool_calls")
    functions = [call.get("function") for call in calls or [] if isinstance(call, dict)]
    return [
        f"{function.get('name')}({function.get('arguments', '')})"
        for function in functions
        if isinstance(function, dict)
    ]
