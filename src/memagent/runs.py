"""Run directories: a manifest that says what is being done, and a journal of what is done.

    RUN/
      run.json       what this run is: inputs by fingerprint, settings, versions (written once)
      steps.jsonl    one JSON line per finished step, on disk before the next call leaves

Killing the process loses at most the line being written. A torn last line is dropped when the run
is opened again; anything else that cannot be read is an error, never skipped. Lines carry a checksum. A
run directory may come from anybody: its manifest is checked before it is used.

    for run in stored_runs():                # those on this machine
        print(run.name, run.kind, run.state, run.what)
    remove_run("20260301-093000-a1b2c3")
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Self, TypeVar

from filelock import Timeout
from platformdirs import user_state_path
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from memagent._version import __version__
from memagent.errors import RunError, RunNotWritable, one_line, plain
from memagent.files import make_folders, reason_of, size_of, write_atomically
from memagent.names import hint
from memagent.run_files import (
    LOCK,
    MAX_BYTES,
    FolderLock,
    LineFile,
    Shrink,
    each_line,
    open_file,
    open_reader,
    read_file,
    read_lines,
    recover,
    truncate,
)
from memagent.types import Usage

FORMAT = 1
MANIFEST = "run.json"
JOURNAL = "steps.jsonl"


class Run:
    """An open run directory. Only one process at a time can hold it."""

    def __init__(
        self,
        path: Path,
        manifest: dict[str, Any],
        lock: FolderLock,
        records: list[dict[str, Any]],
        *,
        is_derived: bool = False,
    ) -> None:
        self.path = path
        self.manifest = manifest
        self.records = records
        """What was journalled before this run was opened."""
        self._lock = lock
        self._is_derived = is_derived
        self._journal: LineFile | None = None
        self._created: frozenset[str] = frozenset()
        """Files that were written with a new run."""
        self._present: frozenset[str] = frozenset()
        """What was in the folder before a new run."""

    @classmethod
    def create(
        cls,
        path: Path | None,
        manifest: Mapping[str, Any],
        *,
        files: Mapping[str, bytes] | None = None,
        is_derived: bool = False,
    ) -> Self:
        """A new run directory at `path`, or under the user's state folder when it is None.

        `files` are kept beside the manifest; they are on disk before it is. `is_derived`: see `open`.
        """
        path = path or default_path()
        if os.path.lexists(path / MANIFEST):
            raise RunError(f"{path} already holds a run; resume it, or name another folder")
        if path.exists() and not path.is_dir():
            raise RunError(f"{path} is a file; name a folder for the run")
        if os.path.lexists(path / JOURNAL):
            raise RunError(
                f"{path} holds steps of a run whose {MANIFEST} is gone; name another folder"
            )
        header = {
            "format": FORMAT,
            "memagent": __version__,
            "created": datetime.now().astimezone().isoformat(timespec="seconds"),
        }
        contents = {**header, **manifest}
        text = json.dumps(contents, indent=2, ensure_ascii=False) + "\n"
        if len(data := text.encode("utf-8", "backslashreplace")) > MAX_BYTES:
            raise RunError(
                f"what is asked takes {len(data):,} bytes in {MANIFEST}, more than {MAX_BYTES:,}; ask "
                "less in one run"
            )
        lock = None
        try:
            make_folders(path, mode=0o700)
            present = frozenset(os.listdir(path))
            lock = _locked(path)
            for name, kept in (files or {}).items():
                write_atomically(path / name, kept)
            write_atomically(path / MANIFEST, data)
        except OSError as error:
            if lock is not None:
                lock.release()
            reason = reason_of(error)
            raise RunNotWritable(f"cannot write the run to {path}: {reason}") from None
        run = cls(path, contents, lock, [], is_derived=is_derived)
        run._created = frozenset((MANIFEST, LOCK, *(files or ())))
        run._present = present
        return run

    @classmethod
    def open(cls, path: Path, *, shrink: Shrink | None = None, is_derived: bool = False) -> Self:
        """An existing run, to resume. `shrink` makes each record smaller before it is held.

        `is_derived`: the journal follows from other files of the run; the first line replaces it, and it is safe after `sync`.
        """
        manifest = read_manifest(path)
        lock = _locked(path)
        try:
            if is_derived and os.path.lexists(path / JOURNAL):
                os.close(open_file(path / JOURNAL, os.O_WRONLY))  # refused before a call is made
            records = [] if is_derived else recover(path / JOURNAL, shrink)
            return cls(path, manifest, lock, records, is_derived=is_derived)
        except OSError as error:
            lock.release()
            raise RunNotWritable(f"cannot read {path / JOURNAL}: {reason_of(error)}") from None
        except BaseException:
            lock.release()
            raise

    def append(self, line: bytes) -> None:
        """Put one JSON line on disk. Returns when it is safe from a crash, and from power loss unless derived."""
        with self._writing():
            if self._journal is None:
                path = self.path / JOURNAL
                if self._is_derived and os.path.lexists(path):
                    truncate(path, 0)
                self._journal = LineFile(path, sync=not self._is_derived, checksums=True)
            self._journal.append(line)

    def sync(self) -> None:
        """Return when all lines are safe from power loss."""
        with self._writing():
            if self._journal is not None:
                self._journal.sync()

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise RunNotWritable(
                f"cannot write to {self.path / JOURNAL}: {reason_of(error)}; "
                "what was written before is kept"
            ) from None

    def discard_if_empty(self) -> bool:
        """Remove the run if it is new and nothing was written to it since; whether that was so.

        Other files that were in the folder before stay.
        """
        if not self._created or not self._lock.is_at(self.path):
            return False
        if set(os.listdir(self.path)) - self._created - self._present:
            return False
        self.close()
        with suppress(OSError):  # what cannot be removed is a run without a step
            for name in self._created:
                (self.path / name).unlink(missing_ok=True)
            self.path.rmdir()
        self._created = frozenset()
        return True

    def check_kept(self) -> None:
        """Raise RunNotWritable where what was written is no longer at the run's path."""
        if not self._lock.is_at(self.path):
            raise RunNotWritable(
                f"{self.path} was deleted or replaced while it was written to: nothing of this run is kept"
            )

    def close(self) -> None:
        """Close the journal and let others open the run."""
        if self._journal is not None:
            self._journal.close()
            self._journal = None
        self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def read_manifest(path: Path) -> dict[str, Any]:
    """What a run is, checked. Does not lock the run."""
    try:
        manifest = json.loads(read_file(path / MANIFEST).decode("utf-8"))
    except FileNotFoundError:
        raise RunError(f"{path} holds no run: there is no {MANIFEST} in it") from None
    except NotADirectoryError:
        raise RunError(f"{path} is not a run directory") from None
    except OSError as error:
        raise RunNotWritable(f"cannot read {path / MANIFEST}: {reason_of(error)}") from None
    except (ValueError, RecursionError) as error:
        raise RunError(f"cannot read {path / MANIFEST}: {one_line(error)}") from None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise RunError(f"{path / MANIFEST} has a format this version of memagent does not know")
    return manifest


class ManifestShape(BaseModel):
    """What a command needs of a manifest: fields with their types; others are left as they are."""

    model_config = ConfigDict(extra="ignore", strict=True)


Shape = TypeVar("Shape", bound=ManifestShape)


class _UsageShape(ManifestShape):
    model_config = ConfigDict(extra="forbid")

    calls: int = Field(default=0, ge=0)
    prompt_tokens: int = Field(default=0, ge=0)
    completion_tokens: int = Field(default=0, ge=0)
    cached_tokens: int = Field(default=0, ge=0)
    is_estimated: bool = False


def stored_usage(values: Any) -> Usage:
    """The usage in a line of a run. Raises ValueError for what no call can have used."""
    return Usage(**_UsageShape.model_validate(values).model_dump())


def parse_manifest(manifest: Mapping[str, Any], shape: type[Shape], path: Path) -> Shape:
    """The manifest of the run at `path` as a record. Raises RunError where it is damaged."""
    try:
        return shape.model_validate(manifest)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        raise RunError(f"{path / MANIFEST} is damaged: {plain(place)}: {first['msg']}") from None


def default_path() -> Path:
    """A new folder under the user's state folder: sortable by time, never the same twice."""
    name = f"{datetime.now():%Y%m%d-%H%M%S}-{secrets.token_hex(3)}"
    return runs_folder() / name


def runs_folder() -> Path:
    """Where runs are kept whose folder is not named."""
    return user_state_path("memagent", appauthor=False) / "runs"


def read_records(path: Path) -> list[dict[str, Any]]:
    """What a run's journal holds, for looking only: a torn last line is passed over."""
    journal = path / JOURNAL
    return [line.record for line in read_lines(journal)] if journal.exists() else []


def _locked(path: Path) -> FolderLock:
    try:
        return FolderLock(path)
    except Timeout:
        raise RunNotWritable(f"{path} is in use by another memagent process") from None
    except OSError as error:
        raise RunNotWritable(f"cannot lock {path}: {reason_of(error)}") from None


# --- the runs on this machine ---------------------------------------------------------------------

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
        """Whether it can be resumed: unfinished, and no process has it open."""
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
    units = {"ask": "answered", "train": "steps", "eval": "items"}
    totals = {"ask": manifest.get("questions"), "train": _inside(manifest, "config", "steps")}
    file = path / (METRICS if kind == "train" else JOURNAL)
    try:
        num_done = _num_done(file, kind)
    except FileNotFoundError:
        num_done = 0
    except OSError as error:
        raise RunError(f"cannot read {file}: {reason_of(error)}") from None
    total = totals.get(kind, manifest.get("num_items"))
    return num_done, _count(total), units.get(kind, "lines")


def _num_done(file: Path, kind: str) -> int:
    """Answers, items or steps in a file of a run."""
    if kind == "ask":
        return sum(_inside(line.record, "step", "kind") == "answer" for line in read_lines(file))
    with open_reader(file) as lines:
        if kind != "train":
            return sum(line.endswith(b"\n") for line in each_line(lines, file))
        # the last line that has a step; only the end of the file is read
        lines.seek(max(os.fstat(lines.fileno()).st_size - TAIL_BYTES, 0))
        for line in reversed(lines.read().split(b"\n")):
            with suppress(ValueError, AttributeError):
                if isinstance(step := json.loads(line).get("step"), int):
                    return step
    return 0


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
        tasks = manifest.get("tasks")
        named = (
            [each for each in tasks if isinstance(each, dict)] if isinstance(tasks, list) else []
        )
        lists = [each.get(key) for each in named for key in ("tasks", "files")]
        names = [str(name) for one in lists if isinstance(one, list) for name in one]
        return str(manifest.get("suite") or ", ".join(names))
    return ""


def _inside(values: Mapping[str, Any], first: str, second: str) -> Any:
    inner = values.get(first)
    return inner.get(second) if isinstance(inner, dict) else None


def _count(value: object) -> int | None:
    if isinstance(value, list):
        return len(value)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


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
