"""A reading: its questions, and the trace of each from the lines of one file."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from memagent.errors import RunError
from memagent.runs import JOURNAL, read_manifest
from memagent.viewer.line_index import LineIndex
from memagent.viewer.traces import (
    HeadMaker,
    Json,
    QuestionLine,
    StoredStep,
    StoredTrace,
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
        self._manifest = read_manifest(path)
        self._makers: dict[int, HeadMaker] = {}
        self._index = LineIndex(path, JOURNAL, self._head_of)

    @property
    def questions(self) -> list[str]:
        """The questions, in their order."""
        found = self._manifest.get("questions")
        return [str(question) for question in found] if isinstance(found, list) else []

    def overview(self) -> Json:
        """The questions with their answers, and what was read."""
        self._index.refresh()
        document = _table(self._manifest, "document")
        return {
            "document": {
                "source": str(document.get("source", "")),
                "num_chars": document.get("num_chars"),
                "sha256": str(document.get("sha256", "")),
            },
            "model": str(self._manifest.get("model", "")),
            "prompts": str(_table(self._manifest, "prompts").get("name", "")),
            "settings": _table(self._manifest, "agent"),
            "questions": [self._question(number) for number in range(len(self.questions))],
        }

    def trace(self, number: int) -> StoredTrace:
        """The trace of a question."""
        if not 0 <= number < len(self.questions):
            raise RunError(f"there is no question {number}")
        self._index.refresh()
        lines = self._lines(number)
        document = _table(self._manifest, "document")
        return StoredTrace(
            question=self.questions[number],
            heads=[head for _, head in lines],
            step_at=lambda position: self._step(lines[position][0]),
            model=str(self._manifest.get("model", "")),
            source=str(document.get("source", "")),
            document_sha256=str(document.get("sha256", "")),
            prompts=stored_prompts(self._manifest.get("prompts")),
            settings=_table(self._manifest, "agent"),
        )

    def _question(self, number: int) -> Json:
        lines = self._lines(number)
        heads = [head for _, head in lines]
        is_answered = bool(heads) and heads[-1]["kind"] == "answer"
        answer = self._step(lines[-1][0]).answer if is_answered else None
        if answer is not None:
            answer = shown_answer(answer, stored_prompts(self._manifest.get("prompts")))
        return {"question": self.questions[number], "answer": answer, "totals": totals(heads)}

    def _lines(self, question: int) -> list[tuple[int, Json]]:
        """Line numbers and heads of the steps of a question."""
        return [
            (number, found.head)
            for number, found in enumerate(self._index.heads)
            if found is not None and found.question == question
        ]

    def _step(self, line: int) -> StoredStep:
        return QuestionLine.model_validate(self._index.record(line)).step

    def _head_of(self, line: bytes) -> _StepHead:
        found = QuestionLine.model_validate_json(line)
        maker = self._makers.setdefault(found.question, HeadMaker())
        return _StepHead(found.question, maker.head(found.step))


def _table(values: dict[str, Any], name: str) -> dict[str, Any]:
    found = values.get(name)
    return found if isinstance(found, dict) else {}
