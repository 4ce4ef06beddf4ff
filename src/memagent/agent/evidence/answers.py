"""The ledger at the end: what of it the answer is shown, counts over it by code, and which of it the answer rests on."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import NamedTuple

from memagent.agent.evidence.ledger import (
    AskedEntry,
    Citation,
    asked_entries,
    cited_numbers,
    entries_of,
    held_numbers,
    inferred_numbers,
    look_up,
    name_fit,
    one_line,
)
from memagent.agent.evidence.quotes import Quote, item_key
from memagent.agent.evidence.replies import shielded
from memagent.tokens.tokenizers import Tokenizer

MAX_NAMES = 64
"""Names that are listed; of more, those that fit the question best, then those with the largest sums."""

_number = re.compile(r"(?<![\w.])[-+\u2212]?\d{1,18}(?:,\d{3}){0,5}(?:\.\d{1,9})?")
_unit = re.compile(r"\s*([^\W\d_]+|[%\u00b0]|[$\u20ac\u00a3\u00a5])")
_currency = re.compile(r"([$\u20ac\u00a3\u00a5])\s*$")


@dataclass(frozen=True, slots=True, kw_only=True)
class NameTally:
    """What the ledger holds under one name."""

    name: str
    """As it stands in the first entry."""
    num_entries: int
    total: Decimal | None
    """Sum of the values; None where one is not a number, or their units differ."""
    last_value: str | None
    last_number: int
    """Number of the last entry in the ledger, from 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """What the ledger holds in all."""

    num_entries: int
    names: tuple[NameTally, ...]
    """Largest sum first, then most entries, then first in the text."""
    total: Decimal | None
    """Sum of all values; None where one is not a number, or their units differ."""
    largest: tuple[Decimal, int] | None
    """The largest value and the number of its entry."""
    smallest: tuple[Decimal, int] | None

    def text(
        self, question: str = "", *, asked: Sequence[AskedEntry] = (), max_names: int = MAX_NAMES
    ) -> str:
        """As the answer's prompt shows it; `asked` are entries that the question asks for by their position."""
        lines = [
            "Counted by code over everything that was read:",
            f"entries: {self.num_entries}",
            f"different names: {len(self.names)}",
        ]
        if self.total is not None:
            lines.append(f"sum of the values: {plain_number(self.total)}")
        for label, found in (("largest", self.largest), ("smallest", self.smallest)):
            if found is not None:
                lines.append(f"{label} value: {plain_number(found[0])} [{found[1]}]")
        lines += [
            f"number {one.position} of {one_line(one.name) or 'all'}: [{one.number}]"
            for one in asked
        ]
        names = sorted(self.names, key=lambda one: -name_fit(item_key(one.name), question))
        lines += [_name_line(each) for each in names[:max_names]]
        if len(names) > max_names:
            lines.append(f"and {len(names) - max_names} more names")
        return shielded("\n".join(lines))


def tally_of(ledger: Sequence[Quote]) -> Tally:
    """Count a ledger; each place counts once."""
    entries = entries_of(ledger)
    groups: dict[str, list[Citation]] = {}
    for entry in entries:
        groups.setdefault(item_key(entry.quote.item), []).append(entry)
    values = _values(entries)
    names = [_name_tally(group) for key, group in groups.items() if key]
    return Tally(
        num_entries=len(entries),
        names=tuple(sorted(names, key=lambda one: (-(one.total or 0), -one.num_entries))),
        total=_total(entries),
        largest=max(values, key=lambda pair: (pair[0], -pair[1])) if values else None,
        smallest=min(values) if values else None,
    )


class _Value(NamedTuple):
    """A number, and what it is a number of."""

    number: Decimal
    unit: str
    """Its unit or currency, in one form for singular and plural; empty without one."""


def _value_in(value: str | None) -> _Value | None:
    """The number in a value; None where there is none, or more than one, as in dates and times."""
    text = value or ""
    found = _number.search(text)
    if found is None:
        return None
    before, after = text[: found.start()], text[found.end() :]
    if any(map(str.isdigit, before + after)):
        return None
    number = Decimal(found[0].replace(",", "").replace("\u2212", "-"))
    unit = _currency.search(before) or _unit.match(after)
    return _Value(number, _singular(unit[1].casefold()) if unit else "")


def _singular(word: str) -> str:
    """One form for a unit and its plural: crate and crates, box and boxes, entry and entries."""
    stem = word.removesuffix("s").removesuffix("e")
    return f"{stem[:-1]}y" if stem.endswith("i") else stem


def _values(entries: Sequence[Citation]) -> list[tuple[Decimal, int]]:
    """The values that are numbers, with the numbers of their entries; none where their units differ."""
    found = [(value, one.number) for one in entries if (value := _value_in(one.quote.value))]
    units = {value.unit for value, _ in found if value.unit}
    return [] if len(units) > 1 else [(value.number, number) for value, number in found]


def plain_number(value: Decimal) -> str:
    """A number as people write it: 34, not 34.00."""
    text = f"{value:f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def _total(entries: Sequence[Citation]) -> Decimal | None:
    values = _values(entries)
    is_complete = values and len(values) == len(entries)
    return sum((value for value, _ in values), Decimal(0)) if is_complete else None


def _name_tally(group: Sequence[Citation]) -> NameTally:
    number, last = group[-1]
    return NameTally(
        name=one_line(group[0].quote.item or ""),
        num_entries=len(group),
        total=_total(group),
        last_value=last.value and one_line(last.value),
        last_number=number,
    )


def _name_line(one: NameTally) -> str:
    parts = ["1 entry" if one.num_entries == 1 else f"{one.num_entries} entries"]
    if one.total is not None:
        parts.append(f"sum {plain_number(one.total)}")
    if one.last_value is not None:
        parts.append(f"last value {one.last_value} [{one.last_number}]")
    return f"{one.name}: {', '.join(parts)}"


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
    """True when the answer named none, and the quotes that contain its words are cited."""


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
