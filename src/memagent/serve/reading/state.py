"""What the gateway keeps, in one folder: files that were sent, readings as run directories, and SQLite beside them.

    STATE/
      keys.json          hashes of keys, see `memagent serve keys`
      gateway.sqlite3    whose file, whose reading, what each key has used
      files/ID           the bytes of a file
      readings/ID/       a reading: run.json and steps.jsonl, as of `memagent ask`

A process at a time holds the folder. Everything of a holder is found only together with the holder's id.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import shutil
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeVar

from filelock import Timeout

from memagent.config import GatewayConfig
from memagent.errors import RunError
from memagent.files import make_folders, reason_of, write_atomically
from memagent.run_files import FolderLock, read_file
from memagent.runs import runs_folder
from memagent.types import Usage

T = TypeVar("T")
DATABASE = "gateway.sqlite3"
KEYS = "keys.json"
DAMAGED = "-damaged"
"""Ending of the folder of a reading that cannot be continued."""
SECONDS_PER_DAY = 86400.0
WRITERS = 16
"""Threads that put steps on disk."""
OPENERS = 4
"""Threads that read files of clients, which may take long and much memory."""
TABLES = """
CREATE TABLE IF NOT EXISTS files (
    id TEXT PRIMARY KEY, owner TEXT NOT NULL, name TEXT NOT NULL, purpose TEXT NOT NULL,
    num_bytes INTEGER NOT NULL, created REAL NOT NULL
);
CREATE INDEX IF NOT EXISTS files_of_owner ON files (owner, created);
CREATE TABLE IF NOT EXISTS readings (
    id TEXT PRIMARY KEY, owner TEXT NOT NULL, source TEXT NOT NULL, num_chars INTEGER NOT NULL,
    is_finished INTEGER NOT NULL, created REAL NOT NULL, updated REAL NOT NULL,
    series TEXT NOT NULL DEFAULT ''
);
CREATE INDEX IF NOT EXISTS readings_of_series ON readings (series, updated);
CREATE TABLE IF NOT EXISTS file_readings (
    file_id TEXT NOT NULL, reading_id TEXT NOT NULL, PRIMARY KEY (file_id, reading_id)
);
CREATE TABLE IF NOT EXISTS file_texts (
    file_id TEXT NOT NULL, owner TEXT NOT NULL, text TEXT NOT NULL, PRIMARY KEY (file_id, text)
);
CREATE TABLE IF NOT EXISTS used (
    owner TEXT PRIMARY KEY, calls INTEGER NOT NULL, prompt_tokens INTEGER NOT NULL,
    completion_tokens INTEGER NOT NULL, cost REAL NOT NULL
);
"""
_file_id = re.compile(r"file-[0-9a-f]{24}|\.file-[0-9a-f]{24}\..*\.part")
CHECKPOINT = "PRAGMA wal_checkpoint(RESTART)"
DELETED = "file_id NOT IN (SELECT id FROM files)"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFile:
    """A file that was sent."""

    id: str
    name: str
    purpose: str
    num_bytes: int
    created: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Used:
    """What the requests of a key have used."""

    usage: Usage
    cost: float


class GatewayState:
    """The folder, open. Methods block for the time of a write and may be called from any thread."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files = folder / "files"
        self.readings = folder / "readings"
        try:
            for each in (folder, self._files, self.readings):
                make_folders(each, mode=0o700)
            self._lock = FolderLock(folder)
        except Timeout:
            raise RunError(
                f"{folder} is in use by another gateway; name another `state_dir`"
            ) from None
        except OSError as error:
            raise RunError(f"cannot use {folder}: {reason_of(error)}") from None
        self._guard = threading.Lock()
        self.counting = ThreadPoolExecutor(1, "gateway-counting")
        """For what short requests write, so that they do not wait for readings."""
        self.preparing = ThreadPoolExecutor(1, "gateway-preparing")
        """For counting tokens of long requests: one thread leaves the event loop its share of the processor."""
        self.writing = ThreadPoolExecutor(WRITERS, "gateway-writing")
        """For steps of readings until they are on disk."""
        self.opening = ThreadPoolExecutor(OPENERS, "gateway-opening")
        """For files until they are read."""
        with _database_errors(folder):
            self._database = sqlite3.connect(
                folder / DATABASE, check_same_thread=False, isolation_level=None
            )
            self._database.execute("PRAGMA journal_mode=WAL")
            self._database.execute(
                "PRAGMA synchronous=FULL"
            )  # NORMAL: a power cut loses the last rows
            self._database.executescript(TABLES)
            self._remove_unlisted()
            self._database.execute(CHECKPOINT).fetchall()  # its tables have their room from now on

    def _remove_unlisted(self) -> None:
        """Delete what was left of files by a process that was killed while it added or deleted them.

        Nothing else that lies in the folder, which a user may have named by mistake.
        """
        listed = {row[0] for row in self._database.execute("SELECT id FROM files")}
        for path in self._files.iterdir():
            if _file_id.fullmatch(path.name) and path.name not in listed and path.is_file():
                path.unlink(missing_ok=True)
        gone = [(file_id,) for file_id in listed if not (self._files / file_id).exists()]
        self._database.executemany("DELETE FROM files WHERE id = ?", gone)

    # --- files ---------------------------------------------------------------------------------

    def add_file(
        self, owner: str, name: str, purpose: str, data: bytes, *, max_bytes: int
    ) -> StoredFile | None:
        """Keep a file; None where all files of the owner would have more bytes than that."""
        stored = StoredFile(
            id=f"file-{secrets.token_hex(12)}",
            name=name,
            purpose=purpose,
            num_bytes=len(data),
            created=time.time(),
        )
        with _database_errors(self.folder):
            write_atomically(self._files / stored.id, data)
            row = (stored.id, owner, name, purpose, len(data), stored.created)
            num_added = self._execute(
                "INSERT INTO files SELECT ?, ?, ?, ?, ?, ? WHERE "
                "(SELECT COALESCE(SUM(num_bytes), 0) FROM files WHERE owner = ?) <= ?",
                (*row, owner, max_bytes - len(data)),
            )
            if not num_added:
                (self._files / stored.id).unlink()
        return stored if num_added else None

    def file(self, owner: str, file_id: str) -> StoredFile | None:
        """A file of an owner by its id."""
        found = self._files_where("owner = ? AND id = ?", (owner, file_id))
        return found[0] if found else None

    def files_of(
        self, owner: str, *, after: str | None = None, limit: int = 10_000
    ) -> list[StoredFile]:
        """Files of an owner, the newest first; those that follow the one with id `after`."""
        last = self.file(owner, after) if after else None
        until = (last.created, last.id) if last else (time.time() + SECONDS_PER_DAY, "")
        return self._files_where(
            "owner = ? AND (created, id) < (?, ?) ORDER BY created DESC, id DESC LIMIT ?",
            (owner, *until, limit),
        )

    def file_path(self, stored: StoredFile) -> Path:
        """Where the contents of a file are."""
        return self._files / stored.id

    def file_bytes(self, stored: StoredFile) -> bytes:
        """The contents of a file."""
        with _database_errors(self.folder):
            return read_file(self.file_path(stored), max_bytes=stored.num_bytes)

    def remove_file(self, owner: str, file_id: str) -> bool:
        """Delete a file; whether there was one."""
        stored = self.file(owner, file_id)
        if stored is None:
            return False
        with _database_errors(self.folder):
            self.file_path(stored).unlink(
                missing_ok=True
            )  # first: a full disk has room for the other then
            self._execute("DELETE FROM files WHERE owner = ? AND id = ?", (owner, stored.id))
        return True

    def _files_where(self, condition: str, values: tuple[Any, ...]) -> list[StoredFile]:
        rows = self._rows(
            f"SELECT id, name, purpose, num_bytes, created FROM files WHERE {condition}", values
        )
        names = ("id", "name", "purpose", "num_bytes", "created")
        return [StoredFile(**dict(zip(names, row, strict=True))) for row in rows]

    # --- readings ------------------------------------------------------------------------------

    def begin_reading(
        self,
        owner: str,
        reading_id: str,
        source: str,
        num_chars: int,
        series: str,
        *,
        text: str = "",
        file_ids: Iterable[str] = (),
    ) -> Path:
        """Where a reading is kept; it counts as unfinished from now on. Those of one series differ in their text.

        `text` is the SHA-256 of the text, `file_ids` are the stored files in it or in the question.
        """
        now = time.time()
        for file_id in file_ids:
            self._execute(
                "INSERT OR IGNORE INTO file_readings VALUES (?, ?)", (file_id, reading_id)
            )
            self._execute(
                "INSERT OR IGNORE INTO file_texts VALUES (?, ?, ?)", (file_id, owner, text)
            )
        self._execute(
            "INSERT INTO readings VALUES (?, ?, ?, ?, 0, ?, ?, ?) ON CONFLICT (id) DO UPDATE SET "
            "is_finished = 0, updated = excluded.updated, series = excluded.series",
            (reading_id, owner, source, num_chars, now, now, series),
        )
        return self.readings / reading_id

    def earlier_readings(self, series: str, reading_id: str, limit: int) -> list[Path]:
        """Where other readings of a series are kept, the newest first."""
        rows = self._rows(
            "SELECT id FROM readings WHERE series = ? AND id != ? ORDER BY updated DESC LIMIT ?",
            (series, reading_id, limit),
        )
        return [self.readings / row[0] for row in rows]

    def end_reading(self, reading_id: str, *, is_finished: bool) -> None:
        """A reading has ended, or was interrupted."""
        self._execute(
            "UPDATE readings SET is_finished = ?, updated = ? WHERE id = ?",
            (int(is_finished), time.time(), reading_id),
        )

    def old_readings(self, *, keep_days: float) -> list[str]:
        """Readings without a step for so many days, by id."""
        before = time.time() - keep_days * SECONDS_PER_DAY
        return [
            row[0] for row in self._rows("SELECT id FROM readings WHERE updated < ?", (before,))
        ]

    def readings_of_deleted(self) -> list[str]:
        """Readings with a file that has been deleted, by id."""
        rows = self._rows(f"SELECT DISTINCT reading_id FROM file_readings WHERE {DELETED}", ())
        return [row[0] for row in rows]

    def texts_of_deleted(self) -> list[tuple[str, str]]:
        """Owner and SHA-256 of the texts that deleted files were in."""
        return self._rows(f"SELECT DISTINCT owner, text FROM file_texts WHERE {DELETED}", ())

    def drop_reading(self, reading_id: str) -> None:
        """Delete a reading; one whose folder cannot be deleted stays listed."""
        path = self.readings / reading_id
        for folder in (path, path.with_name(path.name + DAMAGED)):
            shutil.rmtree(folder, ignore_errors=True)
            if folder.exists():
                return
        self._execute("DELETE FROM file_readings WHERE reading_id = ?", (reading_id,))
        self._execute("DELETE FROM readings WHERE id = ?", (reading_id,))

    def forget_texts_of_deleted(self) -> None:
        """Forget in which texts deleted files were, but for files of which there still is a reading."""
        is_read = "file_id IN (SELECT file_id FROM file_readings)"
        self._execute(f"DELETE FROM file_texts WHERE {DELETED} AND NOT {is_read}", ())

    # --- what keys have used -------------------------------------------------------------------

    def add_used(self, owner: str, usage: Usage, cost: float) -> None:
        """Count what a call used."""
        self._execute(
            "INSERT INTO used VALUES (?, ?, ?, ?, ?) ON CONFLICT (owner) DO UPDATE SET "
            "calls = calls + excluded.calls, prompt_tokens = prompt_tokens + excluded.prompt_tokens, "
            "completion_tokens = completion_tokens + excluded.completion_tokens, "
            "cost = cost + excluded.cost",
            (owner, usage.calls, usage.prompt_tokens, usage.completion_tokens, cost),
        )

    def used(self, owner: str) -> Used:
        """What the requests of an owner have used so far."""
        rows = self._rows(
            "SELECT calls, prompt_tokens, completion_tokens, cost FROM used WHERE owner = ?",
            (owner,),
        )
        calls, prompt_tokens, completion_tokens, cost = rows[0] if rows else (0, 0, 0, 0.0)
        usage = Usage(calls=calls, prompt_tokens=prompt_tokens, completion_tokens=completion_tokens)
        return Used(usage=usage, cost=cost)

    # --- the database --------------------------------------------------------------------------

    def _execute(self, statement: str, values: tuple[Any, ...]) -> int:
        """The number of rows that were changed."""
        with _database_errors(self.folder), self._guard:
            try:
                return self._database.execute(statement, values).rowcount
            except sqlite3.OperationalError:  # a full disk: the log has room after a checkpoint
                self._database.execute(CHECKPOINT).fetchall()
                return self._database.execute(statement, values).rowcount

    def _rows(self, statement: str, values: tuple[Any, ...]) -> list[Any]:
        with _database_errors(self.folder), self._guard:
            return self._database.execute(statement, values).fetchall()

    def close(self) -> None:
        """Release the folder."""
        for pool in (self.counting, self.preparing, self.writing, self.opening):
            pool.shutdown()
        with self._guard:
            self._database.close()
        self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


async def in_thread(pool: Executor, function: Callable[..., T], *arguments: Any) -> T:
    """Run a function in a thread of a pool. When cancelled, wait until it ends."""
    work = asyncio.get_running_loop().run_in_executor(pool, partial(function, *arguments))
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        await asyncio.wait([work])
        raise


@contextmanager
def _database_errors(folder: Path) -> Iterator[None]:
    try:
        yield
    except (sqlite3.Error, OSError) as error:
        reason = reason_of(error) if isinstance(error, OSError) else str(error)
        raise RunError(f"the state of the gateway in {folder} cannot be used: {reason}") from None


def state_folder(config: GatewayConfig) -> Path:
    """The folder that is named, else the one in the user's state folder."""
    named = config.state_dir
    return Path(named).expanduser() if named else runs_folder().with_name("gateway")


def keys_file(config: GatewayConfig) -> Path:
    """The file of keys in the state folder."""
    return state_folder(config) / KEYS
