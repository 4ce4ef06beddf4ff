"""What the user has named on this machine: addresses of endpoints, code to run, and files to read.

A run directory is data and may come from anybody. On resuming, an address, code or a file that it names is
used only if the user named it before, in a run of their own, or names it again. The record is a file in
the user's state folder, outside every run.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

from platformdirs import user_state_path

from memagent.errors import ConfigError, RunError
from memagent.files import make_folders
from memagent.run_files import LineFile, read_lines, recover

NamedKind = Literal["address", "code", "file"]


def remember(kind: NamedKind, *values: str) -> None:
    """Record what the user named. A state folder that cannot be written is no error."""
    known = _named(kind)
    new = [value for value in dict.fromkeys(values) if value not in known]
    if not new:
        return
    path = _record()
    try:
        make_folders(path.parent)
        recover(path)
        with LineFile(path) as lines:
            lines.append(*(json.dumps({"kind": kind, "value": value}).encode() for value in new))
    except (OSError, RunError):
        return


def is_known(kind: NamedKind, *values: str) -> bool:
    """Whether the user named all of these before."""
    return _named(kind).issuperset(values)


def require(kind: NamedKind, *values: str, what: str, may: str, again: str) -> None:
    """Raise ConfigError for what a run directory names, unless the user named all of it before."""
    if not is_known(kind, *values):
        raise ConfigError(
            f"the run directory names {what}, which you have not named on this machine; if {may}, give it "
            f"again: `{again}`"
        )


def require_files(paths: Iterator[tuple[str, str]]) -> None:
    """`require` for files by the settings that name them."""
    for setting, path in paths:
        may = "it may be read for this run"
        require("file", path, what=f"the file {path}", may=may, again=f"{setting}={path}")


def paths_in(
    values: Any, is_path: Callable[[str], bool], setting: str = ""
) -> Iterator[tuple[str, str]]:
    """The files and folders that are there among the settings for which `is_path`, each as `a.b.0` and its path."""
    if isinstance(values, dict | list):
        for key, value in values.items() if isinstance(values, dict) else enumerate(values):
            yield from paths_in(value, is_path, f"{setting}.{key}".lstrip("."))
    elif (
        isinstance(values, str) and is_path(setting) and os.path.exists(os.path.expanduser(values))
    ):
        yield setting, os.path.abspath(os.path.expanduser(values))


def _named(kind: NamedKind) -> set[str]:
    try:
        records = [line.record for line in read_lines(_record())]
    except (OSError, RunError):
        return set()
    return {str(record.get("value")) for record in records if record.get("kind") == kind}


def _record() -> Path:
    return user_state_path("memagent", appauthor=False) / "named.jsonl"
