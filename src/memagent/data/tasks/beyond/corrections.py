"""Facts that are changed later: the last valid value counts.

    ... The spring fair of Farnley is set for 4 March. ...
    ... The spring fair of Farnley has been moved from 4 March to 19 May. ...
    ... It was proposed to hold the spring fair of Farnley on 2 June, but this was turned down. ...

    asked: On which day does the spring fair of Farnley take place?       19 May

The number of changes differs from example to example and may be none. Proposals that come to nothing
change nothing.
"""

from __future__ import annotations

import random

from pydantic import Field

from memagent.data.tasks.beyond.weave import (
    BeyondSettings,
    Fact,
    TextPlan,
    in_order,
    places,
    prose,
    stated,
)
from memagent.data.tasks.beyond.words import day, towns
from memagent.data.tasks.beyond.words import days as days_of_year

EVENTS = (
    "spring fair",
    "council meeting",
    "boat race",
    "choir concert",
    "horse auction",
    "flower show",
    "chess match",
    "harvest feast",
    "book sale",
    "torchlight walk",
)
SET = (
    "The {event} of {town} is set for {day}.",
    "The {event} of {town} will be on {day}.",
)
MOVED = (
    "The {event} of {town} has been moved from {old} to {day}.",
    "Correction: the {event} of {town} is not on {old} but on {day}.",
    "Contrary to what was said before, the {event} of {town} takes place on {day}.",
    "The {event} of {town} has been put off and is now on {day}.",
)
PROPOSED = (
    "It was proposed to hold the {event} of {town} on {day}, but this was turned down.",
    "Some say that the {event} of {town} is on {day}, which is not true.",
)


class CorrectionsSettings(BeyondSettings):
    """How often things change."""

    max_corrections: int = Field(default=4, ge=0, le=20)
    """Changes of the day that is asked for, at most."""
    num_near_misses: int = Field(default=3, ge=0, le=20)
    """Other events, or the same event in other towns, with their own changes."""


def plan(rng: random.Random, settings: CorrectionsSettings) -> TextPlan:
    """An event whose day is stated and then changed, beside others like it."""
    event, *other_events = rng.sample(EVENTS, len(EVENTS))
    town, *other_towns = towns(rng, settings.num_near_misses + 40)
    num_changes = rng.randint(0, settings.max_corrections)
    days = days_of_year(rng, num_changes + 3)
    proposed, days = days[:2], days[2:]
    facts = _history(rng, event, town, days, is_asked=True)
    for one in proposed[: rng.randint(0, 2)]:
        facts.append(stated(rng, PROPOSED, event=event, town=town, day=one))
    for turn in range(settings.num_near_misses):
        where = (event, other_towns[turn]) if turn % 2 else (rng.choice(other_events), town)
        facts += _history(rng, *where, days_of_year(rng, rng.randint(1, 3)), is_asked=False)

    def noise(draw: random.Random) -> str:
        values = {"event": draw.choice(EVENTS), "town": draw.choice(other_towns)}
        return draw.choice(SET).format(day=day(draw), **values)

    last = days[-1]
    return TextPlan(
        question=f"On which day does the {event} of {town} take place?",
        answers=(last, " ".join(reversed(last.split()))),
        facts=in_order(facts),
        units=prose(noise, settings.distractor_share),
        metadata={"num_corrections": num_changes, "outdated": days[:-1]},
    )


def _history(
    rng: random.Random, event: str, town: str, days: list[str], *, is_asked: bool
) -> list[Fact]:
    """The days of an event, one after the other; the first is stated, the others are changes."""
    facts: list[Fact] = []
    old = ""
    for place, new in zip(places(rng, len(days)), days, strict=True):
        values = {"event": event, "town": town, "old": old, "day": new}
        facts.append(
            Fact(
                text=rng.choice(MOVED if old else SET).format(**values),
                place=place,
                note=SET[0].format(**values),
                role="evidence" if is_asked else "near_miss",
            )
        )
        old = new
    return facts
