"""Variable tracking: chains of assignments hidden in noise.

    Set QWXZA = 48213.  ...  Set LMNOP = QWXZA.  ...  Set BRTYU = LMNOP.

    question   Which variables end up with the value 48213?
    answers    QWXZA, LMNOP, BRTYU       all of them, directly set or copied

A chain of four hops has five variables; they appear in the text in that order. Further chains have other
values and are distractors.

    open_task("ruler/vt", {"tokens": 8192, "num_chains": 2})
"""

from __future__ import annotations

import random
import string
from typing import Any

from pydantic import Field

from memagent.config import MOST
from memagent.data.example import Evidence, Passage
from memagent.data.tasks.lengths import fit
from memagent.data.tasks.registry import Draft, GeneratedTask, TaskSettings
from memagent.data.tasks.ruler.haystack import Hidden, NoiseHaystack, hide
from memagent.data.tasks.ruler.words import listed

NAME_LETTERS = 5
SHOT_NAME_LETTERS = 3
VALUES = (10_000, 100_000)
SHOT_SENTENCES = 12
"""Sentences of noise in a worked example."""


class VariableSettings(TaskSettings):
    """How many chains there are, and how long they are."""

    num_chains: int = Field(default=1, ge=1, le=MOST)
    """Chains of assignments; one of them is asked for."""
    num_hops: int = Field(default=4, ge=1, le=MOST)
    """Copies in each chain: one variable more than hops."""
    one_shot: bool = False
    """Put a short worked example before the question, as RULER does."""


def open_variables(name: str, settings: dict[str, Any]) -> VariableTask:
    """The task vt."""
    return VariableTask(name, VariableSettings.parse(settings))


class VariableTask(GeneratedTask[VariableSettings]):
    """Generates chains of assignments in noise."""

    def draft(self, index: int) -> Draft:
        settings, source = self.settings, self.rng(index, "variables")
        chains = draw_chains(source, settings.num_chains, settings.num_hops, NAME_LETTERS)
        placed = placed_chains(chains, self.rng(index, "depths"))
        haystack = NoiseHaystack()

        def hidden(size: int) -> Hidden:
            return hide(haystack.text(size), placed, separator=" ")

        what = f"{self.name} with {len(placed)} assignments"
        fitted = fit(lambda n: hidden(n).text, self.tokens, self.tokenizer, what=what)
        text, spans = hidden(fitted.num_units)
        value, names = chains[0]
        chain_spans = spans[: len(names)]
        return Draft(
            question=(self._shot(index) if settings.one_shot else "") + question_of(value),
            answers=tuple(names),
            documents=(Passage(text=text),),
            num_tokens=fitted.num_tokens,
            evidence=tuple(
                Evidence(
                    document=0,
                    start=start,
                    end=end,
                    text=text[start:end],
                    note=f"The variables with the value {value} so far: {', '.join(names[: number + 1])}.",
                )
                for number, (start, end) in enumerate(chain_spans)
            ),
            metadata={
                "value": value,
                "num_chains": settings.num_chains,
                "num_hops": settings.num_hops,
                "depths": [round(depth, 4) for depth, _ in placed[: len(names)]],
            },
        )

    def _shot(self, index: int) -> str:
        """A worked example, with shorter names than the text has."""
        source = self.rng(index, "example")
        chains = draw_chains(source, 1, self.settings.num_hops, SHOT_NAME_LETTERS)
        value, names = chains[0]
        noise = NoiseHaystack().text(SHOT_SENTENCES)
        text = hide(noise, placed_chains(chains, source), separator=" ").text
        return (
            f"An example first. Text: {text}\nQuestion: {question_of(value)}\n"
            f"Answer: {listed(names)}\n\nNow the question about the text that you read. "
        )


def question_of(value: str) -> str:
    """The question for the variables of a value."""
    return (
        f"Which variables end up with the value {value}? Name all of them: those that are set to "
        "it, and those that get it as a copy of another variable."
    )


def draw_chains(
    source: random.Random, num_chains: int, num_hops: int, num_letters: int
) -> list[tuple[str, list[str]]]:
    """The value and the variables of each chain; all values and all names differ."""
    values = source.sample(range(*VALUES), num_chains)
    names: list[str] = []
    while len(names) < num_chains * (num_hops + 1):
        name = "".join(source.choices(string.ascii_uppercase, k=num_letters))
        if name not in names:
            names.append(name)
    return [
        (str(value), names[number::num_chains][: num_hops + 1])
        for number, value in enumerate(values)
    ]


def placed_chains(
    chains: list[tuple[str, list[str]]], source: random.Random
) -> list[tuple[float, str]]:
    """The assignments of all chains with their depths; each chain in its order."""
    placed = []
    for value, names in chains:
        depths = sorted(source.random() for _ in names)
        rights = [value, *names]
        placed += [
            (depth, f"Set {name} = {right}.")
            for depth, name, right in zip(depths, names, rights, strict=False)
        ]
    return placed
