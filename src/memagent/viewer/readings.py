"""A reading: its questions, and the trace of each from the lines of one file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

from memagent.agent.journal import read_reading
from memagent.agent.trace import Step, journal_entry
from memagent.errors import RunError
from memagent.runs import JOURNAL
from memagent.viewer.line_index import LineIndex
from memagent.viewer.traces import (
    HeadMaker,
    Json,
    StoredTrace,
    answer_of,
    shown_answer,
    stored_prompts,
    totals,
)


class _StepHead(NamedTuple):
    question: int
    head: Json


class AskRun:
    """A run of `memagent ask`, finished or not."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._manifest = read_reading(path)
        self._prompts = stored_prompts(self._manifest["prompts"])
        self._questions: list[str] = self._manifest["questions"]
        self._makers: dict[int, HeadMaker] = {}
        self._index = LineIndex(path, JOURNAL, self._head_of)

    def overview(self) -> Json:
        """The questions with their answers, and what was read."""
        self._index.refresh()
        document = self._manifest["document"]
        return {
            "document": {name: document[name] for name in ("source", "num_chars", "sha256")},
            "model": self._manifest["model"],
            "prompts": self._manifest["prompts"]["name"],
            "settings": self._manifest["agent"],
            "questions": [self._question(number) for number in range(len(self._questions))],
        }

    def trace(self, number: int) -> StoredTrace:
        """The trace of a question."""
        if not 0 <= number < len(self._questions):
            raise RunError(f"there is no question {number}")
        self._index.refresh()
        lines = self._lines(number)
        return StoredTrace(
            question=self._questions[number],
            heads=[head for _, head in lines],
            step_at=lambda position: self._step(lines[position][0]),
            model=self._manifest["model"],
            source=self._manifest["document"]["source"],
            document_sha256=self._manifest["document"]["sha256"],
            prompts=self._prompts,
            settings=self._manifest["agent"],
        )

    def _question(self, number: int) -> Json:
        lines = self._lines(number)
        heads = [head for _, head in lines]
        is_answered = bool(heads) and heads[-1]["kind"] == "answer"
        answer = answer_of(self._step(lines[-1][0])) if is_answered else None
        if answer is not None:
            answer = shown_answer(answer, self._prompts)
        return {"question": self._questions[number], "answer": answer, "totals": totals(heads)}

    def _lines(self, question: int) -> list[tuple[int, Json]]:
        """Line numbers and heads of the steps of a question."""
        return [
            (number, found.head)
            for number, found in enumerate(self._index.heads)
            if found is not None and found.question == question
        ]

    def _step(self, line: int) -> Step:
        return journal_entry(self._index.record(line))[1]

    def _head_of(self, line: bytes) -> _StepHead:
        question, step = journal_entry(json.loads(line))
        maker = self._makers.setdefault(question, HeadMaker())
        return _StepHead(question, maker.head(step))
