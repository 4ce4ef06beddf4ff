"""Facts that are changed later: the last valid value counts.

    ... The spring fair of Farnley is set for 4 March. ...
    ... The spring fair of Farnley has been moved from 4 March to 19 May. ...
    ... It was proposed to hold the spring fair of Farnley on 2 June, but this was turned down. ...

    asked: On which day does the spring fair of Farnley take place?       19 May

The number of changes differs from example to example and may be none. Proposals that come to nothing
change nothing. With `num_things` the days of several events are asked for at once:

    asked: On which days do these take place: the spring fair of Farnley; the boat race of Holmby?
"""

from __future__ import annotations

import random
from collections.abc import Callable

from pydantic import Field

from memagent.data.tasks.beyond.filler import day, towns
from memagent.data.tasks.beyond.filler import days as days_of_year
from memagent.data.tasks.beyond.weave import (
    BeyondSettings,
    Fact,
    TextPlan,
    in_order,
    places,
    prose,
    stated,
)

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
SET = ("The {event} of {town} is set for {day}.", "The {event} of {town} will be on {day}.")
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
    num_things: int = Field(default=1, ge=1, le=60)
    """Events whose days are asked for at once."""


def plan(rng: random.Random, settings: CorrectionsSettings) -> TextPlan:
    """An event whose day is stated and then changed, beside others like it."""
    if settings.num_things > 1:
        return _plan_several(rng, settings)
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

    last = days[-1]
    return TextPlan(
        question=f"On which day does the {event} of {town} take place?",
        answers=(last, " ".join(reversed(last.split()))),
        facts=in_order(facts),
        units=prose(_noise(other_towns), settings.distractor_share),
        metadata={"num_corrections": num_changes, "outdated": days[:-1]},
    )


def _plan_several(rng: random.Random, settings: CorrectionsSettings) -> TextPlan:
    """Several events, each with its own changes; no two take place on one day in the end."""
    num_towns = -(-settings.num_things // len(EVENTS))
    drawn = towns(rng, num_towns + 40)
    asked_towns, other_towns = drawn[:num_towns], drawn[num_towns:]
    pairs = [(event, town) for town in asked_towns for event in EVENTS]
    things = rng.sample(pairs, settings.num_things)
    last_days = days_of_year(rng, settings.num_things)
    facts: list[Fact] = []
    num_changes = 0
    for (event, town), last in zip(things, last_days, strict=True):
        num = rng.randint(0, settings.max_corrections)
        earlier = [one for one in days_of_year(rng, num + 1) if one != last][:num]
        facts += _history(rng, event, town, [*earlier, last], is_asked=True)
        num_changes += num
    for _ in range(settings.num_near_misses):
        where = (rng.choice(EVENTS), rng.choice(other_towns))
        facts += _history(rng, *where, days_of_year(rng, rng.randint(1, 3)), is_asked=False)
    names = "; ".join(f"the {event} of {town}" for event, town in things)
    return TextPlan(
        question=f"On which days do these take place: {names}?",
        answers=tuple(last_days),
        match="all",
        grader="recall",
        facts=in_order(facts),
        units=prose(_noise(other_towns), settings.distractor_share),
        metadata={"num_corrections": num_changes},
    )


def _noise(other_towns: list[str]) -> Callable[[random.Random], str]:
    """Days of events that are not asked for."""

    def noise(draw: random.Random) -> str:
        values = {"event": draw.choice(EVENTS), "town": draw.choice(other_towns)}
        return draw.choice(SET).format(day=day(draw), **values)

    return noise


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
