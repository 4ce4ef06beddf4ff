"""Tasks to train on: an unbounded mixture whose next task depends on a seed and a position only.

    stream = TaskStream(open_sources(config.tasks, ...), seed=config.seed)
    stream.draw(16)             # the next 16 tasks
    stream.position             # how many were drawn: all that a checkpoint stores

    position  0   1   2   3   4 ...
    source    A   A   B   A   B      drawn in proportion to the weights
    index     0   1   0   2   1      each source in its own order

Generated tasks never repeat. Files, and tasks with a fixed number of questions, are shuffled again for each
pass; a repeated example gets another id.
"""

from __future__ import annotations

import random
import weakref
import zlib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, ClassVar, Protocol

from pydantic import Field

from memagent.config import Settings
from memagent.data.choices import ExampleChoice, source_settings
from memagent.data.example import Example, fingerprint
from memagent.data.formats.files import from_json, read_examples, to_json
from memagent.data.tasks import arithmetic
from memagent.data.tasks.registry import TASKS, open_task, rebuild, rng
from memagent.errors import ConfigError, DataError

VALIDATION_SEED = 1_000_003
"""Added to the seed of a run, so that validation generates other examples."""


class TaskSource(ExampleChoice):
    """Tasks or files of examples with a common weight."""

    known: ClassVar[tuple[str, ...]] = (*TASKS, arithmetic.TASK)

    weight: float = Field(default=1.0, gt=0)
    """Relative frequency of drawing, split evenly over its tasks, files and lengths."""

    @property
    def lengths(self) -> list[dict[str, int]]:
        """The setting of each length."""
        if self.docs is not None:
            return [{"docs": number} for number in self.docs]
        if self.tokens is not None:
            return [{"tokens": number} for number in self.tokens]
        return [{}]


class ArithmeticSettings(Settings):
    """Generated word problems."""

    num_steps: int = Field(default=3, ge=1)
    """Events in a problem."""
    max_number: int = Field(default=20, ge=3)
    """Largest number in a problem."""
    seed: int = 0


class TaskExamples(Protocol):
    """Generates or holds examples."""

    num_available: int | None
    """How many different ones there are; None if unbounded."""

    def example(self, index: int) -> Example:
        """The example of an index, with its documents."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenSource:
    """One task of one length, or one file."""

    name: str
    """The task, or the file's name."""
    weight: float
    examples: TaskExamples
    content: str
    """Identifies the questions: two sources of the same content and seed ask the same ones."""
    seed: int | None = None
    """The seed of generated examples; None for a file."""


def open_sources(
    sources: Sequence[TaskSource],
    *,
    seed: int,
    tokenizer: str | None,
    paths: Mapping[str, str],
) -> list[OpenSource]:
    """Open tasks and files. `tokenizer` measures lengths where a source names no other."""
    return [one for source in sources for one in _opened(source, seed, tokenizer or "bytes", paths)]


def check_apart(training: Sequence[OpenSource], validation: Sequence[OpenSource]) -> None:
    """Refuse validation on training questions, also those of a copied file or of an equal seed."""
    for ours in validation:
        for theirs in training:
            is_bounded = theirs.examples.num_available is not None
            if ours.content == theirs.content and (is_bounded or ours.seed == theirs.seed):
                raise ConfigError(
                    f"validation has the training questions of {ours.name}; use another file or split "
                    "in `validation.tasks`, or another `seed` in their settings"
                )
            if isinstance(ours.examples, _File) and isinstance(theirs.examples, _File):
                same = ours.examples.questions & theirs.examples.questions
                if same:
                    raise ConfigError(
                        f"{len(same)} of {len(ours.examples.questions)} questions of {ours.name} in "
                        f"`validation.tasks` are training questions of {theirs.name}; remove them from "
                        "one of the files"
                    )


def check_ids(sources: Sequence[OpenSource]) -> list[Example]:
    """Refuse sources of one run whose examples have equal ids; the first example of each source.

    Ids of generated examples differ in their last part only, so the first one stands for all of them.
    """
    firsts = [source.examples.example(0) for source in sources]
    for number, (source, first) in enumerate(zip(sources, firsts, strict=True)):
        for other, other_first in zip(sources[:number], firsts[:number], strict=True):
            if same := _equal_ids(source.examples, first, other.examples, other_first):
                raise DataError(
                    f"{other.name} and {source.name} have {same}; ids must be unique within a run: change "
                    "those of a file, name a task once, or give it another `seed` in its settings"
                )
    return firsts


def _equal_ids(
    one: TaskExamples, first: Example, other: TaskExamples, other_first: Example
) -> str | None:
    """The ids that two sources have in common, in words."""
    if isinstance(one, _File) and isinstance(other, _File):
        same = one.ids & other.ids
        return f"{len(same)} ids in common, such as {min(same)}" if same else None
    if isinstance(other, _File):
        one, first, other, other_first = other, other_first, one, first
    if isinstance(one, _File):
        start = other_first.id[: other_first.id.rindex("/") + 1]
        found = next((name for name in one.ids if name.startswith(start)), None)
        return f"ids in common, such as {found}" if found is not None else None
    return f"the same ids, {first.id} and so on" if first.id == other_first.id else None


class TaskStream:
    """Tasks in an order that depends on the seed alone."""

    def __init__(self, sources: Sequence[OpenSource], *, seed: int, position: int = 0) -> None:
        self._sources = sources
        self._seed = seed
        self._weights = [source.weight for source in sources]
        self._counts = [0] * len(sources)
        """How often each source was drawn from."""
        self.position = 0
        """Tasks that were drawn or skipped."""
        self.move_to(position)

    def move_to(self, position: int) -> None:
        """Continue at a position; the tasks before it are not generated."""
        if position < self.position:
            self._counts, self.position = [0] * len(self._sources), 0
        while self.position < position:
            self._next()

    def draw(self, num: int) -> list[Example]:
        """The next tasks, with their texts."""
        found = []
        for _ in range(num):
            number, index = self._next()
            source = self._sources[number]
            available = source.examples.num_available
            if available is None:
                found.append(source.examples.example(index))
                continue
            pass_number, place = divmod(index, available)
            order = shuffled(available, self._seed, source.name, pass_number)
            example = source.examples.example(order[place])
            if pass_number:
                example = replace(example, id=f"{example.id}~{pass_number}")
            found.append(example)
        return found

    def _next(self) -> tuple[int, int]:
        """Source of the next task, and its index there."""
        generator = rng(self._seed, "mixture", self.position)
        number = generator.choices(range(len(self._sources)), self._weights)[0]
        index = self._counts[number]
        self._counts[number] += 1
        self.position += 1
        return number, index


class TasksAhead:
    """Tasks of a stream, prepared in a thread before they are needed."""

    def __init__(self, stream: TaskStream, num_ahead: int) -> None:
        self._stream = stream
        self.position = stream.position
        """Position of the next task in the stream."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="memagent-tasks")
        self._upcoming = deque(self._prepare() for _ in range(num_ahead))

    def __iter__(self) -> Iterator[Example]:
        return self

    def __next__(self) -> Example:
        self._upcoming.append(self._prepare())
        task = self._upcoming.popleft().result()
        self.position += 1
        return task

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(cancel_futures=True)

    def _prepare(self) -> Future[Example]:
        return self._thread.submit(lambda: self._stream.draw(1)[0])


def first_examples(sources: Sequence[OpenSource], num: int) -> list[Example]:
    """The first `num` examples of each source, for validation."""
    found = []
    for source in sources:
        available = source.examples.num_available
        count = num if available is None else min(num, available)
        found += [source.examples.example(index) for index in range(count)]
    return found


# --- kinds of sources -----------------------------------------------------------------------------


def _opened(
    source: TaskSource, seed: int, tokenizer: str, paths: Mapping[str, str]
) -> list[OpenSource]:
    found = []
    share = source.weight / (len(source.tasks) * len(source.lengths) or len(source.files))
    for task in source.tasks:
        base = {"seed": seed, **source_settings(task, dict(paths)), **source.settings}
        if task != arithmetic.TASK:
            base = {"tokenizer": tokenizer, **base}
        for length in source.lengths:
            settings = {**base, **length}
            examples = _Problems(settings) if task == arithmetic.TASK else open_task(task, settings)
            same = {
                name: value
                for name, value in sorted(settings.items())
                if name not in ("seed", "tokens", "docs", "tokenizer")
            }
            found.append(
                OpenSource(
                    name=task,
                    weight=share,
                    examples=examples,
                    content=f"{task} {same}",
                    seed=int(settings["seed"]),
                )
            )
    for name in source.files:
        path = Path(name).expanduser()
        file = _File(path, {**paths}, source.settings)
        found.append(
            OpenSource(name=path.name, weight=share, examples=file, content=str(path.resolve()))
        )
    return found


class _Problems:
    """Word problems."""

    num_available: int | None = None

    def __init__(self, settings: Mapping[str, Any]) -> None:
        try:
            self._settings = ArithmeticSettings.parse(dict(settings))
        except ConfigError as error:
            raise ConfigError(f"{arithmetic.TASK}: {error}") from None

    def example(self, index: int) -> Example:
        """The problem of an index."""
        settings = self._settings
        return arithmetic.problem(
            index,
            seed=settings.seed,
            num_steps=settings.num_steps,
            max_number=settings.max_number,
        )


class _File:
    """The examples of a file, checked once and kept on disk: a file may exceed the memory."""

    def __init__(self, path: Path, paths: dict[str, str], settings: Mapping[str, Any]) -> None:
        self._path, self._paths, self._settings = path, paths, settings
        self._spool = TemporaryFile()  # noqa: SIM115  open as long as the object lives
        weakref.finalize(self, self._spool.close)
        self._spans: list[tuple[int, int]] = []
        """Offset and length of each example in the spool."""
        self.ids: set[str] = set()
        self.questions: set[str] = set()
        """Fingerprints of questions with their answers and texts, whatever their ids."""
        for example in read_examples(path):
            if example.id in self.ids:
                raise DataError(f"{path} has the id {example.id} twice; ids must be unique")
            self.ids.add(example.id)
            text = example.text_sha256 or (
                str(example.origin) if example.documents is None else fingerprint(example.text())
            )
            self.questions.add(fingerprint(f"{example.question}\n{example.answers}\n{text}")[:16])
            packed = zlib.compress(to_json(example).encode(), 1)
            self._spans.append((self._spool.tell(), len(packed)))
            self._spool.write(packed)
        if not self._spans:
            raise DataError(f"{path} holds no example")
        self.num_available: int | None = len(self._spans)

    def example(self, index: int) -> Example:
        """The example of an index, with its text; long texts are rebuilt from their origin."""
        start, length = self._spans[index]
        self._spool.seek(start)
        example = from_json(zlib.decompress(self._spool.read(length)), str(self._path))
        return rebuild(
            example, settings={**source_settings(example.task, self._paths), **self._settings}
        )


@lru_cache(maxsize=64)
def shuffled(num: int, seed: int, name: str, pass_number: int) -> list[int]:
    """The order of a source of `num` examples in one pass."""
    order = list(range(num))
    generator: random.Random = rng(seed, f"order/{name}", pass_number)
    generator.shuffle(order)
    return order
