"""Questions that the text does not answer, though it comes near.

    asked       Which code opens the locker of Ada Holm?
    near miss   The locker of Ada Falk opens with the code 518822.     (a namesake)
    near miss   The wedding of Ada Holm is on 4 March.                 (the person, something else)
    accepted    The text does not tell.

A model that is trained on these alone learns to say that it does not know: `answerable_share` puts
the missing fact into some of the examples.
"""

from __future__ import annotations

import random

from pydantic import Field

from memagent.data.tasks.beyond.facts import PERSONAL, RELATIONS, Relation, noise
from memagent.data.tasks.beyond.settings import BeyondSettings
from memagent.data.tasks.beyond.weave import Fact, Plan, in_order, prose

NOT_TOLD = (
    "The text does not tell.",
    "The text does not say.",
    "unknown",
    "not mentioned",
    "not stated in the text",
)


class UnanswerableSettings(BeyondSettings):
    """How near the text comes, and how often it does answer."""

    num_near_misses: int = Field(default=4, ge=1, le=20)
    """Facts that almost answer the question."""
    answerable_share: float = Field(default=0.0, ge=0, le=1)
    """Share of the examples whose text does answer the question; for training."""


def plan(rng: random.Random, settings: UnanswerableSettings) -> Plan:
    """Near misses of a fact, and the fact itself where it shall be there."""
    name = rng.choice(list(RELATIONS))
    relation = RELATIONS[name]
    subject = relation.subject(rng)
    value = relation.value(rng)
    facts = near_misses(rng, name, subject, value, settings.num_near_misses)
    is_answerable = rng.random() < settings.answerable_share
    if is_answerable:
        facts.append(Fact(text=relation.state(rng, subject, value), place=rng.random()))
    return Plan(
        question=relation.question.format(subject=subject),
        answers=(value,) if is_answerable else NOT_TOLD,
        grader="lenient" if is_answerable else "unanswerable",
        facts=in_order(facts),
        units=prose(noise(subject), settings.distractor_share),
        metadata={"relation": name, "is_answerable": is_answerable},
    )


def near_misses(rng: random.Random, name: str, subject: str, value: str, num: int) -> list[Fact]:
    """The same about subjects that are easily confused, and other things about the same subject."""
    relation = RELATIONS[name]
    others = [RELATIONS[other] for other in PERSONAL if other != name] if name in PERSONAL else []
    rng.shuffle(others)
    facts = []
    for turn in range(num):
        if turn % 2 and others:
            said = _about(rng, others.pop(), subject)
        else:
            near = relation.near(rng, subject)
            said = relation.state(rng, near, relation.other_value(rng, value))
        facts.append(Fact(text=said, place=rng.random(), role="near_miss"))
    return facts


def _about(rng: random.Random, relation: Relation, subject: str) -> str:
    return relation.state(rng, subject, relation.value(rng))
