"""How often something happened in the whole text; sums, largest values and leaders over it.

    ... On 4 March, Ada Holm visited the archive. ...
    ... Ada Holm had meant to visit the archive on 9 June but stayed at home. ...     not counted
    ... The archive was visited by Ada Falk on 2 May. ...                             someone else
    ... Ada Holm paid a visit to the archive on 30 May. ...

    counting  How many times did Ada Holm visit the archive?                  2

    ... On 4 March, Ada Holm sold 14 crates of pears. ...
    ... Ada Holm wanted to sell 30 crates of pears on 9 June, but found no buyer. ...   not counted
    ... Otto Lund sold 22 crates of pears on 2 May. ...
    ... 20 crates of pears were sold by Ada Holm on 30 May. ...

    sum       How many crates of pears did Ada Holm sell in all?              34
    largest   What is the largest number of crates ... sold at once?          20
    leader    Who sold the most crates of pears in all?                       Ada Holm

Metadata of sums, largest values and leaders has `measure`, and `entries`: seller and number for each evidence, in order.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Literal

from pydantic import Field

from memagent.data.tasks.beyond.filler import day, days, namesakes, other_person, people, person
from memagent.data.tasks.beyond.weave import BeyondSettings, TextPlan, in_order, prose, stated

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


def plan_counting(rng: random.Random, settings: CountingSettings) -> TextPlan:
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


# --- sums, largest values, leaders ----------------------------------------------------------------

Measure = Literal["sum", "largest", "leader"]
MEASURES: tuple[Measure, ...] = ("sum", "largest", "leader")

GOODS = (
    "crates of pears",
    "barrels of herring",
    "sacks of flour",
    "bales of wool",
    "jars of honey",
    "bottles of cider",
    "coils of wire",
    "boxes of nails",
    "rolls of linen",
    "bundles of reeds",
)
SALES = (
    "On {day}, {person} sold {num} {goods}.",
    "{person} sold {num} {goods} on {day}.",
    "{num} {goods} were sold by {person} on {day}.",
)
NO_SALES = (
    "{person} wanted to sell {num} {goods} on {day}, but found no buyer.",
    "On {day}, {person} bought {num} {goods}.",
    "{person} gave away {num} {goods} on {day}.",
)
QUESTIONS: dict[Measure, str] = {
    "sum": "How many {goods} did {person} sell in all? Answer with a number.",
    "largest": "What is the largest number of {goods} that {person} sold at once?",
    "leader": "Who sold the most {goods} in all?",
}
LABELS: dict[Measure, str] = {
    "sum": "{goods} sold by {person} so far",
    "largest": "largest number of {goods} that {person} sold at once so far",
    "leader": "{goods} sold so far",
}


class AggregationSettings(BeyondSettings):
    """What is asked, and how much there is to add up."""

    measure: Literal["any", "sum", "largest", "leader"] = "any"
    """What is asked; any draws one of the three for each example."""
    max_sales: int = Field(default=10, ge=2, le=150)
    """Sales that count, at most, for a sum or the largest; at least two do."""
    max_sellers: int = Field(default=5, ge=2, le=30)
    """Sellers to compare for a leader, at most; at least two are there, with up to four sales each."""
    num_near_misses: int = Field(default=6, ge=0, le=150)
    """Deals that do not count: other goods, namesakes, or no sale."""


def plan_aggregation(rng: random.Random, settings: AggregationSettings) -> TextPlan:
    """Sales of one kind of goods, and deals like them that do not count."""
    measure = rng.choice(MEASURES) if settings.measure == "any" else settings.measure
    goods, *other_goods = rng.sample(GOODS, len(GOODS))
    sellers = people(rng, settings.max_sellers)
    asked = sellers[0]
    if measure == "leader":
        sales = _race(rng, sellers[: rng.randint(2, settings.max_sellers)])
    else:
        sales = [(asked, rng.randint(2, 60)) for _ in range(rng.randint(2, settings.max_sales))]
    # each deal has its own day: nothing is stated twice
    dates = iter(days(rng, len(sales) + settings.num_near_misses))
    counted = []
    for (name, num), date in zip(sales, dates, strict=False):
        values = {"day": date, "person": name, "num": num, "goods": goods}
        note = f"{name} sold {num} {goods}."
        counted.append((stated(rng, SALES, note=note, role="evidence", **values), [name, num]))
    counted.sort(key=lambda pair: pair[0].place)
    facts = [fact for fact, _ in counted]
    # sales of the same goods by others do not count for one seller, but would for the leader
    rivals = namesakes(asked, rng, 4) if measure != "leader" else []
    for turn, date in enumerate(dates):
        num = rng.randint(2, 60)
        if turn % 3 == 0 and rivals:
            rival = rng.choice(rivals)
            facts.append(stated(rng, SALES, day=date, person=rival, num=num, goods=goods))
        elif turn % 3 == 1:
            other, seller = rng.choice(other_goods), rng.choice(sellers)
            facts.append(stated(rng, SALES, day=date, person=seller, num=num, goods=other))
        else:
            facts.append(stated(rng, NO_SALES, day=date, person=asked, num=num, goods=goods))

    def noise(draw: random.Random) -> str:
        name = other_person(draw, frozenset(sellers))
        values = {"day": day(draw), "person": name, "num": draw.randint(2, 60)}
        return draw.choice((*SALES, *NO_SALES)).format(goods=draw.choice(other_goods), **values)

    values = {"goods": goods, "person": asked}
    label = LABELS[measure].format(**values)
    return TextPlan(
        question=QUESTIONS[measure].format(**values),
        answers=(_answer(measure, sales),),
        facts=in_order(facts),
        units=prose(noise, settings.distractor_share),
        metadata={
            "measure": measure,
            "counted": label[0].upper() + label[1:],
            "entries": [entry for _, entry in counted],
        },
    )


def _race(rng: random.Random, sellers: list[str]) -> list[tuple[str, int]]:
    """Sales of several sellers, one of whom sold more than every other."""
    while True:
        sales = [(one, rng.randint(2, 60)) for one in sellers for _ in range(rng.randint(1, 4))]
        (_, most), (_, second) = _totals(sales).most_common(2)
        if most > second:
            return sales


def _totals(sales: list[tuple[str, int]]) -> Counter[str]:
    totals: Counter[str] = Counter()
    for name, num in sales:
        totals[name] += num
    return totals


def _answer(measure: Measure, sales: list[tuple[str, int]]) -> str:
    if measure == "leader":
        return _totals(sales).most_common(1)[0][0]
    numbers = [num for _, num in sales]
    return str(sum(numbers) if measure == "sum" else max(numbers))
