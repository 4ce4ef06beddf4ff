"""What became of the evidence: whether a reader took it into its memory, and whether it was there at the end.

A memory may say the same in other words, so these are lower bounds. They tell two failures apart: a fact
that was never noted, and one that a later memory lost.

    >>> recall(["The house is red.", "Anna owns it."], ["the house is red", "Anna owns it!"])
    Recall(captured=1.0, retained=0.5)
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


def recall(evidence: Sequence[str], memories: Sequence[str]) -> Recall | None:
    """How much of the evidence the memories hold; None without evidence or memories."""
    wanted = [key for text in evidence if (key := _key(text))]
    if not wanted or not memories:
        return None
    held = [_key(memory) for memory in dict.fromkeys(memories)]
    last = _key(memories[-1])
    captured = sum(any(one in memory for memory in held) for one in wanted)
    return Recall(captured / len(wanted), sum(one in last for one in wanted) / len(wanted))


def _key(text: str) -> str:
    """Words between blanks, so that none is found inside another."""
    words = " ".join(_words.findall(text.casefold()))
    return f" {words} " if words else ""
