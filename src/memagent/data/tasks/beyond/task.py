"""The tasks of this folder, opened by name.

    task = open_beyond("beyond/counting", {"tokens": 8192, "seed": 7, "tokenizer": "bytes"})
    task.example(0).question      # "How many times did Ada Holm visit the archive?"

What is asked and the facts depend on seed and index, not on the length. Metadata has `spans`: where
everything stands that is planned but no evidence, as [start, end, note] by role.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, NamedTuple

from memagent.data.example import Evidence, Example, Origin, Passage, fingerprint
from memagent.data.tasks.beyond import (
    aggregation,
    coreference,
    corrections,
    counting,
    injection,
    two_hop,
    unanswerable,
)
from memagent.data.tasks.beyond.settings import BeyondSettings
from memagent.data.tasks.beyond.weave import Plan, weave
from memagent.data.tasks.lengths import length_tokenizer
from memagent.data.tasks.registry import rng


class Kind(NamedTuple):
    """A task: what it takes, and how an example of it is planned."""

    settings: type[BeyondSettings]
    plan: Callable[[random.Random, Any], Plan]


KINDS: dict[str, Kind] = {
    "beyond/coreference": Kind(coreference.CoreferenceSettings, coreference.plan),
    "beyond/counting": Kind(counting.CountingSettings, counting.plan),
    "beyond/aggregation": Kind(aggregation.AggregationSettings, aggregation.plan),
    "beyond/two_hop": Kind(two_hop.TwoHopSettings, two_hop.plan),
    "beyond/corrections": Kind(corrections.CorrectionsSettings, corrections.plan),
    "beyond/unanswerable": Kind(unanswerable.UnanswerableSettings, unanswerable.plan),
    "beyond/injection": Kind(injection.InjectionSettings, injection.plan),
}


class BeyondTask:
    """Makes the examples of one of these tasks."""

    num_available: int | None = None

    def __init__(self, name: str, settings: BeyondSettings, plan: Callable[..., Plan]) -> None:
        self.name = name
        self.settings = settings
        self._plan = plan

    def example(self, index: int) -> Example:
        """The example of an index, with its text."""
        settings = self.settings
        plan = self._plan(rng(settings.seed, self.name, index, "plan"), settings)
        woven = weave(
            plan,
            rng(settings.seed, self.name, index, "filler"),
            tokens=settings.length,
            tokenizer=length_tokenizer(settings.tokenizer),
            what=f"a text of {self.name}",
        )
        evidence: list[Evidence] = []
        others: dict[str, list[tuple[int, int, str]]] = {}
        for fact, (start, end) in zip(plan.facts, woven.spans, strict=True):
            if fact.role == "evidence":
                evidence.append(
                    Evidence(document=0, start=start, end=end, text=fact.text, note=fact.note)
                )
            else:
                others.setdefault(fact.role, []).append((start, end, fact.note))
        spans = {role: [list(span) for span in found] for role, found in sorted(others.items())}
        return Example(
            id=f"{self.name}/{settings.length}/{settings.seed}/{index}",
            task=self.name,
            question=plan.question,
            answers=plan.answers,
            match=plan.match,
            grader=plan.grader,
            documents=(Passage(text=woven.text),),
            evidence=tuple(evidence),
            origin=Origin(task=self.name, settings=settings.model_dump(), index=index),
            target_tokens=settings.length,
            num_tokens=woven.num_tokens,
            seed=settings.seed,
            text_sha256=fingerprint(woven.text),
            metadata={**plan.metadata, "spans": spans},
        )


def open_beyond(name: str, settings: dict[str, Any]) -> BeyondTask:
    """The task of a name, with its settings checked."""
    kind = KINDS[name]
    return BeyondTask(name, kind.settings.parse(settings), kind.plan)
