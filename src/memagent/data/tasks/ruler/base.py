"""What the 13 tasks share: their settings, and the step from what was made to an Example.

question and answers   drawn from seed and index alone: the same at every length
text                   grown until it has the wanted number of tokens
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from memagent.data.example import Evidence, Example, Match, Origin, Passage, fingerprint, join
from memagent.data.tasks.lengths import length_tokenizer
from memagent.data.tasks.registry import TaskSettings, rng
from memagent.documents.tokenizers import Tokenizer
from memagent.errors import ConfigError

S = TypeVar("S", bound=TaskSettings)


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """One example before it is labelled."""

    question: str
    answers: tuple[str, ...]
    documents: tuple[Passage, ...]
    num_tokens: int
    evidence: tuple[Evidence, ...] = ()
    metadata: dict[str, Any] = field(default_factory=dict)


class RulerTask(Generic[S]):
    """A task; a family of tasks derives from it and writes `make`."""

    match: Match = "all"
    grader = "ruler_all"
    num_available: int | None = None

    def __init__(self, name: str, settings: S, sources: dict[str, str]) -> None:
        if settings.tokens is None:
            raise ConfigError(f"{name} needs a length; give tokens, such as 8192")
        self.name = name
        self.settings: S = settings
        self.tokens: int = settings.tokens
        self.tokenizer: Tokenizer = length_tokenizer(settings.tokenizer)
        self._sources = sources

    def make(self, index: int) -> Made:
        """What the example of an index consists of."""
        raise NotImplementedError

    def rng(self, index: int, purpose: str) -> random.Random:
        """Random numbers for one purpose, independent of the length."""
        return rng(self.settings.seed, self.name, index, purpose)

    def example(self, index: int) -> Example:
        """The example of an index, with its documents."""
        made, settings = self.make(index), self.settings
        return Example(
            id=f"{self.name}/{self.tokens}/{settings.seed}/{index}",
            task=self.name,
            question=made.question,
            answers=made.answers,
            match=self.match,
            grader=self.grader,
            documents=made.documents,
            evidence=made.evidence,
            origin=Origin(
                task=self.name,
                settings=settings.model_dump(mode="json"),
                index=index,
                sources=self._sources,
            ),
            target_tokens=self.tokens,
            num_tokens=made.num_tokens,
            seed=settings.seed,
            text_sha256=fingerprint(join(made.documents)),
            metadata=made.metadata,
        )


def listed(items: list[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    if len(items) < 2:
        return "".join(items)
    return f"{', '.join(items[:-1])} and {items[-1]}"
