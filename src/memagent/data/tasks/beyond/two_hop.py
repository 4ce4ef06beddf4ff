"""Two facts in reverse order: the one that is needed second comes first.

    ... The harbour master of Farnley is Otto Lund. ... Ada Holm was born in Farnley. ...
        (second hop: it comes first)                    (first hop: it comes last)

    asked: Who is the harbour master of the town where Ada Holm was born?       Otto Lund

On a single pass, it is not known which harbour master will matter, so all of them have to be kept until
the town is named. There are `num_candidates` of them, so they fit into a memory.
"""

from __future__ import annotations

import random

from pydantic import Field

from memagent.data.tasks.beyond.facts import OFFICES
from memagent.data.tasks.beyond.filler import namesakes, other_person, people, person, towns
from memagent.data.tasks.beyond.weave import (
    BeyondSettings,
    Fact,
    Role,
    TextPlan,
    in_order,
    places,
    prose,
)

LINKS = (
    ("the town where {person} was born", "{person} was born in {town}."),
    ("the town where {person} went to school", "{person} went to school in {town}."),
    ("the town where {person} was married", "{person} was married in {town}."),
    ("the town where {person} keeps a boat", "{person} keeps a boat in {town}."),
)
HOLDS = (
    "The {office} of {town} is {person}.",
    "{person} is the {office} of {town}.",
    "In {town}, the post of {office} is held by {person}.",
)


class TwoHopSettings(BeyondSettings):
    """How many second hops there are to keep."""

    num_candidates: int = Field(default=6, ge=2, le=40)
    """Towns whose office holder is stated; one of them is asked for."""


def plan(rng: random.Random, settings: TwoHopSettings) -> TextPlan:
    """A link from a person to a town, and before it who holds an office there."""
    num = settings.num_candidates
    office = rng.choice(OFFICES)
    described, linked = rng.choice(LINKS)
    home, *others = towns(rng, num)
    asked, *holders = people(rng, num + 1)
    second, first = places(rng, 2)
    facts = [
        _holder(rng, office, home, holders[0], second, role="evidence"),
        Fact(text=linked.format(person=asked, town=home), place=first),
    ]
    namesake = namesakes(asked, rng, len(others))
    for town, holder, one in zip(others, holders[1:], namesake, strict=True):
        facts.append(_holder(rng, office, town, holder, rng.random(), role="candidate"))
        text = linked.format(person=one, town=town)
        facts.append(Fact(text=text, place=rng.random(), role="near_miss"))
    other_offices = [other for other in OFFICES if other != office]
    stated = towns(rng, 40)

    def noise(draw: random.Random) -> str:
        if draw.random() < 0.5:
            values = {"office": draw.choice(other_offices), "town": draw.choice([home, *stated])}
            return draw.choice(HOLDS).format(person=person(draw), **values)
        name = other_person(draw, frozenset({asked}))
        return draw.choice(LINKS)[1].format(person=name, town=draw.choice(stated))

    return TextPlan(
        question=f"Who is the {office} of {described.format(person=asked)}?",
        answers=(holders[0],),
        facts=in_order(facts),
        units=prose(noise, settings.distractor_share),
        metadata={"bridge": home},
    )


def _holder(
    rng: random.Random, office: str, town: str, name: str, place: float, *, role: Role
) -> Fact:
    values = {"office": office, "town": town, "person": name}
    return Fact(
        text=rng.choice(HOLDS).format(**values),
        place=place,
        note=HOLDS[0].format(**values),
        role=role,
    )
