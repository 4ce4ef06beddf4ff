"""Suites: what an evaluation asks, in a TOML file.

    # dev.toml
    num = 128
    [agent]
    temperature = 0.7                      # settings of every method
    [[methods]]
    name = "reader"
    [[methods]]
    name = "direct"
    settings = { window = 32768 }
    [[tasks]]
    tasks = ["ruler/niah_multikey_2", "ruler/vt"]
    tokens = ["8k", "32k"]

    suite = read_suite(Path("dev.toml"), changes=["num=16"])

Unknown names are errors with the nearest known one; `--set tasks.0.num=16` changes anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from pydantic import Field, model_validator

from memagent.config import Settings, read_toml, with_override
from memagent.data.choices import ExampleChoice
from memagent.errors import ConfigError
from memagent.rewards.verifiers import open_grader

DEFAULT_NUM = 100


class MethodChoice(Settings):
    """One method, and how it is called in tables."""

    name: str
    """reader, reader:PROMPTS, direct, yarn, bm25, refine, map_reduce, or FILE.py:FUNCTION."""
    label: str | None = None
    """Name in records and tables; the method's own when not given."""
    settings: dict[str, Any] = Field(default_factory=dict)
    """Settings of this method; they count more than those in [agent]."""
    engine_settings: dict[str, Any] = Field(default_factory=dict)
    """Settings of an engine of its own, beyond those of the suite."""

    @property
    def title(self) -> str:
        """Name in records and tables."""
        return self.label or self.name


class TaskChoice(ExampleChoice):
    """Tasks, or files of examples, that are asked alike."""

    num: int | None = Field(default=None, ge=1)
    """Examples of each task and length; of each file, at most."""
    grader: str | None = None
    """Grader in place of the one that each example names."""


class Suite(Settings):
    """What an evaluation asks: which questions, by which methods, how often, graded how."""

    about: str = ""
    """What it is for."""
    engine: str | None = None
    """Engine as KIND:MODEL, unless the command line names another."""
    engine_settings: dict[str, Any] = Field(default_factory=dict)
    """Settings of the engine."""
    tokenizer: str | None = None
    """Tokenizer of the model; its own when not given."""
    length_tokenizer: str | None = None
    """Tokenizer that counts the lengths of texts that are made; the model's when not given."""
    num: int = Field(default=DEFAULT_NUM, ge=1)
    """Examples of each task and length, where a task does not say."""
    seed: int = 0
    """Every example and every sample depends on it."""
    grader: str | None = None
    """Grader in place of the one that each example names."""
    agent: dict[str, Any] = Field(default_factory=dict)
    """Settings of every method: window, chunk_tokens, temperature, and so on."""
    methods: list[MethodChoice] = Field(default_factory=lambda: [MethodChoice(name="reader")])
    tasks: list[TaskChoice] = Field(min_length=1)
    sources: dict[str, str] = Field(default_factory=dict)
    """Path of each source, by its name; published files that are not named are fetched."""

    @model_validator(mode="after")
    def _is_clear(self) -> Self:
        titles = [method.title for method in self.methods]
        if not titles:
            raise ValueError("name at least one method")
        if twice := next((title for title in titles if titles.count(title) > 1), None):
            raise ValueError(f"two methods are called {twice}; give one a label")
        for grader in [self.grader, *(task.grader for task in self.tasks)]:
            if grader is not None:
                try:
                    open_grader(grader)
                except ConfigError as error:
                    raise ValueError(str(error)) from None
        return self


def read_suite(path: Path, *, changes: Sequence[str] = ()) -> Suite:
    """A suite from a TOML file; `changes` such as `tasks.0.num=16` are put into it."""
    values = read_toml(path, "suite")
    try:
        return parse_suite(values, changes=changes)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def parse_suite(values: dict[str, Any], *, changes: Sequence[str] = ()) -> Suite:
    """A suite from a table, checked."""
    for change in changes:
        values = with_override(values, change)
    return Suite.parse(values)
