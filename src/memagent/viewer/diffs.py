"""What changed between two texts, word by word.

    word_diff("the old mill", "the new mill")
    [("same", "the "), ("gone", "old"), ("new", "new"), ("same", " mill")]

The parts that are not `gone` join to the text after, those that are not `new` to the text before.
"""

from __future__ import annotations

import re
from collections import Counter
from difflib import SequenceMatcher
from itertools import groupby
from typing import Literal

PartKind = Literal["same", "gone", "new"]
DiffPart = tuple[PartKind, str]
MAX_WORDS = 4000
"""Longer middles are shown as replaced: finding what they share takes time by the square of their length."""

_word = re.compile(r"\s+|\w+|[^\w\s]")


def word_diff(before: str, after: str) -> list[DiffPart]:
    """The parts that two texts share, and those that only one of them has, in order."""
    old, new = _word.findall(before), _word.findall(after)
    head = _num_equal(old, new)
    tail = _num_equal(old[head:][::-1], new[head:][::-1])
    old_middle, new_middle = old[head : len(old) - tail], new[head : len(new) - tail]
    parts: list[DiffPart] = [
        ("same", "".join(new[:head])),
        *_middle(old_middle, new_middle),
        ("same", "".join(new[len(new) - tail :])),
    ]
    return _joined(parts)


def num_changed(before: Counter[str], after: Counter[str]) -> tuple[int, int]:
    """Words that are new in a text, and words that are gone from it, wherever they stand."""
    return (after - before).total(), (before - after).total()


def words(text: str) -> Counter[str]:
    """How often each word is in a text."""
    return Counter(re.findall(r"\w+", text))


def _middle(old: list[str], new: list[str]) -> list[DiffPart]:
    if max(len(old), len(new)) > MAX_WORDS:
        return [("gone", "".join(old)), ("new", "".join(new))]
    parts: list[DiffPart] = []
    for kind, low, high, start, end in SequenceMatcher(None, old, new, False).get_opcodes():
        if kind == "equal":
            parts.append(("same", "".join(new[start:end])))
        else:
            parts += [("gone", "".join(old[low:high])), ("new", "".join(new[start:end]))]
    return parts


def _num_equal(first: list[str], second: list[str]) -> int:
    pairs = zip(first, second, strict=False)
    return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))


def _joined(parts: list[DiffPart]) -> list[DiffPart]:
    filled = [part for part in parts if part[1]]
    return [
        (kind, "".join(text for _, text in group))
        for kind, group in groupby(filled, key=lambda part: part[0])
    ]
