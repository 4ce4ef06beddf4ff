"""What is read from replies to notes and merges, and how notes stand in a merge.

Decisions are read from the model's reply only: a section that says "Nothing." decides nothing.
"""

from __future__ import annotations

import re
from typing import NamedTuple

NOTHING = "Nothing."
"""The reply to a section that holds nothing for the question."""
LONGEST_PLACE = "1000000-1000000"
"""Stands for the sections of a note when it is measured."""
MISSING = "Missing:"
"""What the last line of a merge begins with."""

_mark = re.compile(r"<(?=/?(?:note|memory|question)\b)", re.IGNORECASE)
_missing = re.compile(r"[\W_]*missing[\W_]*?:(.*)", re.IGNORECASE | re.DOTALL)
_NO_WORDS = {"", "nothing", "none", "no", "n/a"}


class MergeReply(NamedTuple):
    """The reply to a merge, taken apart."""

    memory: str
    missing: str | None
    """What has to be looked for in another round; None where nothing is missing or the reply does not say."""


def says_nothing(reply: str, nothing: str = NOTHING) -> bool:
    """Whether a reply is empty, or says that a section holds nothing; case and outer punctuation do not count.

    The whole reply must say so: a note may begin with such a word, copied from the text.
    """
    return bare(reply) in ("", bare(nothing))


def split_missing(reply: str) -> MergeReply:
    """Separate the memory of a merge from its last line.

    >>> split_missing("Mary was born in Leeds.\\nMissing: where Leeds lies")
    MergeReply(memory='Mary was born in Leeds.', missing='where Leeds lies')
    """
    body, _, last = reply.rstrip().rpartition("\n")
    found = _missing.fullmatch(last)
    if not found:
        return MergeReply(reply.strip(), None)
    missing = " ".join(found.group(1).split()).strip("*_`\"' ")
    return MergeReply(body.strip(), None if bare(missing) in _NO_WORDS else missing)


def with_missing(memory: str, missing: str | None) -> str:
    """A memory as sections of the next round are read with it."""
    return memory if missing is None else f"{memory}\n{MISSING} {missing}".strip()


def note_block(place: str, text: str) -> str:
    """A note as it stands in a merge. Marks of ours inside it are broken: a note cannot add another one."""
    return f'<note sections="{place}">\n{_mark.sub("(", text)}\n</note>'


def bare(reply: str) -> str:
    """A reply without case and outer punctuation, to compare it."""
    return reply.strip(" \t\r\n.\"'*`").casefold()
