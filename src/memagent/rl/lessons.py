"""What a warm start learns from: batches of examples as rows of tokens, in an order that can be resumed.

    lessons = Lessons(settings, model=loaded, ...)
    lessons.batch(7)      the samples of each example of the eighth step

Examples come from tasks, whose right replies are written by rule for the agent that is trained, or from
files of conversations, gone through in a new random order each time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from memagent.data.example import Example
from memagent.data.traces import TraceRefused
from memagent.engines.local.loading import LoadedModel
from memagent.errors import ConfigError
from memagent.rl.demonstrations import Conversation, read_conversations
from memagent.rl.settings import SftSettings
from memagent.rl.sft import tokenized
from memagent.rl.sources import OpenSource, TaskStream, shuffled
from memagent.rl.types import Sample

SEED = 2_000_003
"""Added to the seed of a run: what is shown is not what is then tried."""
MAX_REFUSED = 100
"""So many examples in a row without a demonstration mean that there is none at all."""


class Lessons(Protocol):
    """Hands out what is learnt from, step by step."""

    num_refused: int
    """Examples that were left out so far, because no rule fits them."""

    def batch(self, step: int) -> list[list[Sample]]:
        """The rows of each example of a step, counted from 0."""
        ...


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
        self._stream = TaskStream(sources, seed=seed + SEED)
        self._show = show
        self._model = model
        self._max_tokens = max_tokens
        self.num_refused = 0
        self.reason = ""
        """Why the last one was left out."""

    def batch(self, step: int) -> list[list[Sample]]:
        """The rows of each example of a step."""
        # Each step has a stretch of the stream to itself, long enough for examples without a rule.
        width = self._settings.batch + MAX_REFUSED
        self._stream.move_to(step * width)
        found: list[list[Sample]] = []
        for _ in range(width):
            if len(found) == self._settings.batch:
                break
            try:
                shown = self._show(self._stream.draw(1)[0])
            except TraceRefused as error:
                self.num_refused += 1
                self.reason = str(error)
                continue
            found.append(_rows(shown, self._model, self._max_tokens))
        if not found:
            raise ConfigError(
                f"the warm start has nothing to show: {self.reason}; name other tasks in warm_start.tasks"
            )
        return found


class FileLessons:
    """Conversations of files, those of one example together."""

    num_refused = 0

    def __init__(
        self, settings: SftSettings, *, model: LoadedModel, max_tokens: int, seed: int
    ) -> None:
        self._batch = settings.batch
        self._model = model
        self._max_tokens = max_tokens
        self._seed = seed + SEED
        self._examples: list[tuple[Conversation, ...]] = []
        for name in settings.files:
            self._examples += read_conversations(Path(name).expanduser())

    def batch(self, step: int) -> list[list[Sample]]:
        """The rows of each example of a step."""
        found = []
        for number in range(step * self._batch, (step + 1) * self._batch):
            again, place = divmod(number, len(self._examples))
            order = shuffled(len(self._examples), self._seed, "lessons", again)
            found.append(_rows(self._examples[order[place]], self._model, self._max_tokens))
        return found


def _rows(
    conversations: Sequence[Conversation], model: LoadedModel, max_tokens: int
) -> list[Sample]:
    """The rows of all conversations of an example."""
    return [
        sample for one in conversations for sample in tokenized(one, model, max_tokens=max_tokens)
    ]
