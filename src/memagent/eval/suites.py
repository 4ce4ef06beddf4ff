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

    suite = read_suite("dev.toml", changes=["num=16"])

Unknown names are errors with the nearest known one. A change such as `tasks.0.num=16` sets any value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from memagent.config import MOST, Settings, find_config, read_toml
from memagent.data.choices import SOURCE_SETTINGS, ExampleChoice
from memagent.errors import ConfigError
from memagent.names import absolute_path
from memagent.plugins import is_file_spec
from memagent.rewards.verifiers import open_grader
from memagent.trust import paths_in

DEFAULT_NUM = 100
HOTPOTQA = "hotpotqa"
CLOSED_BOOK = "closed_book"
"""The method that is not shown the text."""
KNOWN_BY = ("strict", "contains")
"""Graders by which a model knows an answer: it is boxed, or stated."""
PATH_KEYS = frozenset({"prompts", "embedder", "tokenizer", "files", "file", "sources"})
"""Keys of a suite that may name a file; methods are named by `name`."""

ReplyLimit = Literal["graded", "generated", "off"]


class MethodChoice(Settings):
    """One method, and its name in tables."""

    name: str
    """reader, reader:PROMPTS, direct, yarn, bm25, dense, refine, map_reduce, closed_book, or FILE.py:FUNCTION."""
    label: str | None = None
    """Name in records and tables; `name` when not given."""
    settings: dict[str, Any] = Field(default_factory=dict)
    """Settings of this method; they override those in [agent]."""
    engine_settings: dict[str, Any] = Field(default_factory=dict)
    """Engine settings of this method; they override those of the suite and open a separate engine."""

    @property
    def title(self) -> str:
        """Name in records and tables."""
        return self.label or self.name


class SuiteTasks(ExampleChoice):
    """Tasks, or files of examples, with the same settings."""

    num: int | None = Field(default=None, ge=1, le=MOST)
    """Examples of each task and length; for files, the most examples of each file."""
    grader: str | None = None
    """Overrides the grader that each example names."""
    max_answer_tokens: int | None = Field(default=None, ge=1)
    """Tokens that an answer may have; for RULER's tasks those of RULER when not given."""


class QuestionSelection(Settings):
    """The questions of hotpotqa: those of a file, or the first that no engine answers without the text."""

    file: str | None = None
    """Dataset with the questions, in their order: one that was filtered, or a file of the original project."""
    engines: list[str] = Field(default_factory=list)
    """Without a file: engines as KIND:MODEL that are asked without the text, one after the other."""
    candidates: int = Field(default=400, ge=1, le=MOST)
    """Questions that they are asked, in the order of their file."""
    graders: list[str] = Field(default=list(KNOWN_BY), min_length=1)
    """A question is left out if one of these graders takes a reply for right."""

    @model_validator(mode="after")
    def _has_a_way(self) -> Self:
        if self.file is None and not self.engines:
            raise ValueError("name a `file` of questions, or `engines` that select them")
        return self


class Suite(Settings):
    """What an evaluation asks: which questions, by which methods, how many, and how they are graded."""

    engine: str | None = None
    """Engine as KIND:MODEL, unless another is named when the suite is run."""
    engine_settings: dict[str, Any] = Field(default_factory=dict)
    """Settings of the engine."""
    tokenizer: str | None = None
    """Tokenizer of the model; its own when not given."""
    length_tokenizer: str | None = None
    """Tokenizer that counts the lengths of generated texts; the model's when not given."""
    num: int = Field(default=DEFAULT_NUM, ge=1, le=MOST)
    """Examples of each task and length, where a task sets no `num`."""
    samples: int = Field(default=1, ge=1, le=MOST)
    """Answers to each question by each method; scores are averaged over them first."""
    seed: int = 0
    """Every example and every sample depends on it."""
    grader: str | None = None
    """Overrides the grader that each example names."""
    reply_limit: ReplyLimit = "graded"
    """What a task's limit on answers applies to: the part of a reply that is graded (graded), all tokens
    that are generated for the answer, reasoning included, as RULER does (generated), or nothing (off)."""
    graders: list[str] = Field(default_factory=list)
    """Further graders; their scores are recorded and shown beside."""
    agent: dict[str, Any] = Field(default_factory=dict)
    """Settings of every method: window, chunk_tokens, temperature, and so on."""
    methods: list[MethodChoice] = Field(default_factory=lambda: [MethodChoice(name="reader")])
    tasks: list[SuiteTasks] = Field(min_length=1)
    selection: QuestionSelection | None = None
    """Which questions of hotpotqa are asked; the first `num` in an order by seed when not given."""
    sources: dict[str, str] = Field(default_factory=dict)
    """Path of each source, by its name; published sources that are not named are downloaded."""

    @model_validator(mode="after")
    def _is_clear(self) -> Self:
        titles = [method.title for method in self.methods]
        if not titles:
            raise ValueError("name at least one method")
        if twice := next((title for title in titles if titles.count(title) > 1), None):
            raise ValueError(f"two methods are called {twice}; give one a `label`")
        if self.selection and any(
            len(task.tasks) > 1 and HOTPOTQA in task.tasks for task in self.tasks
        ):
            raise ValueError(f"`selection` is for {HOTPOTQA}; put other tasks into their own entry")
        for grader in [self.grader, *self.graders, *(task.grader for task in self.tasks)]:
            if grader is not None:
                try:
                    open_grader(grader)
                except ConfigError as error:
                    raise ValueError(str(error)) from None
        return self


def read_suite(name: Path | str, *, changes: Sequence[str] = ()) -> Suite:
    """A suite from a TOML file, or a shipped one by its name, such as `smoke`.

    `changes` such as `tasks.0.num=16` are applied. Files that it names are looked for beside it, then in
    the current folder.
    """
    path = find_config("eval", name)

    def beside(name: str) -> str:
        near = path.parent / name
        return str(near.resolve()) if near.exists() else name

    values = _with_paths(read_toml(path, "suite"), beside)
    try:
        return Suite.parse(values, changes=changes)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def with_absolute_paths(suite: Suite) -> Suite:
    """The suite with every path made absolute, so that it can be resumed from any folder."""
    values = suite.model_dump()
    for method, choice in zip(values["methods"], suite.methods, strict=True):
        method["label"] = choice.title
    return Suite.parse(_with_paths(values, absolute_path))


def _with_paths(values: Any, change: Callable[[str], str], key: str = "") -> Any:
    """The values of a suite, those that may name files changed."""
    if isinstance(values, dict):
        is_sources = key == "sources"
        return {n: _with_paths(v, change, key if is_sources else n) for n, v in values.items()}
    if isinstance(values, list):
        return [_with_paths(value, change, key) for value in values]
    if key == "name" and isinstance(values, str) and is_file_spec(values):
        file, colon, function = values.partition(":")
        return f"{change(file)}{colon}{function}"
    return change(values) if key in PATH_KEYS and isinstance(values, str) else values


def paths_of(suite: Suite) -> Iterator[tuple[str, str]]:
    """The settings of a suite that name files and folders, and the paths of these."""
    keys = PATH_KEYS | SOURCE_SETTINGS | {"selection", "length_tokenizer"}
    return paths_in(
        suite.model_dump(mode="json"), lambda name: not keys.isdisjoint(name.split("."))
    )
