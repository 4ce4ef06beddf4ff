"""Which examples are meant, in settings: tasks by name and length, or files.

[[tasks]]
tasks = ["ruler/niah_multikey_2", "ruler/vt"]
tokens = ["8k", "32k"]

[[tasks]]
files = ["mine.jsonl"]
"""

from __future__ import annotations

from difflib import get_close_matches
from typing import Any, ClassVar, Self

from pydantic import Field, model_validator

from memagent.config import Settings
from memagent.data.tasks.lengths import Length
from memagent.data.tasks.registry import TASKS


class ExampleChoice(Settings):
    """Tasks, or files of examples, that are treated alike."""

    known: ClassVar[tuple[str, ...]] = tuple(TASKS)

    tasks: list[str] = Field(default_factory=list)
    """Names of tasks; examples are made when they are needed."""
    files: list[str] = Field(default_factory=list)
    """Files of examples: .jsonl, .jsonl.gz, .parquet."""
    tokens: list[Length] | None = None
    """Lengths of the texts in tokens, such as 8192 or "8k"."""
    docs: list[int] | None = None
    """Lengths of the texts in documents, for tasks that have documents."""
    settings: dict[str, Any] = Field(default_factory=dict)
    """Further settings of the tasks."""

    @model_validator(mode="after")
    def _is_clear(self) -> Self:
        if bool(self.tasks) == bool(self.files):
            raise ValueError("give either tasks or files")
        if self.tokens is not None and self.docs is not None:
            raise ValueError("give lengths as tokens or as docs, not both")
        if self.files and (self.tokens or self.docs):
            raise ValueError(
                "the texts of files have the length they have; leave out tokens and docs"
            )
        if unknown := [task for task in self.tasks if task not in self.known]:
            near = get_close_matches(unknown[0], self.known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(self.known)}"
            raise ValueError(f"there is no task {unknown[0]!r}; {hint}")
        return self
