"""Tasks whose texts are generated to a length: the step from a draft to a labelled Example.

question and answers   drawn from seed and index alone: the same at every length
text                   grown until it has the requested number of tokens
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from memagent.data.example import Evidence, Example, Origin, Passage, fingerprint, join
from memagent.data.tasks.lengths import length_tokenizer
from memagent.data.tasks.registry import TaskSettings, rng
from memagent.errors import ConfigError
from memagent.rewards.verifiers import Match
from memagent.tokens.tokenizers import Tokenizer

S = TypeVar("S", bound=TaskSettings)


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """What an example consists of, before it is labelled."""

    question: str
    answers: tuple[str, ...]
    match: Match = "all"
    grader: str = "ruler_all"
    documents: tuple[Passage, ...]
    num_tokens: int
    evidence: tuple[Evidence, ...] = ()
    metadata: dict[str, Any] = field(default_factory=dict)


class GeneratedTask(Generic[S]):
    """A task of a fixed length; a family of tasks derives from it and writes `draft`."""

    num_available: int | None = None

    def __init__(self, name: str, settings: S, sources: dict[str, str] | None = None) -> None:
        if settings.tokens is None:
            raise ConfigError(f"{name} needs a length; give `tokens`, such as 8192")
        self.name = name
        self.settings: S = settings
        self.tokens: int = settings.tokens
        self.tokenizer: Tokenizer = length_tokenizer(settings.tokenizer)
        self._sources = sources or {}

    def draft(self, index: int) -> Draft:
        """What the example of an index consists of."""
        raise NotImplementedError

    def rng(self, index: int, purpose: str) -> random.Random:
        """Random numbers for one purpose, independent of the length."""
        return rng(self.settings.seed, self.name, index, purpose)

    def example(self, index: int) -> Example:
        """The example of an index, with its documents."""
        draft, settings = self.draft(index), self.settings
        return Example(
            id=f"{self.name}/{self.tokens}/{settings.seed}/{index}",
            task=self.name,
            question=draft.question,
            answers=draft.answers,
            match=draft.match,
            grader=draft.grader,
            documents=draft.documents,
            evidence=draft.evidence,
            origin=Origin(
                task=self.name,
                settings=settings.model_dump(mode="json"),
                index=index,
                sources=self._sources,
            ),
            target_tokens=self.tokens,
            num_tokens=draft.num_tokens,
            seed=settings.seed,
            text_sha256=fingerprint(join(draft.documents)),
            metadata=draft.metadata,
        )
