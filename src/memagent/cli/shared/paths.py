"""Paths on the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click


class PathType(click.Path):
    """A path, which is not empty: `--run-dir "$RUN"` without the variable would mean the current folder."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(path_type=Path, **attributes)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The path. An empty one is an error."""
        if value == "":
            self.fail("the path is empty; name one, or leave it out", param, ctx)
        return super().convert(value, param, ctx)
