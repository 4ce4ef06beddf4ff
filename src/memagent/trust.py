"""What the user has named on this machine: addresses of endpoints, and code to run.

A run directory is data and may come from anybody. On resuming, an address or a code file that it names is
used only if the user named it before, in a run of their own, or names it again. The record is a file in
the user's state folder, outside every run.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

from platformdirs import user_state_path

from memagent.errors import RunError
from memagent.files import make_folders
from memagent.jsonl import LineFile, read_lines, recover

NamedKind = Literal["address", "code"]


def remember(kind: NamedKind, *values: str) -> None:
    """Record what the user named. A state folder that cannot be written is no error."""
    new = [value for value in dict.fromkeys(values) if not is_known(kind, value)]
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


def is_known(kind: NamedKind, value: str) -> bool:
    """Whether the user named this before."""
    path = _record()
    try:
        return any(line.record == {"kind": kind, "value": value} for line in read_lines(path))
    except (OSError, RunError):
        return False


def _record() -> Path:
    return user_state_path("memagent", appauthor=False) / "named.jsonl"
