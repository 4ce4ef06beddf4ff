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
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from memagent import names
from memagent.config import Settings
from memagent.data.tasks.lengths import Length
from memagent.data.tasks.registry import TASKS
from memagent.errors import ConfigError

# --- published files, their licences and addresses ------------------------------------------------

HOTPOT_ADDRESS = "http://curtis.ml.cmu.edu/datasets/hotpot"
SQUAD_ADDRESS = "https://rajpurkar.github.io/SQuAD-explorer/dataset"
CC_BY_SA = "CC BY-SA 4.0"

SourceKind = Literal["hotpotqa", "paragraphs", "squad", "texts"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A published file, or a kind of folder, that datasets are built from."""

    kind: SourceKind
    what: str
    """One line that describes it."""
    licence: str | None
    """None for texts of yours."""
    url: str | None = None
    """Where it is published; None when it is derived from other sources, or yours."""
    num_bytes: int | None = None
    """Size as published; None when not known."""
    sha256: str | None = None
    """Checksum as published; None when unknown; then that of the first download is kept."""
    names: tuple[str, ...] = ()
    """What the file is called in a folder of yours; the first that is there is taken."""

    @property
    def file(self) -> str:
        """What the file is called in the cache."""
        return self.url.rpartition("/")[2] if self.url else self.names[0]


def _names(*stems: str) -> tuple[str, ...]:
    endings = (".json", ".json.gz", ".jsonl", ".jsonl.gz")
    return tuple(stem + ending for stem in stems for ending in endings)


SOURCES: dict[str, Source] = {
    "hotpotqa-train": Source(
        kind="hotpotqa",
        what="HotpotQA 1.1, training questions with ten paragraphs each (90,447)",
        licence=CC_BY_SA,
        url=f"{HOTPOT_ADDRESS}/hotpot_train_v1.1.json",
        num_bytes=566_426_227,
        sha256="26650cf50234ef5fb2e664ed70bbecdfd87815e6bffc257e068efea5cf7cd316",
        names=_names("hotpot_train_v1.1", "hotpotqa_train", "train"),
    ),
    "hotpotqa-dev": Source(
        kind="hotpotqa",
        what="HotpotQA 1, development questions, distractor setting (7,405); never train on them",
        licence=CC_BY_SA,
        url=f"{HOTPOT_ADDRESS}/hotpot_dev_distractor_v1.json",
        num_bytes=46_320_117,
        sha256="4e9ecb5c8d3b719f624d66b60f8d56bf227f03914f5f0753d6fa1b359d7104ea",
        names=_names("hotpot_dev_distractor_v1", "hotpotqa_dev", "dev"),
    ),
    "hotpotqa-paragraphs": Source(
        kind="paragraphs",
        what="distinct Wikipedia paragraphs; those of both files above unless a file is given",
        licence=CC_BY_SA,
        names=("hotpotqa-paragraphs.jsonl.gz", *_names("paragraphs")),
    ),
    "squad-dev": Source(
        kind="squad",
        what="SQuAD 2.0, development questions (11,873, half without an answer)",
        licence=CC_BY_SA,
        url=f"{SQUAD_ADDRESS}/dev-v2.0.json",
        num_bytes=4_370_528,
        sha256="80a5225e94905956a6446d296ca1093975c4d3b3260f1d6c8f68bc2ab77182d8",
        names=_names("dev-v2.0", "squad"),
    ),
    "essays": Source(
        kind="texts",
        what="prose to hide things in: any folder of .txt and .md files, which may be gzipped",
        licence=None,
    ),
}
"""Sources by name. Sizes and checksums are those under which the files are published."""


def find_source(name: str) -> Source:
    """The source of a name; an error suggests the nearest name."""
    if name not in SOURCES:
        raise ConfigError(f"there is no source {name!r}; {names.hint(name, SOURCES)}")
    return SOURCES[name]


def source_setting(name: str) -> str:
    """How messages name the setting that says where a source lies."""
    return f"`sources.{name}=PATH`"


def held_by(folder: Path) -> dict[str, Path]:
    """The sources that a folder holds under the usual names of their files."""
    return {
        name: folder / file
        for name, source in SOURCES.items()
        for file in reversed(source.names)
        if (folder / file).is_file()
    }


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
