"""Lessons of the warm start: batches of examples as rows of tokens, in a reproducible order.

    lessons = FileLessons(settings, model=loaded, max_tokens=4096, seed=0)
    lessons.batch(7).examples      # the samples of each example of the eighth step

Examples come from tasks, with replies by rule for the agent in training, or from files of conversations,
in a new random order in each pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, Protocol

from memagent.data.example import Example
from memagent.engines.local.loading import LoadedModel
from memagent.errors import ConfigError
from memagent.rl.rollouts.tasks import OpenSource, TaskStream, shuffled
from memagent.rl.settings import SftSettings
from memagent.rl.types import Sample
from memagent.rl.warmstart.conversations import Conversation, read_conversations
from memagent.rl.warmstart.rows import tokenized
from memagent.rl.warmstart.traces import TraceRefused

LESSON_SEED = 2_000_003
"""Added to the seed of a run, so that demonstrations are of other examples than rollouts."""
MAX_REFUSED = 100
"""This many examples without a demonstration mean that there are none."""


class LessonBatch(NamedTuple):
    """The rows of one step."""

    examples: list[list[Sample]]
    """The rows of each example."""
    num_refused: int = 0
    """Examples that were skipped because there is no rule for them."""


class Lessons(Protocol):
    """Supplies the rows of each step."""

    def batch(self, step: int) -> LessonBatch:
        """The rows of a step; steps count from 0."""
        ...


def ahead(lessons: Lessons, first: int, end: int) -> Iterator[LessonBatch]:
    """The batches of steps `first` to `end`, each prepared in a thread during the step before."""
    with ThreadPoolExecutor(1, thread_name_prefix="memagent-lessons") as thread:
        upcoming = thread.submit(lessons.batch, first)
        for step in range(first + 1, end):
            batch = upcoming.result()
            upcoming = thread.submit(lessons.batch, step)
            yield batch
        yield upcoming.result()


class TaskLessons:
    """Demonstrations by rule. Examples without a rule are skipped and counted."""

    def __init__(
        self,
        settings: SftSettings,
        sources: Sequence[OpenSource],
        show: Callable[[Example], Sequence[Conversation]],
        *,
        model: LoadedModel,
        max_tokens: int,
        seed: int,
    ) -> None:
        """`max_tokens` limits a packed sequence."""
        self._settings = settings
        self._sources = sources
        self._stream = TaskStream(sources, seed=seed)
        self._show = show
        self._model = model
        self._max_tokens = max_tokens

    def check_sources(self) -> None:
        """Build the rows of the first example of each source, to find errors before the first step."""
        for source in self._sources:
            example = source.examples.example(0)
            with suppress(TraceRefused):  # counted where it is skipped
                _rows(self._show(example), self._model, self._max_tokens)

    def batch(self, step: int) -> LessonBatch:
        """The rows of a step."""
        # Each step has its own range of the stream, with spare examples for those without a rule.
        width = self._settings.batch + MAX_REFUSED
        self._stream.move_to(step * width)
        found: list[list[Sample]] = []
        num_refused, reason = 0, ""
        for _ in range(width):
            if len(found) == self._settings.batch:
                break
            try:
                shown = self._show(self._stream.draw(1)[0])
            except TraceRefused as error:
                num_refused, reason = num_refused + 1, str(error)
                continue
            found.append(_rows(shown, self._model, self._max_tokens))
        if not found:
            raise ConfigError(
                f"the warm start has no demonstrations: {reason}; set other `warm_start.tasks`"
            )
        return LessonBatch(found, num_refused)


class FileLessons:
    """Conversations of files, those of one example together."""

    def __init__(
        self, settings: SftSettings, *, model: LoadedModel, max_tokens: int, seed: int
    ) -> None:
        self._batch = settings.batch
        self._model = model
        self._max_tokens = max_tokens
        self._seed = seed
        self._examples: list[tuple[Conversation, ...]] = []
        for name in settings.files:
            self._examples += read_conversations(Path(name).expanduser())

    def batch(self, step: int) -> LessonBatch:
        """The rows of a step."""
        found = []
        for number in range(step * self._batch, (step + 1) * self._batch):
            pass_number, place = divmod(number, len(self._examples))
            order = shuffled(len(self._examples), self._seed, "lessons", pass_number)
            found.append(_rows(self._examples[order[place]], self._model, self._max_tokens))
        return LessonBatch(found)


def _rows(
    conversations: Sequence[Conversation], model: LoadedModel, max_tokens: int
) -> list[Sample]:
    """The rows of all conversations of an example."""
    return [
        sample for one in conversations for sample in tokenized(one, model, max_tokens=max_tokens)
    ]
