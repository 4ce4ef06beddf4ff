"""Recipes: which datasets to build, in a TOML file, and the jobs they expand to.

# dev.toml
seed = 7
[[datasets]]
tasks = ["hotpotqa"]
num = 128
docs = [50, 100, 200]                  # a file for each length, with the same questions
settings = { split = "dev" }

read_recipe(Path("dev.toml"), changes=["seed=8"]).jobs(Path("out"), sources=["data/hotpotqa"])

  task x length ──▶ BuildJob(out="out/hotpotqa-50-docs.jsonl"), BuildJob(out="out/hotpotqa-100-docs.jsonl"), ...
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from pydantic import Field, model_validator

from memagent.config import Settings, read_toml, with_override
from memagent.data.build import BuildJob, Storing
from memagent.data.choices import TaskChoice, named_sources, source_settings
from memagent.data.formats.files import FORMATS
from memagent.errors import ConfigError


class DatasetRecipe(TaskChoice):
    """Datasets that differ in task and length only; there is a file for each."""

    tasks: list[str] = Field(min_length=1)
    """Names of tasks."""
    num: int = Field(ge=1)
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

    about: str = ""
    """What they are for."""
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


def read_recipe(path: Path, *, changes: Sequence[str] = ()) -> Recipe:
    """A recipe from a TOML file; `changes` such as `datasets.0.num=16` are applied to it."""
    values = read_toml(path, "recipe")
    for change in changes:
        values = with_override(values, change)
    try:
        return Recipe.parse(values)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def _file_name(dataset: DatasetRecipe, task: str, length: str, seed: int) -> str:
    seed = dataset.settings.get("seed", seed)
    try:
        return dataset.file.format(task=task.replace("/", "-"), length=length, seed=seed)
    except (KeyError, IndexError, ValueError):
        raise ConfigError(
            f"file={dataset.file!r}: only {{task}}, {{length}} and {{seed}} can be filled in"
        ) from None
