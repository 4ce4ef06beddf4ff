"""The tasks of this folder, opened by name.

    task = open_beyond("beyond/counting", {"tokens": 8192, "seed": 7, "tokenizer": "bytes"})
    task.example(0).question      # "How many times did Oscar Northcote visit the archive? ..."

What is asked and the facts depend on seed and index, not on the length. Metadata has `spans`: the
positions of planned facts other than evidence, as [start, end, note] by role.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, NamedTuple

from memagent.data.example import Evidence, Passage
from memagent.data.tasks.beyond import (
    aggregation,
    coreference,
    corrections,
    counting,
    near_misses,
    two_hop,
)
from memagent.data.tasks.beyond.weave import BeyondSettings, TextPlan, weave
from memagent.data.tasks.generated import Draft, GeneratedTask


class _Kind(NamedTuple):
    settings: type[BeyondSettings]
    plan: Callable[[random.Random, Any], TextPlan]


KINDS: dict[str, _Kind] = {
    "beyond/coreference": _Kind(coreference.CoreferenceSettings, coreference.plan),
    "beyond/counting": _Kind(counting.CountingSettings, counting.plan),
    "beyond/aggregation": _Kind(aggregation.AggregationSettings, aggregation.plan),
    "beyond/two_hop": _Kind(two_hop.TwoHopSettings, two_hop.plan),
    "beyond/corrections": _Kind(corrections.CorrectionsSettings, corrections.plan),
    "beyond/unanswerable": _Kind(near_misses.UnanswerableSettings, near_misses.plan_unanswerable),
    "beyond/injection": _Kind(near_misses.InjectionSettings, near_misses.plan_injection),
}
"""The settings of each task, and the function that plans an example of it."""


class BeyondTask(GeneratedTask[BeyondSettings]):
    """Generates the examples of one of these tasks."""

    def __init__(self, name: str, settings: BeyondSettings) -> None:
        super().__init__(name, settings)
        self._plan = KINDS[name].plan

    def draft(self, index: int) -> Draft:
        plan = self._plan(self.rng(index, "plan"), self.settings)
        woven = weave(
            plan,
            self.rng(index, "filler"),
            tokens=self.tokens,
            tokenizer=self.tokenizer,
            what=f"a text of {self.name}",
        )
        evidence: list[Evidence] = []
        others: dict[str, list[list[object]]] = {}
        for fact, (start, end) in zip(plan.facts, woven.spans, strict=True):
            if fact.role == "evidence":
                evidence.append(
                    Evidence(document=0, start=start, end=end, text=fact.text, note=fact.note)
                )
            else:
                others.setdefault(fact.role, []).append([start, end, fact.note])
        return Draft(
            question=plan.question,
            answers=plan.answers,
            match=plan.match,
            grader=plan.grader,
            documents=(Passage(text=woven.text),),
            num_tokens=woven.num_tokens,
            evidence=tuple(evidence),
            metadata={**plan.metadata, "spans": dict(sorted(others.items()))},
        )


def open_beyond(name: str, settings: dict[str, Any]) -> BeyondTask:
    """The task of a name, with its settings checked."""
    return BeyondTask(name, KINDS[name].settings.parse(settings))
