"""The ledger at the end: what of it the answer is shown, and which of it the answer rests on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from memagent.agent.evidence.ledger import (
    asked_entries,
    cited_numbers,
    entries_of,
    held_numbers,
    inferred_numbers,
    look_up,
)
from memagent.agent.evidence.quotes import Quote
from memagent.agent.evidence.tally import MAX_NAMES, tally_of
from memagent.tokens.tokenizers import Tokenizer

HEADING = "Quotes from the text:"


class ShownLedger(NamedTuple):
    """The part of a ledger that stands in the answer's prompt."""

    text: str
    """Empty where nothing is shown."""
    numbers: tuple[int, ...] = ()
    """Numbers of the quotes in it."""


class Cited(NamedTuple):
    """The quotes that an answer rests on, by their numbers."""

    numbers: tuple[int, ...]
    is_inferred: bool
    """True when the answer named none, and those are cited that hold its words."""


def show_ledger(
    ledger: Sequence[Quote],
    question: str,
    tokenizer: Tokenizer,
    *,
    max_tokens: int,
    with_counts: bool = False,
) -> ShownLedger:
    """The quotes that fit the question best, within the limit; before them, counts over all of them."""
    if not ledger:
        return ShownLedger("")
    counts = _counts(ledger, question, tokenizer, max_tokens) if with_counts else ""
    room = max_tokens - tokenizer.count(f"{counts}\n\n{HEADING}\n")
    while room > 0:
        shown = look_up(ledger, question, tokenizer, max_tokens=room)
        lines = [HEADING, *map(str, shown)] if shown else []
        left_out = len(entries_of(ledger)) - len(shown)
        more = [f"({left_out} more are not shown)"] if shown and left_out else []
        text = "\n\n".join(part for part in (counts, "\n".join([*lines, *more])) if part)
        excess = tokenizer.count(text) - max_tokens
        if excess <= 0:
            return ShownLedger(text, tuple(entry.number for entry in shown))
        room -= excess
    return ShownLedger(counts)


def _counts(ledger: Sequence[Quote], question: str, tokenizer: Tokenizer, max_tokens: int) -> str:
    """What code counts, with as many names as fit; empty where not even the totals do."""
    tally, asked = tally_of(ledger), asked_entries(ledger, question)
    max_names = min(MAX_NAMES, len(tally.names))
    while True:
        text = tally.text(question, asked=asked, max_names=max_names)
        if tokenizer.count(text) <= max_tokens:
            return text
        if not max_names:
            return ""
        max_names //= 2


def with_ledger(memory: str, shown: str) -> str:
    """What stands in the memory's place when the model answers; `shown` is the text of the shown ledger."""
    return "\n\n".join(part for part in (memory, shown) if part)


def cite(reply: str, ledger: Sequence[Quote], shown: ShownLedger, *, memory: str = "") -> Cited:
    """The quotes that a reply rests on: those it names, else those that hold its words.

    Where quotes are copied into the memory that the reply was written from, `memory`, those in it are cited too.
    """
    named = cited_numbers(reply, shown.numbers)
    if named is not None:
        return Cited(named, is_inferred=False)
    found = {*inferred_numbers(reply, ledger), *held_numbers(memory, ledger)}
    return Cited(tuple(sorted(found)), is_inferred=bool(found))
