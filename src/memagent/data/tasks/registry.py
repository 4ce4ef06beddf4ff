"""Tasks by name. A task generates examples: a pure function of its settings and an index.

    task = open_task("ruler/niah_single_1", {"tokens": 8192, "seed": 7, "tokenizer": "smollm2-135m"})
    task.example(0), task.example(1), ...       # any index, in any order, in any process

The same task, settings and index give the same example, on any machine and in any process; all
randomness comes from `rng`, which is keyed by seed, task, index and purpose.

A new task is a module with a settings class and an `open` function, and one line in `TASKS`.
"""

from __future__ import annotations

import hashlib
import json
import random
from dataclasses import dataclass, field, replace
from functools import lru_cache
from importlib import import_module
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from pydantic import Field

from memagent import names
from memagent.config import LONGEST, Settings
from memagent.data.example import Evidence, Example, Origin, Passage, fingerprint, join
from memagent.data.tasks.lengths import length_tokenizer
from memagent.errors import ConfigError, DataError
from memagent.rewards.verifiers import Match
from memagent.tokens.tokenizers import Tokenizer

LEFT_OUT = "num_distractors_left_out"
"""In an example's metadata: its own distractors that the text had no room for, where there are any."""


class TaskSettings(Settings):
    """The settings of every task; a task derives its own from it."""

    stored_if_set: ClassVar[frozenset[str]] = frozenset()
    """Settings that datasets store only where they are set: others keep their fingerprints."""

    tokens: int | None = Field(default=None, ge=64, le=LONGEST)
    """Length of the text in tokens of the tokenizer; reached within 2 %, never exceeded."""
    tokenizer: str = "smollm2-135m"
    """Tokenizer that counts the length: a pulled model's name, a hub id, a path, or tiktoken:NAME."""
    seed: int = 0
    """Every example depends on this and on its index, on nothing else."""

    def stored(self) -> dict[str, Any]:
        """The settings as datasets store them."""
        values = self.model_dump(mode="json")
        unset = {n for n in self.stored_if_set if values[n] == type(self).model_fields[n].default}
        return {name: value for name, value in values.items() if name not in unset}


class Task(Protocol):
    """Generates examples."""

    name: str
    settings: TaskSettings
    num_available: int | None
    """How many different examples there are; None for any number."""

    def example(self, index: int) -> Example:
        """The example of an index, with its documents."""
        ...


TASKS: dict[str, str] = {
    "hotpotqa": "memagent.data.tasks.hotpotqa:open_hotpotqa",
    "beyond/coreference": "memagent.data.tasks.beyond:open_beyond",
    "beyond/counting": "memagent.data.tasks.beyond:open_beyond",
    "beyond/aggregation": "memagent.data.tasks.beyond:open_beyond",
    "beyond/two_hop": "memagent.data.tasks.beyond:open_beyond",
    "beyond/corrections": "memagent.data.tasks.beyond:open_beyond",
    "beyond/unanswerable": "memagent.data.tasks.beyond:open_beyond",
    "beyond/injection": "memagent.data.tasks.beyond:open_beyond",
    "ruler/niah_single_1": "memagent.data.tasks.ruler.needles:open_needles",
    "ruler/niah_single_2": "memagent.data.tasks.ruler.needles:open_needles",
    "ruler/niah_single_3": "memagent.data.tasks.ruler.needles:open_needles",
    "ruler/niah_multikey_1": "memagent.data.tasks.ruler.needles:open_needles",
    "ruler/niah_multikey_2": "memagent.data.tasks.ruler.needles:open_needles",
    "ruler/niah_multikey_3": "memagent.data.tasks.ruler.needles:open_needles",
    "ruler/niah_multivalue": "memagent.data.tasks.ruler.needles:open_needles",
    "ruler/niah_multiquery": "memagent.data.tasks.ruler.needles:open_needles",
    "ruler/vt": "memagent.data.tasks.ruler.variables:open_variables",
    "ruler/cwe": "memagent.data.tasks.ruler.words:open_common",
    "ruler/fwe": "memagent.data.tasks.ruler.words:open_frequent",
    "ruler/qa_1": "memagent.data.tasks.ruler.questions:open_squad",
    "ruler/qa_2": "memagent.data.tasks.ruler.questions:open_hotpot",
    "small/colours": "memagent.data.tasks.colours:open_colours",
}
"""Name of a task, and "module:function" that opens it: `open(name, settings: dict) -> Task`."""

_NEEDLE_TOKENS, _QA_TOKENS = 128, 32

MAX_ANSWER_TOKENS: dict[str, int] = {
    **{task: _NEEDLE_TOKENS for task in TASKS if task.startswith("ruler/niah_")},
    "ruler/vt": 30,
    "ruler/cwe": 120,
    "ruler/fwe": 50,
    "ruler/qa_1": _QA_TOKENS,
    "ruler/qa_2": _QA_TOKENS,
}
"""Tokens that an answer to a task may have, as RULER limits them; other tasks have no limit."""


def check_task(name: str) -> None:
    """Raise ConfigError, with the nearest names, where there is no such task."""
    if name not in TASKS:
        raise ConfigError(f"there is no task {name!r}; {names.hint_in_folders(name, TASKS)}")


def open_task(name: str, settings: dict[str, Any]) -> Task:
    """A task by name."""
    check_task(name)
    module, function = TASKS[name].split(":")
    task: Task = getattr(import_module(module), function)(name, settings)
    return task


def rebuild(example: Example, *, settings: dict[str, Any] | None = None) -> Example:
    """The example with its documents, rebuilt from its origin and checked against its hash.

    `settings` override those it was built with, such as where its sources lie here.
    """
    if example.documents is not None:
        return example
    if example.origin is None:
        raise DataError(f"{example.id} has neither documents nor an origin to rebuild them from")
    values = {**example.origin.settings, **(settings or {})}
    task = _kept(example.origin.task, json.dumps(values, sort_keys=True))
    rebuilt = task.example(example.origin.index)
    sha256 = rebuilt.text_sha256 or fingerprint(rebuilt.text())
    if example.text_sha256 and sha256 != example.text_sha256:
        raise DataError(
            f"the text of {example.id} is not what it was when it was built; its sources or settings have changed"
        )
    return replace(example, documents=rebuilt.documents)


@lru_cache(maxsize=2)
def _kept(name: str, settings: str) -> Task:
    """A task for many examples in a row: opening one may take longer than an example."""
    return open_task(name, json.loads(settings))


def rng(seed: int, task: str, index: int, purpose: str = "") -> random.Random:
    """Random numbers that depend on these four and on nothing else."""
    key = hashlib.sha256(f"{seed}/{task}/{index}/{purpose}".encode()).digest()
    return random.Random(int.from_bytes(key, "big"))


# --- tasks whose texts are generated to a length --------------------------------------------------

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
