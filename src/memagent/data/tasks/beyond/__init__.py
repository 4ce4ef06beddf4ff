"""Tasks beyond RULER: what published memory agents fail at; they need no source.

    coreference    return the i-th of several similar items, word for word
    counting       how often something happened in the whole text
    aggregation    sums, largest values and leaders over the whole text
    two_hop        the fact that is needed second comes first
    corrections    facts that are changed later; the last valid value counts
    unanswerable   the text has no answer, only near misses
    injection      the text gives orders to its reader

A task has settings and a `plan`, which says what is asked and which sentences matter: `counting.py` has two tasks,
`facts.py` the last two and two_hop, the others a file each. `weave.py` puts the sentences into prose of the grammar in `filler.py`,
at the requested length.

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
from memagent.data.tasks.beyond import coreference, corrections, counting, facts
from memagent.data.tasks.beyond.weave import BeyondSettings, TextPlan, weave
from memagent.data.tasks.registry import Draft, GeneratedTask


class _Kind(NamedTuple):
    settings: type[BeyondSettings]
    plan: Callable[[random.Random, Any], TextPlan]


KINDS: dict[str, _Kind] = {
    "beyond/coreference": _Kind(coreference.CoreferenceSettings, coreference.plan),
    "beyond/counting": _Kind(counting.CountingSettings, counting.plan_counting),
    "beyond/aggregation": _Kind(counting.AggregationSettings, counting.plan_aggregation),
    "beyond/two_hop": _Kind(facts.TwoHopSettings, facts.plan_two_hop),
    "beyond/corrections": _Kind(corrections.CorrectionsSettings, corrections.plan),
    "beyond/unanswerable": _Kind(facts.UnanswerableSettings, facts.plan_unanswerable),
    "beyond/injection": _Kind(facts.InjectionSettings, facts.plan_injection),
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
