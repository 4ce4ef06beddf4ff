"""The runs on this machine: what each is, how far it came, and its removal.

    for run in stored_runs():
        print(run.name, run.kind, run.state, run.what)
    remove_run("20260301-093000-a1b2c3")

A run directory is data, and may be damaged: what cannot be read is said in `state`.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import Timeout

from memagent.errors import RunError
from memagent.files import reason_of, size_of
from memagent.jsonl import read_lines
from memagent.names import hint
from memagent.run_files import LOCK, FolderLock, each_line, open_reader
from memagent.runs import JOURNAL, MANIFEST, read_manifest, runs_folder

METRICS = "metrics.jsonl"
"""What training appends to."""
MAX_NAMED = 5
"""Runs that a message lists."""
TAIL_BYTES = 1 << 16
RECENT_SECONDS = 120.0
"""A run that grew within this time counts as being worked on, where its lock is not asked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredRun:
    """A run directory, as `memagent runs` shows it.

    Example: StoredRun(path=Path("..."), kind="ask", created="2026-03-01T09:30:00+01:00", num_bytes=5120,
    state="1 of 2 answered", is_complete=False, is_in_use=False, what="Who inherits the house? (novel.txt)")
    """

    path: Path
    kind: str
    """ask, eval or train; empty where the manifest cannot be read."""
    created: str
    num_bytes: int
    """Size of all files in the folder."""
    state: str
    """How far it came, or why that cannot be said."""
    is_complete: bool
    is_in_use: bool
    what: str
    """What it is about, in a few words."""
    num_done: int = 0
    """Answers, items or steps so far."""
    num_all: int | None = None
    """How many there will be; None where that is not known."""

    @property
    def name(self) -> str:
        """The folder's name."""
        return self.path.name

    @property
    def can_resume(self) -> bool:
        """Whether there is something left to do that no process does."""
        return bool(self.kind) and not self.is_complete and not self.is_in_use


def stored_runs(folder: Path | None = None) -> list[StoredRun]:
    """The runs in a folder, by default the user's state folder; the newest first."""
    folder = folder or runs_folder()
    try:
        paths = [path for path in folder.iterdir() if (path / MANIFEST).is_file()]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise RunError(f"cannot list {folder}: {reason_of(error)}") from None
    return sorted(map(describe_run, paths), key=lambda run: (run.created, run.name), reverse=True)


def find_run(name: str) -> Path:
    """The folder of a run: a path, or the name, or the beginning of the name, of one in the state folder."""
    folder = runs_folder()
    path = Path(name).expanduser()
    if (path / MANIFEST).is_file():
        return path
    here = sorted(each.parent.name for each in folder.glob(f"*/{MANIFEST}"))
    matching = [each for each in here if each == name] or [
        each for each in here if name and each.startswith(name)
    ]
    if len(matching) > 1:
        newest = ", ".join(matching[: -MAX_NAMED - 1 : -1])
        more = f" and {len(matching) - MAX_NAMED} more" if len(matching) > MAX_NAMED else ""
        raise RunError(f"several runs begin with {name!r}: {newest}{more}; give more of the name")
    if not matching and name and (path.exists() or "/" in name or os.sep in name):
        why = f"holds no run: there is no {MANIFEST} in it" if path.exists() else "does not exist"
        raise RunError(f"{path} {why}")
    if not matching:
        advice = hint(name, here, otherwise="see `memagent runs list`")
        raise RunError(f"there is no run {name!r} in {folder}; {advice}")
    return folder / matching[0]


def newest_run() -> Path:
    """The folder of the newest run in the state folder."""
    runs = stored_runs()
    if not runs:
        raise RunError(f"there are no runs in {runs_folder()}")
    return runs[0].path


def remove_run(path: Path) -> None:
    """Delete a run of the state folder. Raises RunError for other folders, and for a run in use."""
    if path.is_symlink() or path.resolve().parent != runs_folder().resolve():
        raise RunError(
            f"{path} is not in {runs_folder()}, where memagent keeps runs; it may hold other files, so "
            "delete the folder yourself"
        )
    if not (path / MANIFEST).is_file():
        raise RunError(f"{path} holds no run: there is no {MANIFEST} in it")
    try:
        with FolderLock(path):
            shutil.rmtree(path)
    except Timeout:
        raise RunError(f"{path} is in use by another memagent process") from None
    except OSError as error:
        raise RunError(f"cannot delete {path}: {reason_of(error)}") from None


def describe_run(path: Path, *, looks_only: bool = False) -> StoredRun:
    """What a run is and how far it came.

    To find out whether a run is in use its lock is taken for a moment. With `looks_only` it is not, so that
    looking again and again never keeps another process from opening the run: then `is_in_use` is whether
    the run grew a short while ago, and `num_bytes` is 0.
    """
    is_in_use = _has_grown_lately(path) if looks_only else _is_in_use(path)
    kind, created, what, state = "", "", "", "damaged"
    num_done, num_all = 0, None
    with suppress(RunError):
        manifest = read_manifest(path)
        kind, created = str(manifest.get("kind", "")), str(manifest.get("created", ""))
        what = _what(kind, manifest)
        num_done, num_all, unit = _progress(path, kind, manifest)
        state = f"{num_done:,} {unit}" if num_all is None else f"{num_done:,} of {num_all:,} {unit}"
    return StoredRun(
        path=path,
        kind=kind,
        created=created,
        num_bytes=0 if looks_only else size_of(path),
        state=f"in use, {state}" if is_in_use and not looks_only else state,
        is_complete=num_all is not None and num_done >= num_all,
        is_in_use=is_in_use,
        what=what,
        num_done=num_done,
        num_all=num_all,
    )


def _progress(path: Path, kind: str, manifest: Mapping[str, Any]) -> tuple[int, int | None, str]:
    """How many of how many are done, and of what; None where the number is not known."""
    if kind == "ask":
        return _num_answers(path / JOURNAL), _count(manifest.get("questions")), "answered"
    if kind == "train":
        return _last_step(path / METRICS), _count(_inside(manifest, "config", "steps")), "steps"
    unit = "items" if kind == "eval" else "lines"
    return _num_lines(path / JOURNAL), _count(manifest.get("num_items")), unit


def _what(kind: str, manifest: Mapping[str, Any]) -> str:
    if kind == "ask":
        questions = manifest.get("questions")
        first = str(questions[0]) if isinstance(questions, list) and questions else ""
        return f"{first} ({_inside(manifest, 'document', 'source')})"
    if kind == "train":
        about, source = _inside(manifest, "config", "about"), _inside(manifest, "config", "model")
        model = source.get("source") if isinstance(source, dict) else None
        return str(about or model or "")
    if kind == "eval":
        return str(manifest.get("suite") or ", ".join(_tasks(manifest.get("tasks"))))
    return ""


def _tasks(tasks: object) -> Iterator[str]:
    for each in tasks if isinstance(tasks, list) else []:
        for key in ("tasks", "files"):
            names = each.get(key) if isinstance(each, dict) else None
            yield from map(str, names if isinstance(names, list) else [])


def _inside(values: Mapping[str, Any], first: str, second: str) -> Any:
    inner = values.get(first)
    return inner.get(second) if isinstance(inner, dict) else None


def _count(value: object) -> int | None:
    if isinstance(value, list):
        return len(value)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _num_answers(path: Path) -> int:
    def is_answer(record: dict[str, Any]) -> bool:
        return bool(_inside(record, "step", "kind") == "answer")

    return _read(path, lambda: sum(is_answer(line.record) for line in read_lines(path)))


def _num_lines(path: Path) -> int:
    def count() -> int:
        with open_reader(path) as file:
            return sum(line.endswith(b"\n") for line in each_line(file, path))

    return _read(path, count)


def _last_step(path: Path) -> int:
    """The step of the last line that has one; only the end of the file is read."""

    def find() -> int:
        with open_reader(path) as file:
            file.seek(max(os.fstat(file.fileno()).st_size - TAIL_BYTES, 0))
            lines = file.read().split(b"\n")
        for line in reversed(lines):
            try:
                step = json.loads(line).get("step")
            except (ValueError, AttributeError):
                continue
            if isinstance(step, int):
                return step
        return 0

    return _read(path, find)


def _read(path: Path, count: Callable[[], int]) -> int:
    try:
        return count()
    except FileNotFoundError:
        return 0
    except OSError as error:
        raise RunError(f"cannot read {path}: {reason_of(error)}") from None


def _has_grown_lately(path: Path) -> bool:
    now = time.time()
    return any(
        now - file.stat().st_mtime < RECENT_SECONDS
        for file in (path / JOURNAL, path / METRICS)
        if file.is_file()
    )


def _is_in_use(path: Path) -> bool:
    if not (path / LOCK).exists():
        return False
    try:
        with FolderLock(path):
            return False
    except Timeout:
        return True
    except (OSError, RunError):
        return False
