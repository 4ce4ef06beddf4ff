"""Facts among filler: a text of the requested length, and the exact position of each fact in it.

    plan      facts with a place between 0 (start) and 1 (end)
    filler    u0 u1 u2 u3 u4 ...            as many as the length takes
    text      u0 FACT u1 u2 FACT u3 u4      a fact at 0.25, another at 0.6

Facts are placed between sentences. A fact's place is drawn evenly between 0 and 1 and
does not depend on the length, so the same question can be asked at every length.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Literal, NamedTuple

from pydantic import Field

from memagent.config import LONGEST
from memagent.data.tasks.beyond.filler import (
    MAX_PARAGRAPH,
    MIN_PARAGRAPH,
    SHORT_SENTENCES,
    sentences,
)
from memagent.data.tasks.lengths import LEAST_SHARE, fit
from memagent.data.tasks.registry import TaskSettings
from memagent.errors import ConfigError
from memagent.rewards.verifiers import Match
from memagent.tokens.tokenizers import Tokenizer


class BeyondSettings(TaskSettings):
    """Length, tokenizer, seed, and how much of the filler resembles what is asked for."""

    tokens: int | None = Field(default=8192, ge=64, le=LONGEST)
    """Length of the text in tokens of the tokenizer; reached within 2 %, never exceeded."""
    distractor_share: float = Field(default=0.05, ge=0, le=0.5)
    """Share of the filler's sentences that are facts of the asked form about something else."""


Role = Literal["evidence", "near_miss", "candidate", "similar", "injection"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """A sentence or more at a given place in the text.

    Example: Fact(text="Ada Holm was born in Farnley.", place=0.31)
    """

    text: str
    place: float
    """From 0, the start of the text, to 1, its end."""
    note: str = ""
    """What a reader should remember of it, where that is not the text itself."""
    role: Role = "evidence"
    """What it is to the question; all but evidence is noted in the example's metadata."""
    lead: str = ""
    """Stands before the text and belongs to it in reading, but not in the span."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TextPlan:
    """What an example asks, and what of its text matters."""

    question: str
    answers: tuple[str, ...]
    facts: tuple[Fact, ...]
    grader: str = "lenient"
    match: Match = "any"
    metadata: dict[str, Any] = field(default_factory=dict)
    units: Callable[[random.Random], Iterator[str]]
    """The filler: any number of pieces of text, each with the white space after it."""
    fact_end: str = " "
    """White space after a fact."""
    short_units: tuple[str, ...] = tuple(f"{sentence} " for sentence in SHORT_SENTENCES)
    """For the last few tokens of a length."""

    def __post_init__(self) -> None:
        places = [fact.place for fact in self.facts]
        assert places == sorted(places), "facts are planned in reading order"


class Woven(NamedTuple):
    """A text, and the spans of its facts in the order of the plan."""

    text: str
    spans: list[tuple[int, int]]
    num_tokens: int


def prose(
    noise: Callable[[random.Random], str], share: float
) -> Callable[[random.Random], Iterator[str]]:
    """Filler sentences in paragraphs; a share of them is `noise`, facts that are not asked for."""

    def units(rng: random.Random) -> Iterator[str]:
        left = rng.randint(MIN_PARAGRAPH, MAX_PARAGRAPH)
        for sentence in sentences(rng):
            left -= 1
            said = noise(rng) if rng.random() < share else sentence
            yield said + (" " if left else "\n\n")
            left = left or rng.randint(MIN_PARAGRAPH, MAX_PARAGRAPH)

    return units


def weave(
    plan: TextPlan, rng: random.Random, *, tokens: int, tokenizer: Tokenizer, what: str
) -> Woven:
    """The plan's facts in filler: at most `tokens`, and at least 98 % of them."""
    source, units = plan.units(rng), list[str]()

    def text_of(num_units: int) -> str:
        units.extend(islice(source, max(0, num_units - len(units))))
        return _joined(plan, units[:num_units])[0]

    fitted = fit(text_of, tokens, tokenizer, is_coarse=True, what=what)
    del units[fitted.num_units :]
    num_tokens = fitted.num_tokens
    for short in plan.short_units * 4:
        if num_tokens >= tokens * LEAST_SHARE:
            break
        units.append(short)
        longer = tokenizer.count(_joined(plan, units)[0])
        if longer > tokens:
            units.pop()
        else:
            num_tokens = longer
    if num_tokens < tokens * LEAST_SHARE:
        raise ConfigError(
            f"tokens={tokens} is too short to be met within 2 %: {what} has {num_tokens}; raise `tokens`"
        )
    text, spans = _joined(plan, units)
    return Woven(text, spans, num_tokens)


def _joined(plan: TextPlan, units: list[str]) -> tuple[str, list[tuple[int, int]]]:
    """Units and facts as one text without white space at its end, and the spans of the facts."""
    parts: list[str] = []
    spans: list[tuple[int, int]] = []
    position = used = 0
    for fact in plan.facts:
        gap = int(fact.place * (len(units) + 1))
        between = "".join(units[used:gap]) + fact.lead
        start = position + len(between)
        spans.append((start, start + len(fact.text)))
        parts += (between, fact.text, plan.fact_end)
        position = start + len(fact.text) + len(plan.fact_end)
        used = gap
    parts.append("".join(units[used:]))
    return "".join(parts).rstrip(), spans


def stated(
    rng: random.Random,
    ways: Sequence[str],
    *,
    note: str = "",
    role: Role = "near_miss",
    **values: object,
) -> Fact:
    """A fact in one of several wordings, anywhere in the text."""
    text = rng.choice(ways).format(**values)
    return Fact(text=text, place=rng.random(), note=note, role=role)


def places(rng: random.Random, num: int) -> list[float]:
    """Places for facts in a fixed order; together they are spread evenly."""
    return sorted(rng.random() for _ in range(num))


def in_order(facts: list[Fact]) -> tuple[Fact, ...]:
    """Facts in reading order."""
    return tuple(sorted(facts, key=lambda fact: fact.place))
