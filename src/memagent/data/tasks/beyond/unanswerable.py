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

from memagent.data.tasks.beyond.facts import draw_fact, near_misses, noise
from memagent.data.tasks.beyond.weave import BeyondSettings, TextPlan, in_order, prose

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


def plan(rng: random.Random, settings: UnanswerableSettings) -> TextPlan:
    """Near misses of a fact, and the fact itself where it shall be there."""
    asked = draw_fact(rng)
    facts = near_misses(rng, asked, settings.num_near_misses)
    is_answerable = rng.random() < settings.answerable_share
    if is_answerable:
        facts.append(asked.planned(rng))
    return TextPlan(
        question=asked.question,
        answers=(asked.value,) if is_answerable else NOT_TOLD,
        grader="lenient" if is_answerable else "unanswerable",
        facts=in_order(facts),
        units=prose(noise(asked.subject), settings.distractor_share),
        metadata={"relation": asked.name, "is_answerable": is_answerable},
    )
