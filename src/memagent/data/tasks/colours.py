"""A task for models of a million parameters: the colour of a thing, in a text of short sentences.

    text        It rained. The lamp is green. A dog barked. The coin is red. Nobody spoke. ...
    question    What colour is the coin?
    answers     red

    open_task("small/colours", {"sentences": 24, "others": 2, "seed": 7})

There are few words and no long sentence, so that a small model learns the language within a minute on a
CPU. What is left to learn is reading: find the sentence, keep it, answer from it.
"""

from __future__ import annotations

from typing import Any, Self

from pydantic import Field, model_validator

from memagent.config import MOST
from memagent.data.example import Evidence, Example, Origin, Passage, fingerprint
from memagent.data.tasks.beyond.facts import COLOURS
from memagent.data.tasks.beyond.filler import SHORT_SENTENCES
from memagent.data.tasks.registry import TaskSettings, rng

THINGS = ("coin", "lamp", "door", "boat", "cup", "hat", "kite", "drum", "chair", "bell")


class ColourSettings(TaskSettings):
    """How many sentences there are, and how many of them are distractors."""

    sentences: int = Field(default=24, ge=1, le=MOST)
    """Sentences of the text, all of them."""
    others: int = Field(default=0, ge=0, lt=len(THINGS))
    """Other things whose colours are stated too."""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.tokens is not None:
            raise ValueError(
                "the length of small/colours is given in sentences; leave out `tokens`"
            )
        if self.others >= self.sentences:
            raise ValueError(
                f"{self.sentences} sentences cannot state {self.others + 1} colours; raise `sentences`"
            )
        return self


class ColourTask:
    """Generates texts about colours."""

    num_available: int | None = None

    def __init__(self, name: str, settings: ColourSettings) -> None:
        self.name = name
        self.settings = settings

    def example(self, index: int) -> Example:
        """The example of an index, with its text."""
        settings = self.settings
        draw = rng(settings.seed, self.name, index)
        asked, *others = draw.sample(THINGS, 1 + settings.others)
        colour = draw.choice(COLOURS)
        stated = [_sentence(asked, colour)]
        stated += [_sentence(thing, draw.choice(COLOURS)) for thing in others]
        sentences = [draw.choice(SHORT_SENTENCES) for _ in range(settings.sentences)]
        places = draw.sample(range(settings.sentences), len(stated))
        for place, sentence in zip(places, stated, strict=True):
            sentences[place] = sentence
        text = " ".join(sentences)
        start = text.index(stated[0])
        return Example(
            id=f"{self.name}/{settings.sentences}/{settings.others}/{settings.seed}/{index}",
            task=self.name,
            question=f"What colour is the {asked}?",
            answers=(colour,),
            documents=(Passage(text=text),),
            evidence=(
                Evidence(document=0, start=start, end=start + len(stated[0]), text=stated[0]),
            ),
            origin=Origin(task=self.name, settings=settings.model_dump(), index=index),
            seed=settings.seed,
            text_sha256=fingerprint(text),
        )


def open_colours(name: str, settings: dict[str, Any]) -> ColourTask:
    """The task, with its settings checked."""
    return ColourTask(name, ColourSettings.parse(settings))


def _sentence(thing: str, colour: str) -> str:
    return f"The {thing} is {colour}."
