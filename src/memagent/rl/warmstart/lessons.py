"""What a warm start learns from: batches of examples as rows of tokens, in an order that can be resumed.

    lessons = Lessons(settings, model=loaded, ...)
    lessons.batch(7).examples      the samples of each example of the eighth step

Examples come from tasks, whose right replies are written by rule for the agent that is trained, or from
files of conversations, gone through in a new random order each time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple, Protocol

from memagent.data.example import Example
from memagent.engines.local.loading import LoadedModel
from memagent.errors import ConfigError
from memagent.rl.rollouts.tasks import OpenSource, TaskStream, shuffled
from memagent.rl.settings import SftSettings
from memagent.rl.types import Sample
from memagent.rl.warmstart.demonstrations import Conversation, read_conversations
from memagent.rl.warmstart.rows import tokenized
from memagent.rl.warmstart.traces import TraceRefused

LESSON_SEED = 2_000_003
"""Added to the seed of a run: what is shown is not what is then tried."""
MAX_REFUSED = 100
"""So many examples in a row without a demonstration mean that there is none at all."""


class Batch(NamedTuple):
    """What one step learns from."""

    examples: list[list[Sample]]
    """The rows of each example."""
    num_refused: int = 0
    """Examples that were left out, because no rule fits them."""


class Lessons(Protocol):
    """Hands out what is learnt from, step by step."""

    def batch(self, step: int) -> Batch:
        """What a step learns from; steps are counted from 0."""
        ...


def ahead(lessons: Lessons, first: int, end: int) -> Iterator[Batch]:
    """The batches of steps `first` to `end`, each made in a thread while the one before is learnt."""
    with ThreadPoolExecutor(1, thread_name_prefix="memagent-lessons") as thread:
        upcoming = thread.submit(lessons.batch, first)
        for step in range(first + 1, end):
            batch = upcoming.result()
            upcoming = thread.submit(lessons.batch, step)
            yield batch
        yield upcoming.result()


class TaskLessons:
    """Replies written by rule. Examples that no rule fits are left out, and counted."""

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
        """`max_tokens` is what a packed sequence may have."""
        self._settings = settings
        self._stream = TaskStream(sources, seed=seed)
        self._show = show
        self._model = model
        self._max_tokens = max_tokens

    def batch(self, step: int) -> Batch:
        """What a step learns from."""
        # Each step has a stretch of the stream to itself, long enough for examples without a rule.
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
                f"the warm start has nothing to show: {reason}; name other tasks in warm_start.tasks"
            )
        return Batch(found, num_refused)


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

    def batch(self, step: int) -> Batch:
        """What a step learns from."""
        found = []
        for number in range(step * self._batch, (step + 1) * self._batch):
            again, place = divmod(number, len(self._examples))
            order = shuffled(len(self._examples), self._seed, "lessons", again)
            found.append(_rows(self._examples[order[place]], self._model, self._max_tokens))
        return Batch(found)


def _rows(
    conversations: Sequence[Conversation], model: LoadedModel, max_tokens: int
) -> list[Sample]:
    """The rows of all conversations of an example."""
    return [
        sample for one in conversations for sample in tokenized(one, model, max_tokens=max_tokens)
    ]
