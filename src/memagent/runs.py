"""Run directories: a manifest that says what is being done, and a journal of what is done.

    RUN/
      run.json       what this run is: inputs by fingerprint, settings, versions (written once)
      steps.jsonl    one JSON line per finished step, on disk before the next call leaves

Killing the process loses at most the line being written. A torn last line is dropped when the run
is opened again; anything else that cannot be read is an error, never skipped.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any, Self

from filelock import FileLock, Timeout
from platformdirs import user_state_path

from memagent._version import __version__
from memagent.errors import RunError

FORMAT = 1
MANIFEST = "run.json"
JOURNAL = "steps.jsonl"
LOCK = ".lock"

Keep = Callable[[dict[str, Any]], dict[str, Any]]

_sync_data = getattr(os, "fdatasync", os.fsync)  # macOS has no fdatasync


class Run:
    """An open run directory. Only one process at a time can hold it."""

    def __init__(
        self, path: Path, manifest: dict[str, Any], lock: FileLock, records: list[dict[str, Any]]
    ) -> None:
        self.path = path
        self.manifest = manifest
        self.records = records
        """What was journalled before this run was opened."""
        self._lock = lock
        self._journal: int | None = None
        self._created: tuple[str, ...] = ()
        """Files that this process put there, other than the journal."""

    @classmethod
    def create(
        cls,
        path: Path | None,
        manifest: Mapping[str, Any],
        *,
        files: Mapping[str, bytes] | None = None,
    ) -> Self:
        """A new run directory at `path`, or under the user's state folder when it is None.

        `files` are kept beside the manifest; they are on disk before it is.
        """
        path = path or default_path()
        if (path / MANIFEST).exists():
            raise RunError(
                f"{path} already holds a run; continue it with --resume, or name another"
            )
        if path.exists() and not path.is_dir():
            raise RunError(f"{path} is a file; name a folder for the run")
        if (path / JOURNAL).exists():
            raise RunError(
                f"{path} holds steps of a run whose {MANIFEST} is gone; name another folder"
            )
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = _locked(path)
            header = {"format": FORMAT, "memagent": __version__, "created": _now()}
            contents = {**header, **manifest}
            for name, data in (files or {}).items():
                write_atomically(path / name, data)
            text = json.dumps(contents, indent=2, ensure_ascii=False) + "\n"
            write_atomically(path / MANIFEST, text.encode("utf-8", "backslashreplace"))
        except OSError as error:
            raise RunError(f"cannot write the run to {path}: {reason_of(error)}") from None
        run = cls(path, contents, lock, [])
        run._created = (MANIFEST, LOCK, *(files or ()))
        return run

    @classmethod
    def open(cls, path: Path, *, keep: Keep | None = None) -> Self:
        """An existing run, to go on with. `keep` makes each record smaller before it is held."""
        manifest = read_manifest(path)
        lock = _locked(path)
        try:
            return cls(path, manifest, lock, _repaired_records(path / JOURNAL, keep))
        except OSError as error:
            lock.release()
            raise RunError(f"cannot read {path / JOURNAL}: {reason_of(error)}") from None
        except BaseException:
            lock.release()
            raise

    def append(self, line: bytes) -> None:
        """Put one JSON line on disk. Returns when it is safe from a crash or power loss."""
        try:
            if self._journal is None:
                flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
                self._journal = os.open(self.path / JOURNAL, flags, 0o600)
                sync_folder(self.path)
            write_line(self._journal, line)
        except OSError as error:
            raise RunError(
                f"cannot write to {self.path / JOURNAL}: {reason_of(error)}; "
                "what was written before is kept"
            ) from None

    def discard_if_empty(self) -> bool:
        """Remove the run if it is new and nothing was journalled in it; whether that was so."""
        if self._journal is not None or not self._created:
            return False
        self.close()
        for name in self._created:
            (self.path / name).unlink(missing_ok=True)
        with suppress(OSError):  # the user may have named a folder that holds other files
            self.path.rmdir()
        return True

    def close(self) -> None:
        """Close the journal and let others open the run."""
        if self._journal is not None:
            os.close(self._journal)
            self._journal = None
        self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def read_manifest(path: Path) -> dict[str, Any]:
    """What a run is, checked. Does not lock the run."""
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RunError(f"{path} holds no run: there is no {MANIFEST} in it") from None
    except NotADirectoryError:
        raise RunError(f"{path} is not a run directory") from None
    except (OSError, ValueError) as error:
        raise RunError(f"cannot read {path / MANIFEST}: {error}") from None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise RunError(f"{path / MANIFEST} has a format this version of memagent does not know")
    return manifest


def default_path() -> Path:
    """A new folder under the user's state folder: sortable by time, never the same twice."""
    name = f"{datetime.now():%Y%m%d-%H%M%S}-{secrets.token_hex(3)}"
    return user_state_path("memagent", appauthor=False) / "runs" / name


def read_records(path: Path) -> list[dict[str, Any]]:
    """What a run's journal holds, for looking only: a torn last line is passed over."""
    journal = path / JOURNAL
    return parse_lines(journal)[0] if journal.exists() else []


def _repaired_records(journal: Path, keep: Keep | None) -> list[dict[str, Any]]:
    """What the journal holds; a torn last line is removed from the file."""
    if not journal.exists():
        return []
    records, num_good_bytes = parse_lines(journal, keep)
    if num_good_bytes < journal.stat().st_size:
        os.truncate(journal, num_good_bytes)
    return records


def parse_lines(path: Path, keep: Keep | None = None) -> tuple[list[dict[str, Any]], int]:
    """The records of a file of JSON lines, and how many bytes of it they cover.

    A torn last line is left out. Any other damage is a RunError.
    """
    records: list[dict[str, Any]] = []
    num_good_bytes = 0
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.endswith(b"\n"):
                break
            try:
                record = json.loads(line)
            except ValueError:
                if not lines.read(1):  # the last line
                    break
                raise RunError(f"{path}, line {number}, is damaged; the run cannot go on") from None
            records.append(keep(record) if keep else record)
            num_good_bytes += len(line)
    return records, num_good_bytes


def _locked(path: Path) -> FileLock:
    lock = FileLock(path / LOCK, mode=0o600)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise RunError(f"{path} is in use by another memagent process") from None
    except OSError as error:
        raise RunError(f"cannot lock {path}: {reason_of(error)}") from None
    return lock


def write_atomically(path: Path, data: bytes) -> None:
    """Put a file on disk: all of it, or what was there before."""
    temporary = path.with_suffix(".tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        _write_all(descriptor, data)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    temporary.replace(path)
    sync_folder(path.parent)


def write_line(descriptor: int, line: bytes) -> None:
    """Put a line on disk: all of it, or, if the disk is full, nothing of it."""
    size = os.fstat(descriptor).st_size
    try:
        _write_all(descriptor, line + b"\n")
        _sync_data(descriptor)
    except OSError:
        os.ftruncate(descriptor, size)
        raise


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def sync_folder(path: Path) -> None:
    """Put the names in a folder on disk: files that were made, renamed or removed in it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def reason_of(error: OSError) -> str:
    """What the system says is wrong, in a few words."""
    reason = error.strerror or str(error)
    if error.errno == errno.EMFILE:
        return f"{reason}; read fewer texts at once, or raise the limit with `ulimit -n`"
    return reason


def _now() -> str:
    return datetime.now().astimezone().isoformat(timespec="seconds")
