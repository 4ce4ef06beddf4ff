"""Recipes: which datasets to build, in a TOML file, and the jobs they expand to.

    # dev.toml
    seed = 7
    [[datasets]]
    tasks = ["hotpotqa"]
    num = 128
    docs = [50, 100, 200]                  # a file for each length, with the same questions
    settings = { split = "dev" }

    read_recipe(Path("dev.toml"), changes=["seed=8"]).jobs(Path("out"), sources=["data/hotpotqa"])

      task x length ──▶ Job(out="out/hotpotqa-50-docs.jsonl"), Job(out="out/hotpotqa-100-docs.jsonl"), ...

A source is named once, for all tasks that read it: `hotpotqa-dev=PATH`, or just the path of a folder
that holds the files under their usual names. `memagent data sources` lists the names.
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from pydantic import Field, model_validator

from memagent.config import Settings, read_toml
from memagent.data.build import Job, Storing
from memagent.data.formats.files import FORMATS
from memagent.data.sources.catalogue import SOURCES, find_source
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


class DatasetRecipe(Settings):
    """Datasets that differ in task and length only."""

    tasks: list[str] = Field(min_length=1)
    """Names of tasks; there is a file for each."""
    num: int = Field(ge=1)
    """Examples in each file."""
    tokens: list[int] | None = None
    """Lengths in tokens; a file for each."""
    docs: list[int] | None = None
    """Lengths in documents, for tasks that have documents; a file for each."""
    settings: dict[str, Any] = Field(default_factory=dict)
    """Further settings of the tasks."""
    store: Storing | None = None
    """Whether texts are written (text), or what they are made again from (origin); auto decides."""
    file: str = "{task}-{length}.jsonl"
    """Name of each file; {task}, {length} and {seed} are filled in."""

    @model_validator(mode="after")
    def _can_be_built(self) -> Self:
        if self.tokens is not None and self.docs is not None:
            raise ValueError("give lengths as tokens or as docs, not both")
        if unknown := [task for task in self.tasks if task not in TASKS]:
            raise ValueError(f"there is no task {unknown[0]!r}; known: {', '.join(TASKS)}")
        if not self.file.endswith(tuple(FORMATS)):
            raise ValueError(f"file={self.file!r}: a dataset ends in {', '.join(FORMATS)}")
        return self

    @property
    def lengths(self) -> list[tuple[str, dict[str, int]]]:
        """The name of each length, and the setting that makes it."""
        if self.docs is not None:
            return [(f"{number}-docs", {"docs": number}) for number in self.docs]
        if self.tokens is not None:
            return [(f"{number}", {"tokens": number}) for number in self.tokens]
        return [("all", {})]


class Recipe(Settings):
    """Datasets to build together."""

    about: str = ""
    """What they are for."""
    seed: int = 0
    """Seed of every dataset that does not set its own."""
    tokenizer: str | None = None
    """Tokenizer that counts lengths, for every dataset that does not set its own."""
    store: Storing = "auto"
    """How texts are stored, for every dataset that does not say."""
    sources: dict[str, str] = Field(default_factory=dict)
    """Path of each source, by its name; published files that are not named are fetched."""
    datasets: list[DatasetRecipe] = Field(min_length=1)

    def jobs(self, folder: Path, *, sources: Sequence[str] = ()) -> list[Job]:
        """What there is to build, in `folder`; `sources` go before those of the recipe."""
        paths = {**self.sources, **named_sources(sources)}
        shared: dict[str, Any] = {"seed": self.seed}
        if self.tokenizer is not None:
            shared["tokenizer"] = self.tokenizer
        jobs = [
            Job(
                task=task,
                settings={**shared, **source_settings(task, paths), **dataset.settings, **length},
                num=dataset.num,
                out=folder / _file_name(dataset, task, name, self.seed),
                store=dataset.store or self.store,
            )
            for dataset in self.datasets
            for task in dataset.tasks
            for name, length in dataset.lengths
        ]
        names = [job.out for job in jobs]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ConfigError(f"two datasets would be called {twice.name}; give one a `file`")
        return jobs


def read_recipe(path: Path, *, changes: Sequence[str] = ()) -> Recipe:
    """A recipe from a TOML file; `changes` such as `datasets.0.num=16` are put into it."""
    values = read_toml(path, "recipe")
    for change in changes:
        values = changed(values, change)
    try:
        return Recipe.parse(values)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def changed(values: dict[str, Any], change: str) -> dict[str, Any]:
    """The values with `a.b.0.c=value` put in; the value is TOML, or else plain text."""
    name, mark, text = change.partition("=")
    if not mark or not name.strip():
        raise ConfigError(f"{change!r} is no change; write it as name=value")
    steps = name.strip().split(".")
    result: dict[str, Any] = _with(values, steps, _value(text), name)
    return result


def named_sources(given: Sequence[str]) -> dict[str, str]:
    """`name=path` for one source, a bare path for all; the later goes before the earlier."""
    paths: dict[str, str] = {}
    for one in given:
        name, mark, path = one.partition("=")
        if mark and "/" not in name:
            find_source(name)
            paths[name] = path
        elif Path(one).expanduser().is_dir():
            paths.update(_held_by(Path(one)))
        else:
            raise ConfigError(
                f"--source {one}: name a folder, or a file as name=path with one of "
                f"{', '.join(SOURCES)}"
            )
    return paths


def source_settings(task: str, paths: dict[str, str]) -> dict[str, str]:
    """The settings that name the files of a task's sources."""
    return {
        setting: paths[name] for name, setting in SOURCES_OF.get(task, {}).items() if name in paths
    }


def _held_by(folder: Path) -> dict[str, str]:
    """The sources that a folder holds, by the usual names of their files."""
    there = {
        name: str(folder / file)
        for name, source in SOURCES.items()
        for file in reversed(source.names)
        if (folder.expanduser() / file).is_file()
    }
    return there or {"essays": str(folder)}


def _file_name(dataset: DatasetRecipe, task: str, length: str, seed: int) -> str:
    seed = dataset.settings.get("seed", seed)
    try:
        return dataset.file.format(task=task.replace("/", "-"), length=length, seed=seed)
    except (KeyError, IndexError, ValueError):
        raise ConfigError(
            f"file={dataset.file!r}: only {{task}}, {{length}} and {{seed}} can be filled in"
        ) from None


def _with(values: Any, steps: list[str], value: Any, name: str) -> Any:
    """A copy of nested dicts and lists with one value changed."""
    if not steps:
        return value
    step, *rest = steps
    if isinstance(values, list):
        if not step.isdigit() or int(step) >= len(values):
            raise ConfigError(f"{name}: {step} is not one of the {len(values)} there, 0 the first")
        at = int(step)
        return [*values[:at], _with(values[at], rest, value, name), *values[at + 1 :]]
    if not isinstance(values, dict):
        raise ConfigError(f"{name}: there is nothing inside that {step} could name")
    return {**values, step: _with(values.get(step, {}), rest, value, name)}


def _value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]
