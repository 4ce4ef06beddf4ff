"""What needles are hidden in, and how.

haystack.text(size)                               grows with its size: sentences, characters or needles
hide(text, [(depth, sentence)], separator=" ")    the text with the sentences in it, and their spans

    depth 0.0 ............. 0.37 ............................. 1.0
    It rains. The road  ▲  is long. Nobody is on it. ...
                        └ put at the nearest beginning of a sentence, so no sentence is broken
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

NOISE = (
    "The rain falls on the roof.",
    "The road goes up the hill.",
    "A lamp is lit.",
    "The wind moves the leaves.",
    "Somebody closes a door.",
    "It is quiet again.",
)
"""The sentences that the haystack `repeat` repeats."""

# A mark that ends a sentence, closing quotes, and space, then no small letter and no digit; not after
# a title or an initial. Or an empty line.
SENTENCE_END = re.compile(
    r"(?<!\bMr)(?<!\bMrs)(?<!\bDr)(?<!\bSt)(?<!\b[A-Z])[.!?][\"'\u201d\u2019)\]]*\s+(?![a-z0-9])"
    r"|[\u3002\uff01\uff1f][\u201d\u2019\u300d\u300f\uff09]*\s*"
    r"|\n[ \t]*\n\s*"
)
_CLOSED = re.compile(r"[.!?\u3002\uff01\uff1f][\"'\u201d\u2019)\]\u300d\u300f\uff09]*\s*$")
_LINE = re.compile(r"\n\s*")
_SPACE = re.compile(r"\s+")
WINDOW_CHARS = 500


class Haystack(Protocol):
    """A text to hide sentences in."""

    separator: str
    """What separates its sentences."""

    def text(self, size: int) -> str:
        """The text of a size; a larger one begins with a smaller one."""
        ...

    def notes(self, size: int) -> dict[str, object]:
        """What is worth knowing about the text of a size; goes into an example's metadata."""
        ...


class NoiseHaystack:
    """The same few sentences, repeated. Size is their number."""

    separator = " "

    def text(self, size: int) -> str:
        rounds, rest = divmod(size, len(NOISE))
        return " ".join([" ".join(NOISE)] * rounds + list(NOISE[:rest]))

    def notes(self, size: int) -> dict[str, object]:
        return {}


class EssayHaystack:
    """Texts one after the other, from the start again when they end. Size is in characters."""

    separator = " "

    def __init__(self, essays: str, *, first_char: int = 0) -> None:
        self._essays = f"{essays}\n\n"
        self._first = first_char

    def text(self, size: int) -> str:
        end = self._first + size
        rounds = -(-end // len(self._essays))
        whole = (self._essays * rounds)[self._first : end + 1]
        if len(whole) <= size:
            return whole
        while size and not whole[size].isspace():  # no word is cut
            size -= 1
        return whole[:size].rstrip()

    def notes(self, size: int) -> dict[str, object]:
        return {"essay_rounds": -(-size // len(self._essays))}


class NeedleHaystack:
    """Sentences just like the hidden ones, with other keys. Size is their number."""

    separator = "\n"

    def __init__(self, draw: Callable[[], str]) -> None:
        self._draw = draw
        self._lines: list[str] = []

    def text(self, size: int) -> str:
        while len(self._lines) < size:
            self._lines.append(self._draw())
        return "\n".join(self._lines[:size])

    def notes(self, size: int) -> dict[str, object]:
        return {"num_distractors": size}


class Hidden(NamedTuple):
    """A text with sentences hidden in it."""

    text: str
    spans: list[tuple[int, int]]
    """Offsets of the sentences, in the order they were given."""


def hide(text: str, placed: Sequence[tuple[float, str]], *, separator: str) -> Hidden:
    """Put each sentence near its depth, from 0 to 1, between two sentences of the text.

    Sentences at the same place are ordered by depth.
    """
    order = sorted(range(len(placed)), key=lambda number: placed[number][0])
    pieces: list[str] = []
    spans = [(0, 0)] * len(placed)
    position = done = 0  # in the new text, in the old one
    for number in order:
        depth, sentence = placed[number]
        gap = max(nearest_gap(text, depth), done)
        before, after = text[done:gap], separator
        if gap == len(text) and text:
            before, after = before + separator, ""
        start = position + len(before)
        spans[number] = (start, start + len(sentence))
        pieces += [before, sentence, after]
        position, done = start + len(sentence) + len(after), gap
    joined = "".join([*pieces, text[done:]])
    return Hidden(joined if text else joined.removesuffix(separator), spans)


def nearest_gap(text: str, depth: float) -> int:
    """The beginning or end of a sentence that lies nearest to a depth from 0 to 1.

    Where there is none near, as in a text without full stops, of a line, or else of a word.
    """
    target = round(depth * len(text))
    first, last = max(0, target - WINDOW_CHARS), min(len(text), target + WINDOW_CHARS)
    for boundary in (SENTENCE_END, _LINE, _SPACE):
        if gaps := _gaps(text, first, last, boundary):
            return min(gaps, key=lambda gap: abs(gap - target))
    return 0 if target < len(text) / 2 else len(text)


def depths_of(source: random.Random, count: int, depth: float | str) -> list[float]:
    """`count` depths: uniform, from RULER's 40, or all the one that is given."""
    if depth == "uniform":
        return [source.random() for _ in range(count)]
    if depth == "ruler":
        return [round(100 * step / 39) / 100 for step in _draw_steps(source, count)]
    return [float(depth)] * count


def _draw_steps(source: random.Random, count: int) -> list[int]:
    """Different ones as long as there are any."""
    steps: list[int] = []
    while len(steps) < count:
        steps += source.sample(range(40), min(40, count - len(steps)))
    return steps


def _gaps(text: str, first: int, last: int, boundary: re.Pattern[str]) -> list[int]:
    gaps = [match.end() for match in boundary.finditer(text, first, last) if match.end() < last]
    if first == 0:
        gaps.append(0)
    if last == len(text) and _CLOSED.search(text, max(0, last - 20)):
        gaps.append(last)
    return gaps
