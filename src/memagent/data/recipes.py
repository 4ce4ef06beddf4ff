"""Recipes: which datasets to build, in a TOML file, and the jobs they expand to.

    # dev.toml
    seed = 7
    [[datasets]]
    tasks = ["hotpotqa"]
    num = 128
    docs = [50, 100, 200]                  # a file for each length, with the same questions
    settings = { split = "dev" }

    read_recipe("dev.toml", changes=["seed=8"]).jobs(Path("out"), sources=["data/hotpotqa"])

      task x length ──▶ BuildJob(out="out/hotpotqa-50-docs.jsonl"), BuildJob(out="out/hotpotqa-100-docs.jsonl"), ...

`build_datasets` builds a recipe, or one task:

    recipe = BuildRequest(what="dev.toml", out=Path("out"))
    task = BuildRequest(what="ruler/vt", tokens=4096, num=4, out=Path("vt.jsonl"))
    for job, manifest in build_datasets(recipe): ...
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Self

from pydantic import Field, model_validator

from memagent.config import LONGEST, Settings, config_names, find_config, with_override
from memagent.data.build import BuildJob, BuildProgress, Storing, build, is_built
from memagent.data.choices import TaskSelection, named_sources, source_settings
from memagent.data.formats.files import FORMATS
from memagent.data.inspection import Manifest
from memagent.data.tasks.registry import TASKS
from memagent.errors import ConfigError
from memagent.names import hint_in_folders
from memagent.processes import OpenPool


class DatasetRecipe(TaskSelection):
    """Datasets that differ in task and length only; there is a file for each."""

    tasks: list[str] = Field(min_length=1)
    """Names of tasks."""
    num: int = Field(ge=1, le=LONGEST)
    """Examples in each file."""
    store: Storing | None = None
    """Whether texts are written (text), or only their origin (origin); auto decides by length."""
    file: str = "{task}-{length}.jsonl"
    """Name of each file; {task}, {length} and {seed} are filled in."""

    @model_validator(mode="after")
    def _can_be_written(self) -> Self:
        if not self.file.endswith(tuple(FORMATS)):
            raise ValueError(f"file={self.file!r}: a dataset ends in {', '.join(FORMATS)}")
        return self

    @property
    def lengths(self) -> list[tuple[str, dict[str, int]]]:
        """The name of each length, and the setting for it."""
        if self.docs is not None:
            return [(f"{number}-docs", {"docs": number}) for number in self.docs]
        if self.tokens is not None:
            return [(f"{number}", {"tokens": number}) for number in self.tokens]
        return [("all", {})]


class Recipe(Settings):
    """Datasets to build together."""

    seed: int = 0
    """Seed of every dataset that does not set its own."""
    tokenizer: str | None = None
    """Tokenizer that counts lengths, for every dataset that does not set its own."""
    store: Storing = "auto"
    """How texts are stored, for every dataset that does not set it."""
    sources: dict[str, str] = Field(default_factory=dict)
    """Path of each source, by its name; published files without a path are fetched."""
    datasets: list[DatasetRecipe] = Field(min_length=1)

    def jobs(self, folder: Path, *, sources: Sequence[str] = ()) -> list[BuildJob]:
        """The datasets to build in `folder`; `sources` take precedence over those of the recipe."""
        paths = {**self.sources, **named_sources(sources)}
        shared: dict[str, Any] = {"seed": self.seed}
        if self.tokenizer is not None:
            shared["tokenizer"] = self.tokenizer
        jobs = [
            BuildJob(
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


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildRequest:
    """What to build: a recipe, or one task."""

    what: str
    """Path of a recipe (.toml), name of a shipped one, or name of a task."""
    out: Path | None = None
    """Folder for the files of a recipe, by default the current one; file for a task."""
    num: int | None = None
    """Examples in each file; required for a task."""
    tokens: int | None = None
    """Length of the texts in tokens; for a task only."""
    docs: int | None = None
    """Length of the texts in documents; for a task only."""
    split: str | None = None
    """Questions to train on (train) or to evaluate with (dev); for a task only."""
    seed: int | None = None
    tokenizer: str | None = None
    store: Storing | None = None
    sources: Sequence[str] = ()
    """As `named_sources` takes them."""
    changes: Sequence[str] = ()
    """Further settings of the task, or of the recipe, as NAME=VALUE."""

    @property
    def is_recipe(self) -> bool:
        return self.what.endswith(".toml") or self.what in config_names("data")

    def jobs(self) -> list[BuildJob]:
        """The datasets to build."""
        return self._recipe_jobs() if self.is_recipe else [self._task_job()]

    def _recipe_jobs(self) -> list[BuildJob]:
        for name in ("tokens", "docs", "split"):
            if getattr(self, name) is not None:
                raise ConfigError(f"`{name}` is for a single task; change a recipe with `changes`")
        values = {"seed": self.seed, "tokenizer": self.tokenizer, "store": self.store}
        changes = [f"{name}={value}" for name, value in values.items() if value is not None]
        recipe = read_recipe(self.what, changes=[*changes, *self.changes])
        jobs = recipe.jobs(self.out or Path(), sources=self.sources)
        return jobs if self.num is None else [replace(job, num=self.num) for job in jobs]

    def _task_job(self) -> BuildJob:
        if self.what not in TASKS and Path(self.what).exists():
            raise ConfigError(f"{self.what} is not a task; a recipe is a file that ends in .toml")
        if self.what not in TASKS:
            known = [*config_names("data"), *TASKS]
            advice = hint_in_folders(self.what, known)
            raise ConfigError(f"there is no task or recipe {self.what!r}; {advice}")
        if self.num is None:
            raise ConfigError("give `num`: how many examples to build")
        if self.out is None:
            raise ConfigError("give `out`: the file to write, such as dev.jsonl")
        settings: dict[str, Any] = source_settings(self.what, named_sources(self.sources))
        for name in ("docs", "tokens", "split", "seed", "tokenizer"):
            if (value := getattr(self, name)) is not None:
                settings[name] = value
        for change in self.changes:
            settings = with_override(settings, change)
        store = self.store or "auto"
        return BuildJob(task=self.what, settings=settings, num=self.num, out=self.out, store=store)


class BuiltDataset(NamedTuple):
    """A dataset that is complete."""

    job: BuildJob
    manifest: Manifest | None
    """None where it was complete before."""


def build_datasets(
    request: BuildRequest,
    *,
    processes: int | None = None,
    open_pool: OpenPool | None = None,
    force: bool = False,
    figure: bool = True,
    on_progress: Callable[[BuildJob, BuildProgress], None] | None = None,
) -> Iterator[BuiltDataset]:
    """Build the datasets of a request one after the other; each is yielded when it is complete.

    `processes` are by default as many as there are cores. A recipe skips datasets that are complete;
    `force` builds them again, and replaces other files. `open_pool` opens the workers, as for `build`.
    """
    for job in request.jobs():
        if request.is_recipe and not force and is_built(job):
            yield BuiltDataset(job, None)
            continue
        manifest = build(
            job,
            processes=os.cpu_count() or 1 if processes is None else processes,
            open_pool=open_pool,
            force=force,
            figure=figure,
            on_progress=partial(on_progress, job) if on_progress else None,
        )
        yield BuiltDataset(job, manifest)


def read_recipe(path: Path | str, *, changes: Sequence[str] = ()) -> Recipe:
    """A recipe from a TOML file, or a shipped one by its name, such as `smoke`.

    `changes` such as `datasets.0.num=16` are applied to it.
    """
    return Recipe.read(find_config("data", path), "recipe", changes=changes)


def _file_name(dataset: DatasetRecipe, task: str, length: str, seed: int) -> str:
    seed = dataset.settings.get("seed", seed)
    try:
        return dataset.file.format(task=task.replace("/", "-"), length=length, seed=seed)
    except (KeyError, IndexError, ValueError):
        raise ConfigError(
            f"file={dataset.file!r}: only {{task}}, {{length}} and {{seed}} can be filled in"
        ) from None
