"""Items: which examples an evaluation asks, and how each is generated or read when its turn comes.

    suite ──▶ EvalPlan ──▶ Item, Item, ...      small: source, position, length
                             │
                             ▼  in a worker process, a few ahead of need
                           Example with its text

    plan = plan_items(suite, length_tokenizer="bytes")
    with ExamplePool(plan, processes=2) as pool:
        example = await pool.example(plan.items[0])

Texts are never all in memory. The longest are asked first: the last items in flight are then short, and
no endpoint idles while a single long one finishes.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import threading
from collections.abc import Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, Self

from memagent.data.choices import source_settings
from memagent.data.example import Example
from memagent.data.formats.benchmarks import files_of, read_dataset
from memagent.data.tasks.lengths import nominal_tokens
from memagent.data.tasks.registry import MAX_ANSWER_TOKENS, Task, open_task, rebuild
from memagent.errors import ConfigError, DataError, MemagentError
from memagent.eval.suites import CLOSED_BOOK, ReplyLimit, Suite, SuiteTasks
from memagent.files import reason_of
from memagent.processes import ProcessPool

QUICK_TOKENS = 2_000_000
"""Up to this many tokens of text are generated in this process: a worker takes a second to start."""
AHEAD_TOKENS = 8_000_000
"""Most tokens of generated text that wait for their turn; at least two texts wait."""
MAX_AHEAD = 32
CHARS_PER_TOKEN = 4
"""For texts whose tokens nobody counted."""
MAX_PROCESSES = 4
"""Examples are generated faster than they are read; more workers would only take memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemSource:
    """Where examples come from: a task with its settings, or a file."""

    task: str | None = None
    """None for a file."""
    file: str | None = None
    settings: str = "{}"
    """Settings of the task as JSON; for a file, overrides of the settings it was generated with."""
    grader: str | None = None
    """Overrides the example's own grader."""
    graded_tokens: int | None = None
    """Tokens of an answer that are graded, at most; None for no limit."""
    generated_tokens: int | None = None
    """Tokens that are generated for an answer, at most; None for those of the method's settings."""
    has_text: bool = True
    """False where no method is shown the text: it is not rebuilt then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One example to ask, before it is generated or read."""

    source: ItemSource
    position: int
    """Index of the example in its task, or position in its file."""
    task: str
    target_tokens: int | None
    index: int
    """Number among the items of this task and length; for tasks it is the position."""
    num_tokens: int
    """Approximate length of the text: long ones are asked first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalPlan:
    """All items of an evaluation, longest first."""

    items: tuple[Item, ...]
    files: dict[str, str]
    """SHA-256 of each file of examples."""
    tokenizers: tuple[str, ...]
    """Names of the tokenizers that lengths are counted with."""


def item_seed(seed: int, item: Item, sample: int = 0) -> int:
    """The sampling seed of an item: the same for every method, different for every example and sample."""
    key = f"{seed}/{item.task}/{item.target_tokens}/{item.index}"
    key += f"/{sample}" if sample else ""
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:4], "big") >> 1  # servers: 31 bits


# --- the plan -------------------------------------------------------------------------------------


def plan_items(suite: Suite, *, length_tokenizer: str | None = None) -> EvalPlan:
    """The items of a suite. `length_tokenizer` counts lengths where the suite names no tokenizer."""
    length_tokenizer = suite.length_tokenizer or length_tokenizer
    paths = suite.sources
    shared: dict[str, Any] = {"seed": suite.seed}
    if length_tokenizer is not None:
        shared["tokenizer"] = length_tokenizer
    numbers: dict[tuple[str, int | None], int] = {}
    files: dict[str, str] = {}
    tokenizers: dict[str, str] = {}
    items: list[Item] = []
    for choice in suite.tasks:
        for task in choice.tasks:
            base = {**shared, **source_settings(task, paths), **choice.settings}
            tokenizers.setdefault(str(base.get("tokenizer", "smollm2-135m")), task)
            items += _task_items(task, base, choice, suite, numbers)
        for name in choice.files:
            path = Path(name).expanduser()
            files[str(path)] = _file_sha256(path)
            items += _file_items(path, choice, suite, numbers, tokenizers, paths)
    if len(tokenizers) > 1:
        (one, first), (other, second) = list(tokenizers.items())[:2]
        raise ConfigError(
            f"lengths of {first} are counted by the tokenizer {one}, lengths of {second} by {other}; "
            "evaluate them in separate runs"
        )
    return EvalPlan(items=tuple(_longest_first(items)), files=files, tokenizers=tuple(tokenizers))


def _longest_first(items: list[Item]) -> list[Item]:
    """Sources by their longest text; order within a source is kept, since files are read forwards."""
    longest: dict[str | ItemSource, int] = {}
    for item in items:
        name = item.source.file or item.source
        longest[name] = max(longest.get(name, 0), item.num_tokens)
    return sorted(items, key=lambda item: -longest[item.source.file or item.source])


def _task_items(
    task: str,
    base: dict[str, Any],
    choice: SuiteTasks,
    suite: Suite,
    numbers: dict[tuple[str, int | None], int],
) -> Iterator[Item]:
    for target, length in _lengths(choice, base):
        settings = json.dumps({**base, **length}, sort_keys=True)
        source = ItemSource(
            task=task,
            settings=settings,
            grader=choice.grader or suite.grader,
            graded_tokens=_answer_limit(task, choice, suite, "graded"),
            generated_tokens=_answer_limit(task, choice, suite, "generated"),
        )
        first = numbers.get((task, target), 0)
        num = choice.num or suite.num
        numbers[task, target] = first + num
        for position in range(num):
            yield Item(
                source=source,
                position=position,
                task=task,
                target_tokens=target,
                index=first + position,
                num_tokens=target or 0,
            )


def _lengths(choice: SuiteTasks, base: dict[str, Any]) -> list[tuple[int | None, dict[str, int]]]:
    """Each length as reported, and the task setting for it."""
    if choice.docs is not None:
        return [(nominal_tokens(num), {"docs": num}) for num in choice.docs]
    if choice.tokens is not None:
        return [(num, {"tokens": num}) for num in choice.tokens]
    return [(base.get("tokens"), {})]


def _file_items(
    path: Path,
    choice: SuiteTasks,
    suite: Suite,
    numbers: dict[tuple[str, int | None], int],
    tokenizers: dict[str, str],
    paths: dict[str, str],
) -> Iterator[Item]:
    """One pass over a file: every example is validated before the first call, none is held."""
    grader = choice.grader or suite.grader
    has_text = any(method.name != CLOSED_BOOK for method in suite.methods)
    num = 0
    for position, example in enumerate(read_dataset(path)):
        if choice.num is not None and position >= choice.num:
            break
        num += 1
        settings = {**source_settings(example.task, paths), **choice.settings}
        origin = example.origin.settings if example.origin else {}
        if has_text and "tokenizer" in origin and example.num_tokens is not None:
            tokenizers.setdefault(str(origin["tokenizer"]), path.name)
        target = example.target_tokens
        if target is None and origin.get("docs") is not None:
            target = nominal_tokens(int(origin["docs"]))
        index = numbers.get((example.task, target), 0)
        numbers[example.task, target] = index + 1
        num_chars = sum(len(passage.text) for passage in example.documents or ())
        yield Item(
            source=ItemSource(
                file=str(path.resolve()),
                settings=json.dumps(settings, sort_keys=True),
                grader=grader,
                graded_tokens=_answer_limit(example.task, choice, suite, "graded"),
                generated_tokens=_answer_limit(example.task, choice, suite, "generated"),
                has_text=has_text,
            ),
            position=position,
            task=example.task,
            target_tokens=target,
            index=index,
            num_tokens=(example.num_tokens or target or num_chars // CHARS_PER_TOKEN) * has_text,
        )
    if not num:
        raise DataError(f"{path} holds no examples")


def _answer_limit(
    task: str, choice: SuiteTasks, suite: Suite, applies_to: ReplyLimit
) -> int | None:
    """How many tokens of an answer are graded, or generated, at most."""
    if suite.reply_limit != applies_to:
        return None
    return choice.max_answer_tokens or MAX_ANSWER_TOKENS.get(task)


def _file_sha256(path: Path) -> str:
    try:
        digests = []
        for file in files_of(path):
            with file.open("rb") as data:
                digests.append(hashlib.file_digest(data, "sha256").hexdigest())
    except OSError as error:
        raise DataError(f"cannot read {error.filename or path}: {reason_of(error)}") from None
    if len(digests) == 1:
        return digests[0]
    return hashlib.sha256("".join(digests).encode()).hexdigest()


# --- examples -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSample:
    """One example of a task, and the item it belongs to."""

    item: Item
    example: Example


class _Checked(NamedTuple):
    """What opening a task showed."""

    example: Example | None
    num_available: int | None
    sources: dict[str, str]
    """SHA-256 of the source files of its examples."""


class ExamplePool:
    """Generates or reads examples ahead of need, in worker processes or, for little work, in a thread."""

    def __init__(self, plan: EvalPlan, *, processes: int | None = None) -> None:
        """`processes=None` decides by the amount of text; 0 uses a thread of this process."""
        if processes is None:
            cores = os.cpu_count() or 1
            is_quick = sum(item.num_tokens for item in plan.items) <= QUICK_TOKENS
            processes = 0 if is_quick else max(1, min(MAX_PROCESSES, cores - 1))
        self._pool: Executor = ProcessPool(processes) if processes else ThreadPoolExecutor(1)
        typical = plan.items[0].num_tokens if plan.items else 0
        self.num_ahead = max(2, min(MAX_AHEAD, AHEAD_TOKENS // max(typical, 1)))
        """How many examples may wait for their turn."""
        self.samples: dict[str, TaskSample] = {}
        """The shortest example of each task, after `check`."""

    async def check(self, plan: EvalPlan, *, with_files: bool = False) -> dict[str, str]:
        """Generate a short example of each task, so that mistakes show before the first call.

        An example of a file whose text cannot be rebuilt is an error only `with_files`; else it is the item's
        own. Returns the SHA-256 of the source files, by the source's name.
        """
        loop = asyncio.get_running_loop()
        found: dict[str, str] = {}
        generated = [item for item in plan.items if item.source.file is None]
        # the last of a task is its shortest; files were checked when they were planned
        for item in {item.task: item for item in generated if item.position == 0}.values():
            checked = await loop.run_in_executor(self._pool, _check, item)
            found |= checked.sources
            if checked.example is not None:
                self.samples[item.task] = TaskSample(item=item, example=checked.example)
            num = 1 + max(other.position for other in plan.items if other.task == item.task)
            if checked.num_available is not None and num > checked.num_available:
                raise ConfigError(
                    f"{item.task} has {checked.num_available:,} examples, fewer than `num={num}`; "
                    "lower `num`"
                )
        for item in _shortest_of_files(plan):
            try:
                example = await self.example(item)
            except MemagentError as error:
                if with_files:
                    raise ConfigError(f"{item.source.file}: {error}") from None
                continue
            self.samples.setdefault(item.task, TaskSample(item=item, example=example))
        return found

    def example(self, item: Item) -> asyncio.Future[Example]:
        """The example of an item, with its text."""
        return asyncio.get_running_loop().run_in_executor(self._pool, open_example, item)

    def close(self) -> None:
        """End the workers; what they have not delivered is discarded."""
        self._pool.shutdown(cancel_futures=True)
        _cursor.cache_clear()  # closes the files that this process reads

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def open_example(item: Item) -> Example:
    """The example of an item, with its text."""
    settings = json.loads(item.source.settings)
    if item.source.file is None:
        assert item.source.task is not None
        return _task(item.source.task, item.source.settings).example(item.position)
    example = _cursor(item.source.file).example(item.position)
    if not item.source.has_text:
        return replace(example, documents=(), evidence=())
    return rebuild(example, settings=settings)


def _shortest_of_files(plan: EvalPlan) -> list[Item]:
    """The first of the shortest items of each task in each file."""
    found: dict[tuple[str, str], Item] = {}
    for item in plan.items:
        if item.source.file is not None:
            place = (item.source.file, item.task)
            if place not in found or item.num_tokens < found[place].num_tokens:
                found[place] = item
    return sorted(found.values(), key=lambda item: (item.source.file or "", item.position))


def _check(item: Item) -> _Checked:
    assert item.source.task is not None
    task = _task(item.source.task, item.source.settings)
    if task.num_available is not None and item.position >= task.num_available:
        return _Checked(None, task.num_available, {})
    try:
        example = task.example(item.position)
    except MemagentError as error:
        raise ConfigError(f"{item.task}: {error}") from None
    sources = example.origin.sources if example.origin else {}
    return _Checked(example, task.num_available, sources)


@lru_cache(maxsize=64)
def _task(name: str, settings: str) -> Task:
    """A task, kept open in the process that generates its examples."""
    return open_task(name, json.loads(settings))


class _Cursor:
    """Reads a file forwards; going back reopens it."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._examples: Iterator[Example] = iter(())
        self._next = 0
        self._is_open = False

    def example(self, position: int) -> Example:
        with self._lock:
            if not self._is_open or position < self._next:
                self._examples, self._next, self._is_open = read_dataset(self._path), 0, True
            for example in self._examples:
                self._next += 1
                if self._next == position + 1:
                    return example
        raise DataError(f"{self._path} has changed: example {position} no longer exists")


@lru_cache(maxsize=16)
def _cursor(path: str) -> _Cursor:
    return _Cursor(path)
