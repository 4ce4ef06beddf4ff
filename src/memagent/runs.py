"""Run directories: a manifest that says what is being done, and a journal of what is done.

    RUN/
      run.json       what this run is: inputs by fingerprint, settings, versions (written once)
      steps.jsonl    one JSON line per finished step, on disk before the next call leaves

Killing the process loses at most the line being written. A torn last line is dropped when the run
is opened again; anything else that cannot be read is an error, never skipped. Lines carry a checksum. A
run directory may come from anybody: its manifest is checked before it is used.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any, Self, TypeVar

from filelock import Timeout
from platformdirs import user_state_path
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from memagent._version import __version__
from memagent.errors import RunError, RunNotWritable, one_line, plain
from memagent.files import make_folders, reason_of, write_atomically
from memagent.jsonl import LineFile, Shrink, read_lines, recover, truncate
from memagent.run_files import LOCK, MAX_BYTES, FolderLock, open_file, read_file
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


class LimitsShape(ManifestShape):
    """Limits and prices as manifests store them."""

    model_config = ConfigDict(extra="forbid")

    max_calls: int | None = Field(default=None, ge=1)
    max_cost: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    price_in: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    price_out: float | None = Field(default=None, ge=0, allow_inf_nan=False)


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


def check_manifest(
    manifest: dict[str, Any], shape: type[ManifestShape], path: Path
) -> dict[str, Any]:
    """The manifest of the run at `path`. Raises RunError where it has not the shape."""
    parse_manifest(manifest, shape, path)
    return manifest


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
