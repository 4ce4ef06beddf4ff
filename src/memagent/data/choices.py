"""Which examples are meant, in settings: tasks by name and length, or files; and where sources lie.

    [[tasks]]
    tasks = ["ruler/niah_multikey_2", "ruler/vt"]
    tokens = ["8k", "32k"]

    [[tasks]]
    files = ["mine.jsonl"]

A source is named once, for all tasks that read it: `hotpotqa-dev=PATH`, or the path of a folder that
holds files under their usual names.

    paths = named_sources(["data/hotpotqa", "squad-dev=mine.json"])
    source_settings("ruler/qa_1", paths)      # {"questions": "mine.json"}
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

from pydantic import Field, model_validator

from memagent import names
from memagent.config import Settings
from memagent.data.sources.catalogue import SOURCES, find_source, held_by
from memagent.data.tasks.lengths import Length
from memagent.data.tasks.registry import TASKS
from memagent.errors import ConfigError

_ESSAYS = {"essays": "essays"}

SOURCES_OF: dict[str, dict[str, str]] = {
    "hotpotqa": {
        "hotpotqa-train": "train",
        "hotpotqa-dev": "dev",
        "hotpotqa-paragraphs": "paragraphs",
    },
    "ruler/niah_single_2": _ESSAYS,
    "ruler/niah_single_3": _ESSAYS,
    "ruler/niah_multikey_1": _ESSAYS,
    "ruler/niah_multivalue": _ESSAYS,
    "ruler/niah_multiquery": _ESSAYS,
    "ruler/qa_1": {"squad-dev": "questions"},
    "ruler/qa_2": {"hotpotqa-dev": "questions", "hotpotqa-paragraphs": "paragraphs"},
}
"""The sources that a task reads, and the setting that names the file of each."""
SOURCE_SETTINGS = frozenset(name for one in SOURCES_OF.values() for name in one.values())


class TaskSelection(Settings):
    """Tasks at some lengths."""

    known: ClassVar[tuple[str, ...]] = tuple(TASKS)

    tasks: list[str] = Field(default_factory=list)
    """Names of tasks."""
    tokens: list[Length] | None = None
    """Lengths of the texts in tokens, such as 8192 or "8k"."""
    docs: list[Annotated[int, Field(ge=1)]] | None = None
    """Lengths of the texts in documents, for tasks that have documents."""
    settings: dict[str, Any] = Field(default_factory=dict)
    """Further settings of the tasks."""

    @model_validator(mode="after")
    def _names_tasks_and_lengths(self) -> Self:
        if self.tokens is not None and self.docs is not None:
            raise ValueError("give lengths as tokens or as docs, not both")
        if unknown := [task for task in self.tasks if task not in self.known]:
            raise ValueError(f"there is no task {unknown[0]!r}; {self._advice(unknown[0])}")
        return self

    def _advice(self, unknown: str) -> str:
        """What to change where a task is not known."""
        return names.hint_in_folders(unknown, self.known)


class ExampleChoice(TaskSelection):
    """Tasks, or files of examples. Examples of tasks are generated when they are needed."""

    files: list[str] = Field(default_factory=list)
    """Files of examples: .jsonl, .jsonl.gz, .parquet."""

    def _advice(self, unknown: str) -> str:
        is_file = Path(unknown).expanduser().is_file()
        return "name a file of examples with `files`" if is_file else super()._advice(unknown)

    @model_validator(mode="after")
    def _tasks_or_files(self) -> Self:
        if bool(self.tasks) == bool(self.files):
            raise ValueError("give either tasks or files")
        if self.files and (self.tokens or self.docs):
            raise ValueError(
                "the texts of files have the length they have; leave out tokens and docs"
            )
        return self


def named_sources(given: Sequence[str]) -> dict[str, str]:
    """Path of each source: `name=path` names one, a folder all that it holds; the last one counts."""
    paths: dict[str, str] = {}
    for one in given:
        name, mark, path = one.partition("=")
        if mark and "/" not in name:
            find_source(name)
            paths[name] = path
        elif Path(one).expanduser().is_dir():
            found = held_by(Path(one).expanduser())  # one without any source is a folder of essays
            held = {name: str(Path(one) / file.name) for name, file in found.items()}
            paths.update(held or {"essays": one})
        else:
            raise ConfigError(
                f"`source={one}`: name a folder, or a file as name=path with one of "
                f"{', '.join(SOURCES)}"
            )
    return paths


def source_settings(task: str, paths: dict[str, str]) -> dict[str, str]:
    """The settings that name the files of a task's sources."""
    return {
        setting: paths[name] for name, setting in SOURCES_OF.get(task, {}).items() if name in paths
    }
