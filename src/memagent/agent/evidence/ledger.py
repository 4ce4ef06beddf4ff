"""The ledger: every quote that the text has, in its order. It is no part of the memory, so nothing in it is lost.

    Step.quotes ─▶ ledger_of ─▶ Quote* ─▶ look_up(question) ─▶ the answer's prompt: [1] ..., [4] ...
                                  ▲                                      │
                                  └────── numbers from 1 ◀── "Sources: 1, 4"

The ledger is on disk with the steps; this module computes it from them. Numbers count in the order of the text.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from memagent.agent.evidence.quotes import Quote, folded, item_key, rewords, words
from memagent.agent.evidence.replies import shielded
from memagent.rewards.text import last_boxed
from memagent.tokens.tokenizers import Tokenizer

MAX_INFERRED = 8
"""Quotes that are cited for an answer that names none, at most."""
MIN_FIT = 0.5
"""Share of a name's words that a question about it has at least."""
JOINT_TOKENS = 2
"""What the end of a line adds to its tokens, at most."""

MAX_LINE_CHARS = 2000
"""A line of sources is not longer."""

_sources = re.compile(
    r"[*_]*sources?[*_]*\s*:[*_]*((?:\s|none|and|quotes?|[\d,;&.\[\]()])*)[*_]*", re.IGNORECASE
)
_number = re.compile(r"\d{1,9}")
_inline = re.compile(r"\[(\d{1,9}(?:\s*,\s*\d{1,9})*)\]")
_separator = re.compile(r"\s*(?:[,;\n]|\band\b)\s*")
_ordinal = re.compile(r"\b(\d{1,6})(?:st|nd|rd|th)\b|\bnumber (\d{1,6})\b", re.IGNORECASE)
_ORDINALS = (
    "first second third fourth fifth sixth seventh eighth ninth tenth eleventh twelfth thirteenth "
    "fourteenth fifteenth sixteenth seventeenth eighteenth nineteenth"
)
_TENS = "twenty thirty forty fifty sixty seventy eighty ninety"
TENS = {word: 10 * number for number, word in enumerate(_TENS.split(), start=2)}
ORDINALS = {word: number for number, word in enumerate(_ORDINALS.split(), start=1)} | {
    f"{word.removesuffix('y')}ieth": number for word, number in TENS.items()
}
_ordinal_word = re.compile(rf"\b(?:({'|'.join(TENS)})[ -])?({'|'.join(ORDINALS)})\b")


class Citation(NamedTuple):
    """A quote and its number in the ledger, from 1."""

    number: int
    quote: Quote

    @property
    def where(self) -> str:
        """File and page or line, for people."""
        return ", ".join(str(place) for place in self.quote.places)

    def line(self) -> str:
        """For people: number, place and quote, always on one line, so that no quote can pass for another source."""
        return one_line(f'[{self.number}] {self.where}: "{self.quote.text}"')

    def __str__(self) -> str:
        """As prompts show it: on one line and without marks, whatever the quote holds."""
        quote = self.quote
        parts = [part for part in (quote.item, quote.value, quote.text) if part]
        return f"[{self.number}] {one_line(shielded(' | '.join(parts)))}"


def ledger_of(quotes: Iterable[Quote]) -> tuple[Quote, ...]:
    """The quotes that the text has, in its order; the same item at the same place is there once.

    Quotes that the model did not mark are there only where it marked none in the whole reading.
    """
    known = [quote for quote in quotes if quote.is_found]
    marked = [quote for quote in known if not quote.is_inferred]
    found = {
        (*quote.span, item_key(quote.item), item_key(quote.value)): quote
        for quote in reversed(marked or known)
    }
    return tuple(found[place] for place in sorted(found))


def entries_of(ledger: Sequence[Quote]) -> tuple[Citation, ...]:
    """The quotes with their numbers, each item once: where two of the same name and value overlap, the first.

    The same sentence is often quoted with more or less of it when a section is read again.
    """
    kept: list[Citation] = []
    ends: dict[tuple[str, str], int] = {}
    """Where the last entry of an item ends, by name and value."""
    for number, quote in enumerate(ledger, start=1):
        key = (item_key(quote.item), item_key(quote.value))
        start, end = quote.span
        if quote.item is None or start >= ends.get(key, 0):
            kept.append(Citation(number, quote))
            ends[key] = end
    return tuple(kept)


def one_line(text: str) -> str:
    """A text with every run of white space as one blank."""
    return " ".join(text.split())


# --- what the answer is shown ---------------------------------------------------------------------


def look_up(
    ledger: Sequence[Quote], question: str, tokenizer: Tokenizer, *, max_tokens: int
) -> tuple[Citation, ...]:
    """The quotes that fit the question best, as many as fit, in the order of the ledger.

    Those that the question asks for by their position come before all others.
    """
    entries = entries_of(ledger)
    sizes = {entry.number: tokenizer.count(str(entry)) + JOINT_TOKENS for entry in entries}
    if sum(sizes.values()) <= max_tokens:
        return entries
    chosen: list[Citation] = []
    room = max_tokens
    for entry in _by_fit(entries, question):
        if sizes[entry.number] <= room:
            room -= sizes[entry.number]
            chosen.append(entry)
    return tuple(sorted(chosen, key=lambda entry: entry.number))


def _by_fit(entries: Sequence[Citation], question: str) -> list[Citation]:
    scores = _scores(entries, question)
    return sorted(entries, key=lambda entry: (-scores[entry.number], entry.number))


def _scores(entries: Sequence[Citation], question: str) -> dict[int, float]:
    """How well each entry fits: shared words, rare ones first; the number that is asked for above all."""
    having = {entry.number: set(words(folded(str(entry)))) for entry in entries}
    frequency = Counter(word for found in having.values() for word in found)
    asked = set(words(folded(question)))
    weights = {
        word: math.log(1 + len(entries) / frequency[word]) for word in asked if frequency[word]
    }
    top = sum(weights.values()) + 1
    numbers = {one.number for one in _asked(entries, question)}
    return {
        number: sum(weights.get(word, 0.0) for word in found) + top * (number in numbers)
        for number, found in having.items()
    }


def asked_numbers(question: str) -> set[int]:
    """Which items a question asks for by their position.

    >>> sorted(
    ...     asked_numbers("Name the third and the 12th poem, number 4 and the twenty-second one.")
    ... )
    [3, 4, 12, 22]
    """
    found = _ordinal_word.findall(question.casefold())
    spelled = {TENS.get(tens, 0) + ORDINALS[unit] for tens, unit in found}
    return spelled | {int(first or second) for first, second in _ordinal.findall(question)}


class AskedEntry(NamedTuple):
    """An entry that a question asks for by its position."""

    name: str
    """Name of the item; empty where entries have none."""
    position: int
    """Among the entries of that name, from 1."""
    number: int
    """In the ledger, from 1."""


def asked_entries(ledger: Sequence[Quote], question: str) -> tuple[AskedEntry, ...]:
    """The entries that a question asks for by their position among those of the names that fit it best.

    >>> poems = [
    ...     Quote(text="a", start=n, end=n + 1, item=f"poem about the {topic}")
    ...     for n, topic in enumerate(("sea", "owl", "owl", "sea"))
    ... ]
    >>> asked_entries(poems, "Give the second poem about the sea.")
    (AskedEntry(name='poem about the sea', position=2, number=4),)
    """
    return _asked(entries_of(ledger), question)


def _asked(entries: Sequence[Citation], question: str) -> tuple[AskedEntry, ...]:
    positions = asked_numbers(question)
    if not positions:
        return ()
    groups: dict[str, list[Citation]] = {}
    for entry in entries:
        groups.setdefault(item_key(entry.quote.item), []).append(entry)
    shares = {key: name_fit(key, question) for key in groups}
    best = max(shares.values(), default=0.0)
    chosen = [key for key, share in shares.items() if share == best and share >= MIN_FIT]
    return tuple(
        AskedEntry(group[0].quote.item or "", position, group[position - 1].number)
        for group in [groups[key] for key in chosen] or [list(entries)]
        for position in sorted(positions)
        if position <= len(group)
    )


def name_fit(name: str, question: str) -> float:
    """The share of a name's words that stand in a question."""
    named = set(words(folded(name)))
    return len(named & set(words(folded(question)))) / len(named) if named else 0.0


# --- what the answer cites ------------------------------------------------------------------------


def cited_numbers(reply: str, shown: Iterable[int]) -> tuple[int, ...] | None:
    """The numbers that a reply names in its line of sources, else in brackets; None where it names none.

    Only numbers that were shown count.

    >>> cited_numbers("Red.\\nSources: 2, 9", shown=[1, 2])
    (2,)
    """
    known = set(shown)
    line = _source_line(reply)
    named = [line.named] if line is not None else _inline.findall(reply)
    numbers = {int(number) for text in named for number in _number.findall(text)}
    cited = tuple(sorted(numbers & known))
    return cited if line is not None or cited else None


def without_sources(reply: str) -> str:
    """A reply without its line of sources; the whole reply where nothing else is in it."""
    found = _source_line(reply)
    if found is None:
        return reply
    lines = reply.rstrip().split("\n")
    return "\n".join([*lines[: found.number], *lines[found.number + 1 :]]).strip() or reply


class _SourceLine(NamedTuple):
    """The line of a reply that names sources."""

    number: int
    """Position among the lines, from 0."""
    named: str


def _source_line(reply: str) -> _SourceLine | None:
    """The line that names sources: the last one, or the one before it, where a model writes its answer last."""
    lines = reply.rstrip().split("\n")
    filled = [number for number, line in enumerate(lines) if line.strip()]
    for number in reversed(filled[-2:]):
        line = lines[number].strip()
        found = _sources.fullmatch(line) if len(line) <= MAX_LINE_CHARS else None
        if found:
            return _SourceLine(number, found.group(1))
    return None


def inferred_numbers(answer: str, ledger: Sequence[Quote]) -> tuple[int, ...]:
    """The quotes that hold the words of an answer, for one that names no sources."""
    said = last_boxed(answer) or answer
    keys = {key for part in (said, *_separator.split(said)) if (key := _padded(part))}
    quoted = [_padded(quote.text) for quote in ledger]
    whole = [number for number, text in enumerate(quoted, start=1) if _padded(said) in text]
    parts = [
        number for number, text in enumerate(quoted, start=1) if any(key in text for key in keys)
    ]
    return tuple((whole if _padded(said) and whole else parts)[:MAX_INFERRED])


def held_numbers(memory: str, ledger: Sequence[Quote]) -> tuple[int, ...]:
    """The quotes that a memory holds, in the same or in other words."""
    held, lines = _padded(memory), memory.splitlines()
    return tuple(
        number
        for number, quote in enumerate(ledger, start=1)
        if _padded(quote.text) in held or any(rewords(line, quote.text) for line in lines)
    )


def _padded(text: str) -> str:
    joined = " ".join(words(folded(text)))
    return f" {joined} " if joined else ""
