"""What became of the evidence: whether a reader took it into its memory, and whether it was there at the end.

A memory may say the same in other words, so these are lower bounds. They tell two failures apart: a fact
that was never noted, and one that a later memory lost.

    >>> recall(["The house is red.", "Anna owns it."], ["the house is red", "Anna owns it!"])
    Recall(captured=1.0, retained=0.5)

Where a reader cites places of the text, these are compared with the places of the evidence:

    >>> overlap(found=[(10, 30), (50, 60)], wanted=[(12, 30)])
    Overlap(precision=0.5, recall=1.0)
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

_words = re.compile(r"\w+")


class Recall(NamedTuple):
    """Fractions of the evidence, word for word; case and punctuation do not count."""

    captured: float
    """In any of the memories."""
    retained: float
    """In the last one."""


def recall(evidence: Sequence[str | tuple[str, ...]], memories: Sequence[str]) -> Recall | None:
    """How much of the evidence the memories hold; None without evidence or memories.

    Evidence that can be worded in several ways is a tuple of them.
    """
    wordings = [(each,) if isinstance(each, str) else each for each in evidence]
    wanted = [keys for each in wordings if (keys := [key for text in each if (key := _key(text))])]
    if not wanted or not memories:
        return None
    held = [_key(memory) for memory in dict.fromkeys(memories)]
    last = _key(memories[-1])
    captured = sum(any(key in memory for key in keys for memory in held) for keys in wanted)
    retained = sum(any(key in last for key in keys) for keys in wanted)
    return Recall(captured / len(wanted), retained / len(wanted))


Spans = Sequence[tuple[int, int]]
"""Character offsets into one text."""


class Overlap(NamedTuple):
    """Precision and recall of found spans against gold spans."""

    precision: float | None
    """Share of those found that are wanted; None where none was found."""
    recall: float
    """Share of those wanted that were found."""


def overlap(found: Spans, wanted: Spans) -> Overlap | None:
    """Compare places; two agree if they share at least half of the shorter one. None if none is wanted."""
    if not wanted:
        return None
    right = sum(any(_agree(one, other) for other in wanted) for one in found)
    reached = sum(any(_agree(one, other) for one in found) for other in wanted)
    return Overlap(right / len(found) if found else None, reached / len(wanted))


def stop_moment(unread: Spans, evidence: Spans, *, num_chars: int) -> float:
    """How well a reading of a text stopped: 0 if it left out evidence, else how much it saved of what it could.

    >>> stop_moment([(60, 100)], [(10, 20)], num_chars=100)
    0.5
    """
    if any(start < end[1] and end[0] < stop for start, stop in unread for end in evidence):
        return 0.0
    could = num_chars - max((end for _, end in evidence), default=0)
    saved = sum(stop - start for start, stop in unread)
    return min(1.0, saved / could) if could > 0 else 1.0


def _agree(one: tuple[int, int], other: tuple[int, int]) -> bool:
    shared = min(one[1], other[1]) - max(one[0], other[0])
    shorter = min(one[1] - one[0], other[1] - other[0])
    return shared > 0 and 2 * shared >= shorter


def _key(text: str) -> str:
    """Words between blanks, so that none is found inside another."""
    words = " ".join(_words.findall(text.casefold()))
    return f" {words} " if words else ""
