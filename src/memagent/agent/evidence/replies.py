"""The format of replies where the model quotes, lists items, or says that it has read enough.

    <quote>The mill was sold in 1873.</quote>       evidence
    <item>Ada Holm | 14 | Ada Holm sold 14 crates of pears.</item>      items
    The mill: sold in 1873.                         everything else is the memory
    <enough/>                                       stop_early

Nothing else is asked of a reply, so whatever a model writes can be used: without marks it is the memory, as in
the plain loop. Marks count in replies only. Those that a text holds are shown to the model without their bracket,
one character for one, so that a copied sentence never ends a quote, makes an item or stops the reading.

    >>> parse_reply(
    ...     "<quote>It is red.</quote>\\nThe house is red. <enough/>",
    ...     ReplyFormat(quotes=True, stop=True),
    ... )
    ParsedReply(memory='The house is red.', quotes=(Quote(text='It is red.', start=None, end=None, places=(), item=None, value=None, is_inferred=False),), says_enough=True, is_malformed=False)
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

from memagent.agent.evidence.quotes import Quote
from memagent.config import AgentConfig

BRACKET = " "
"""Shown in place of the bracket of a mark that a text holds."""
SEPARATOR = "|"
"""Between the name of an item, its value and its quote."""

_mark = re.compile(r"<(/?)(quote|item|enough|memory)\s*(/?)>", re.IGNORECASE)
_in_text = re.compile(
    r"<(?=[\s/]{0,8}(?:quote|item|enough|missing|nothing|memory|section|question|think|thinking|thought|reasoning)\b)",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyFormat:
    """What replies may hold besides the memory."""

    quotes: bool = False
    items: bool = False
    stop: bool = False
    no_change: bool = False

    @classmethod
    def of(cls, config: AgentConfig) -> ReplyFormat:
        """The format that settings ask for."""
        return cls(
            quotes=config.asks_quotes and not config.items,
            items=config.items,
            stop=config.stop_early,
            no_change=config.no_change,
        )

    @property
    def has_marks(self) -> bool:
        """Whether replies are searched for marks."""
        return self.quotes or self.items or self.stop


class ParsedReply(NamedTuple):
    """A reply, taken apart."""

    memory: str
    """What is left for the memory."""
    quotes: tuple[Quote, ...] = ()
    """As the model wrote them, not yet searched in the text."""
    says_enough: bool = False
    is_malformed: bool = False
    """Whether marks were not closed, not opened, or items lacked a part."""


def shielded(text: str) -> str:
    """A text whose marks are none any more; every character keeps its place."""
    return _in_text.sub(BRACKET, text)


def parse_reply(reply: str, reply_format: ReplyFormat) -> ParsedReply:
    """Take a reply apart. Marks that the format does not have are part of the memory."""
    if not reply_format.has_marks:
        return ParsedReply(reply)
    parser = _Parser(reply_format)
    position = 0
    for mark in _mark.finditer(reply):
        parser.text(reply[position : mark.start()])
        parser.mark(mark)
        position = mark.end()
    parser.text(reply[position:])
    return parser.result()


class _Parser:
    def __init__(self, reply_format: ReplyFormat) -> None:
        self._format = reply_format
        self._memory: list[str] = []
        self._quotes: list[Quote] = []
        self._open: str | None = None
        """Name of the mark that is open."""
        self._inside: list[str] = []
        self._says_enough = False
        self._is_malformed = False

    def text(self, text: str) -> None:
        (self._memory if self._open is None else self._inside).append(text)

    def mark(self, mark: re.Match[str]) -> None:
        name, is_closing = mark[2].lower(), bool(mark[1])
        if name == "memory" and self._open is None:
            return  # some models wrap the memory as the prompt does
        if name == "enough" and self._open is None and self._format.stop:
            self._says_enough = True
        elif name in ("quote", "item") and (self._format.quotes or self._format.items):
            if self._open is None:
                self._is_malformed |= is_closing
                self._open = None if is_closing else name
            elif is_closing:
                self._is_malformed |= name != self._open
                self._close("".join(self._inside))
            else:  # the one before was not closed
                self._leave_open()
                self._open = name
        else:
            self.text(mark[0])

    def _close(self, said: str) -> None:
        if said.strip():
            is_item = self._open == "item"
            # name, value and quote, which may hold the separator too
            parts = said.split(SEPARATOR, 2) if is_item else [said]
            *names, text = (part.strip() for part in parts)
            name, value = ((one or None) for one in (*names, "", "")[:2])
            self._is_malformed |= is_item and name is None
            self._quotes.append(Quote(text=text, item=name, value=value))
        self._open, self._inside = None, []

    def _leave_open(self) -> None:
        """A quote without an end is the rest of its line; what follows is memory."""
        self._is_malformed = True
        line, end, rest = "".join(self._inside).lstrip("\n").partition("\n")
        self._close(line)
        self._memory.append(end + rest)

    def result(self) -> ParsedReply:
        if self._open is not None:
            self._leave_open()
        memory = "".join(self._memory).strip()
        return ParsedReply(memory, tuple(self._quotes), self._says_enough, self._is_malformed)
