"""How often something happened in the whole text.

... On 4 March, Ada Holm visited the archive. ...
... Ada Holm had meant to visit the archive on 9 June but stayed at home. ...     not counted
... The archive was visited by Ada Falk on 2 May. ...                             someone else
... Ada Holm paid a visit to the archive on 30 May. ...

asked: How many times did Ada Holm visit the archive?       2
"""

from __future__ import annotations

import random

from pydantic import Field

from memagent.data.tasks.beyond.weave import BeyondSettings, TextPlan, in_order, prose, stated
from memagent.data.tasks.beyond.words import day, days, namesakes, other_person, person

VISITED = (
    "the archive",
    "the customs house",
    "the observatory",
    "the courthouse",
    "the museum",
    "the public library",
    "the hospital",
    "the theatre",
    "the shipyard",
    "the botanical garden",
)
VISITS = (
    "On {day}, {person} visited {place}.",
    "{person} paid a visit to {place} on {day}.",
    "{person} visited {place} on {day}.",
    "Among those who visited {place} on {day} was {person}.",
)
NO_VISITS = (
    "{person} had meant to visit {place} on {day} but stayed at home.",
    "On {day}, {person} turned back before reaching {place}.",
    "{person} was expected at {place} on {day} but never came.",
)


class CountingSettings(BeyondSettings):
    """How much there is to count."""

    max_events: int = Field(default=12, ge=1, le=160)
    """Events that count, at most; at least one does."""
    num_near_misses: int = Field(default=6, ge=0, le=160)
    """Visits that do not count: elsewhere, by namesakes, or that came to nothing."""


def plan(rng: random.Random, settings: CountingSettings) -> TextPlan:
    """Visits of one person to one place, and others like them."""
    place, *elsewhere = rng.sample(VISITED, len(VISITED))
    asked = person(rng)
    num_events = rng.randint(1, settings.max_events)
    # each has its own day: nothing is stated twice, and nothing contradicts what counts
    dates = days(rng, num_events + settings.num_near_misses)
    facts = []
    for date in dates[:num_events]:
        values = {"day": date, "person": asked, "place": place}
        note = f"{asked} visited {place} on {date}."
        facts.append(stated(rng, VISITS, note=note, role="evidence", **values))
    for turn, date in enumerate(dates[num_events:]):
        if turn % 3 == 0:
            facts.append(stated(rng, NO_VISITS, day=date, person=asked, place=place))
        elif turn % 3 == 1:
            namesake = namesakes(asked, rng, 1)[0]
            facts.append(stated(rng, VISITS, day=date, person=namesake, place=place))
        else:
            other = rng.choice(elsewhere)
            facts.append(stated(rng, VISITS, day=date, person=asked, place=other))

    def noise(draw: random.Random) -> str:
        said = draw.choice((*VISITS, *NO_VISITS))
        name = other_person(draw, frozenset({asked}))
        return said.format(day=day(draw), person=name, place=draw.choice(VISITED))

    return TextPlan(
        question=f"How many times did {asked} visit {place}? Answer with a number.",
        answers=(str(num_events),),
        facts=in_order(facts),
        units=prose(noise, settings.distractor_share),
        metadata={"counted": f"Visits of {asked} to {place} so far"},
    )
