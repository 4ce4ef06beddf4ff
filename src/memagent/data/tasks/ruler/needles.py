"""Needles in a haystack: eight of RULER's tasks in one.

    haystack      The rain falls on the roof. One secret number of gentle-harbour is 4837261. The ...
    question      What is the secret number of gentle-harbour?
    answers       4837261

A needle gives a value for a key. `num_keys` keys have `num_values` values each, one needle per value,
and the question asks for all values of `num_queries` of the keys. Needles are at depths drawn
uniformly and independently.

    open_task("ruler/niah_multikey_1", {"tokens": 65536, "essays": "books/", "seed": 1})
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import Field, model_validator

from memagent.config import MOST
from memagent.data.choices import source_setting
from memagent.data.example import Evidence, Passage
from memagent.data.sources.cache import open_source, sha256_of
from memagent.data.sources.readers import texts_in
from memagent.data.tasks.lengths import LEAST_SHARE, fit
from memagent.data.tasks.registry import Draft, GeneratedTask, TaskSettings
from memagent.data.tasks.ruler.haystack import (
    EssayHaystack,
    Haystack,
    Hidden,
    NeedleHaystack,
    NoiseHaystack,
    depths_of,
    hide,
    nearest_gap,
)
from memagent.data.tasks.ruler.words import NOUN_OF_KIND, ValueKind, draw_new, listed


class NeedleSettings(TaskSettings):
    """What is hidden, how much of it, and in what."""

    haystack: Literal["repeat", "essay", "needle"]
    """What needles are hidden in: a few repeated sentences (repeat), essays, or other needles."""
    essays: str | None = None
    """Folder or file of texts for the haystack `essay`; any text will do."""
    shift: bool = False
    """Begin the essays at another sentence in each example, not always at the first."""
    keys: ValueKind = "words"
    """What keys look like: words, numbers or uuids."""
    values: ValueKind = "numbers"
    """What values look like: words, numbers or uuids."""
    num_keys: int = Field(default=1, ge=1, le=MOST)
    """Keys in the text; at least as many as are asked for."""
    num_values: int = Field(default=1, ge=1, le=MOST)
    """Values of each key."""
    num_queries: int = Field(default=1, ge=1, le=MOST)
    """Keys that are asked for."""
    depth: Literal["uniform", "ruler"] | Annotated[float, Field(ge=0, le=1)] = "uniform"
    """Depth of needles: uniform, RULER's 40 fixed depths, or all at one depth from 0 to 1."""

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.num_queries > self.num_keys:
            raise ValueError(
                f"num_queries={self.num_queries} asks for more than num_keys={self.num_keys}; "
                "raise `num_keys`"
            )
        if self.haystack == "essay" and self.essays is None:
            raise ValueError(
                f"the haystack essay needs essays; name a folder of texts: {source_setting('essays')}"
            )
        return self


NEEDLES: dict[str, dict[str, Any]] = {
    "ruler/niah_single_1": {"haystack": "repeat"},
    "ruler/niah_single_2": {"haystack": "essay"},
    "ruler/niah_single_3": {"haystack": "essay", "values": "uuids"},
    "ruler/niah_multikey_1": {"haystack": "essay", "num_keys": 4},
    "ruler/niah_multikey_2": {"haystack": "needle"},
    "ruler/niah_multikey_3": {"haystack": "needle", "keys": "uuids", "values": "uuids"},
    "ruler/niah_multivalue": {"haystack": "essay", "num_values": 4},
    "ruler/niah_multiquery": {"haystack": "essay", "num_keys": 4, "num_queries": 4},
}
"""The settings that distinguish the tasks; each can be overridden."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Needle:
    """A value for a key, and the depth it is hidden at."""

    key: str
    value: str
    sentence: str
    depth: float


def open_needles(name: str, settings: dict[str, Any]) -> NeedleTask:
    """A task of NEEDLES."""
    checked = NeedleSettings.parse({**NEEDLES[name], **settings})
    needs_essays = checked.haystack == "essay" and checked.essays is not None
    return NeedleTask(name, checked, open_essays(checked.essays) if needs_essays else None)


class NeedleTask(GeneratedTask[NeedleSettings]):
    """Generates needles in a haystack."""

    def __init__(self, name: str, settings: NeedleSettings, essays: Essays | None) -> None:
        super().__init__(name, settings, essays.sources if essays else {})
        self._essays = essays.text if essays else ""

    def draft(self, index: int) -> Draft:
        settings = self.settings
        needles, taken = self._needles(index)
        placed = [(needle.depth, needle.sentence) for needle in needles]
        haystack = self._haystack(index, taken)

        def hidden(text: str) -> Hidden:
            return hide(text, placed, separator=haystack.separator)

        def text_of(size: int) -> str:
            return hidden(haystack.text(size)).text

        what = f"{self.name} with {len(needles)} needles"
        fitted = fit(text_of, self.tokens, self.tokenizer, is_coarse=True, what=what)
        bare, num_tokens = haystack.text(fitted.num_units), fitted.num_tokens
        if num_tokens < self.tokens * LEAST_SHARE:
            bare, num_tokens = self._filled(bare, hidden, what, haystack.separator)
        text, spans = hidden(bare)
        asked = list(dict.fromkeys(needle.key for needle in needles))[: settings.num_queries]
        evidence = [number for number, needle in enumerate(needles) if needle.key in asked]
        return Draft(
            question=self._question(asked),
            answers=tuple(needles[number].value for number in evidence),
            documents=(Passage(text=text),),
            num_tokens=num_tokens,
            evidence=tuple(
                Evidence(document=0, start=start, end=end, text=text[start:end])
                for start, end in sorted(spans[number] for number in evidence)
            ),
            metadata={
                "keys": asked,
                "num_needles": len(needles),
                "depths": [round(needles[number].depth, 4) for number in evidence],
                **haystack.notes(fitted.num_units),
            },
        )

    def _needles(self, index: int) -> tuple[list[Needle], set[str]]:
        """All needles, those that are asked for first, and the words that are taken by them."""
        settings, source = self.settings, self.rng(index, "needles")
        taken: set[str] = set()
        pairs = []
        for _ in range(settings.num_keys):
            key = draw_new(settings.keys, source, taken)
            pairs += [
                (key, draw_new(settings.values, source, taken)) for _ in range(settings.num_values)
            ]
        depths = depths_of(self.rng(index, "depths"), len(pairs), settings.depth)
        needles = [
            Needle(key=key, value=value, sentence=self.sentence(key, value), depth=depth)
            for (key, value), depth in zip(pairs, depths, strict=True)
        ]
        return needles, taken

    def _haystack(self, index: int, taken: set[str]) -> Haystack:
        settings = self.settings
        if settings.haystack == "repeat":
            return NoiseHaystack()
        if settings.haystack == "essay":
            return EssayHaystack(self._essays, first_char=self._first_char(index))
        return NeedleHaystack(_Distractors(self, self.rng(index, "distractors"), set(taken)))

    def _first_char(self, index: int) -> int:
        if not self.settings.shift:
            return 0
        first = nearest_gap(self._essays, self.rng(index, "shift").random())
        return first % len(self._essays)

    def _filled(
        self, bare: str, hidden: Callable[[str], Hidden], what: str, separator: str
    ) -> tuple[str, int]:
        """Where one needle more is too much, what is missing is filled up with noise."""
        noise = NoiseHaystack()

        def padded(size: int) -> str:
            return separator.join(filter(None, [bare, noise.text(size)]))

        fitted = fit(lambda n: hidden(padded(n)).text, self.tokens, self.tokenizer, what=what)
        return padded(fitted.num_units), fitted.num_tokens

    def sentence(self, key: str, value: str) -> str:
        """A needle."""
        return f"One secret {NOUN_OF_KIND[self.settings.values]} of {key} is {value}."

    def _question(self, keys: list[str]) -> str:
        noun = NOUN_OF_KIND[self.settings.values]
        if len(keys) * self.settings.num_values == 1:
            return f"What is the secret {noun} of {keys[0]} that the text gives?"
        return f"What are all the secret {noun}s of {listed(keys)} that the text gives?"


class _Distractors:
    """Draws needles with other keys and values than those of the answers."""

    def __init__(self, task: NeedleTask, source: random.Random, taken: set[str]) -> None:
        self._task = task
        self._source = source
        self._taken = taken

    def __call__(self) -> str:
        settings = self._task.settings
        key = draw_new(settings.keys, self._source, self._taken)
        value = draw_new(settings.values, self._source, self._taken)
        return self._task.sentence(key, value)


# --- essays ---------------------------------------------------------------------------------------


class Essays(NamedTuple):
    """The texts of a folder, one after the other."""

    text: str
    sources: dict[str, str]
    """Fingerprint of the folder, as an example's origin keeps it."""


def open_essays(folder: str | None) -> Essays:
    """The texts of a folder or file, in the order of their names."""
    path = open_source("essays", folder)
    sha256 = sha256_of(path)
    return Essays(_joined(path, sha256), {"essays": sha256})


@lru_cache(maxsize=1)
def _joined(path: Path, sha256: str) -> str:
    return "\n\n".join(text.strip() for _, text in texts_in(path))
