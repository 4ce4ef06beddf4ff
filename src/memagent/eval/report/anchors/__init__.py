"""Anchors: published results that reports show next to measured ones, always marked as published.

    lines = read_anchors("paper")                     # the figures of arXiv 2507.02259
    lines = read_anchors("my_lab.json")               # a file like those in this folder
    [line.label for line in lines if line.task == "hotpotqa"]

A file holds the figures and where they were published:

    {"about": "...", "citation": "arXiv 2507.02259", "unit": "percent", "num": 128, "note": "...",
     "lines": [{"task": "hotpotqa", "label": "RL-MemAgent-14B (v1)", "where": "v1, Table 2",
                "lengths": [7168, 14336], "values": [83.59, 82.03]}]}

A `task` is the name of a task here, or `GROUP/average` for the average of a group of tasks.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, model_validator

from memagent.config import FileRecord
from memagent.errors import ConfigError

SHIPPED: dict[str, tuple[str, ...]] = {"paper": ("paper_hqa.json", "paper_ruler.json")}
"""Anchors that come with the package: name to files of this folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Anchor:
    """One published line: a model or method on a task, over lengths.

    Example: Anchor(task="hotpotqa", label="RL-MemAgent-14B (v1)", points=((7168, 0.8359),), ...)
    """

    task: str
    label: str
    points: tuple[tuple[int, float], ...]
    """Length in tokens and score from 0 to 1, by length."""
    citation: str
    where: str
    """Table or figure of the publication."""
    num: int | None
    """Items per point; None when unknown."""
    note: str
    """How the figures were obtained, where that differs from a report's own."""
    is_read_off_a_plot: bool
    """True for figures that were published only as a plot."""

    def at(self, tokens: float) -> float | None:
        """The score at a length, or at one that differs by a few percent; None without such."""
        length, score = min(self.points, key=lambda point: abs(point[0] - tokens))
        return score if abs(length - tokens) <= SAME_LENGTH * length else None


SAME_LENGTH = 0.05
"""Lengths that differ by at most this share count as equal: tokenizers differ by more."""


class AnchorLine(FileRecord):
    """A line of an anchor file."""

    task: str
    """Name of the task in memagent."""
    label: str = Field(min_length=1)
    """What was measured."""
    where: str = ""
    """Table or figure."""
    lengths: list[int] = Field(min_length=1)
    """Lengths in tokens."""
    values: list[float]
    """One figure for each length."""
    is_read_off_a_plot: bool = False
    """True for figures that were published only as a plot."""


class AnchorFile(FileRecord):
    """A file of anchors."""

    about: str = ""
    """What the figures are of."""
    citation: str = Field(min_length=1)
    """Who published them, and where."""
    unit: Literal["percent", "share"] = "percent"
    """Whether a perfect score is written as 100 or as 1."""
    num: int | None = Field(default=None, gt=0)
    """Items per point."""
    note: str = ""
    """How the figures were obtained, where that differs from a report's own."""
    lines: list[AnchorLine]
    """One for each thing that was measured."""

    @model_validator(mode="after")
    def _has_a_value_in_range_for_each_length(self) -> Self:
        most = 100.0 if self.unit == "percent" else 1.0
        for line in self.lines:
            if len(line.lengths) != len(line.values):
                raise ValueError(
                    f"{line.label} has {len(line.lengths)} lengths and {len(line.values)} values; "
                    "give one value for each length"
                )
            for value in line.values:
                if not 0.0 <= value <= most:
                    raise ValueError(
                        f"{line.label} has the value {value:g}; "
                        f"in {self.unit} it lies between 0 and {most:g}"
                    )
        return self


def read_anchors(name: str) -> tuple[Anchor, ...]:
    """Anchors by the name they are shipped under, or from a JSON file."""
    if name in SHIPPED:
        folder = files("memagent.eval.report.anchors")
        texts = {file: (folder / file).read_text(encoding="utf-8") for file in SHIPPED[name]}
    else:
        try:
            texts = {name: Path(name).read_text(encoding="utf-8")}
        except FileNotFoundError:
            known = ", ".join(SHIPPED)
            raise ConfigError(f"there is no file of anchors {name}; shipped: {known}") from None
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read the anchors of {name}: {error}") from None
    return tuple(anchor for file, text in texts.items() for anchor in _parsed(text, file))


def _parsed(text: str, name: str) -> list[Anchor]:
    try:
        values = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{name} is not JSON: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{name} is not a file of anchors: it holds no JSON object")
    try:
        file = AnchorFile.parse(values)
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from None
    scale = 100.0 if file.unit == "percent" else 1.0
    return [
        Anchor(
            task=line.task,
            label=line.label,
            points=tuple(
                sorted(
                    (n, value / scale) for n, value in zip(line.lengths, line.values, strict=True)
                )
            ),
            citation=file.citation,
            where=line.where,
            num=file.num,
            note=file.note,
            is_read_off_a_plot=line.is_read_off_a_plot,
        )
        for line in file.lines
    ]
