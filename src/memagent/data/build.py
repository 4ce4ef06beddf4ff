"""Build a dataset: examples of a task in the order of their index, made by several processes.

    job ──▶ index 0, 1, 2, ... ──▶ processes ──▶ in order ──▶ OUT.part      one line per example
                                                         └──▶ OUT.journal   one line per line
            when all are there:  OUT.part ──▶ OUT, OUT.manifest.json, OUT.depth.svg

    manifest = build(Job(task="hotpotqa", settings={"docs": 200, ...}, num=128, out=Path("dev.jsonl")))

A build that is killed goes on where it stopped when the same command is given again. However many
processes there are, and however often it was stopped, the file has the same bytes. Every format is
collected as JSONL first; `.jsonl.gz` and `.parquet` are written from that at the end.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import threading
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from multiprocessing import connection, get_context, parent_process
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple, Self

from filelock import FileLock, Timeout

from memagent._version import __version__
from memagent.data.example import Example
from memagent.data.formats.files import FORMATS, ExampleWriter, from_json, to_json
from memagent.data.manifest import (
    Manifest,
    Row,
    answer_counts,
    depths_of,
    draw_depths,
    figure_path,
    lengths_of,
    manifest_path,
    read_manifest,
    row_of,
    write_manifest,
)
from memagent.data.tasks.registry import Task, open_task
from memagent.errors import ConfigError, DataError

Storing = Literal["auto", "text", "origin"]
MAX_STORED_TOKENS = 65_536
"""With `auto`, longer texts are not written; they are made again from their origin."""
IN_FLIGHT = 4
"""Examples per process that are being made or wait to be written."""
DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One dataset to build."""

    task: str
    settings: dict[str, Any]
    num: int
    """Examples, from index 0 on."""
    out: Path
    store: Storing = "auto"
    """Whether texts are written, or only what they are made again from; auto: up to 64K tokens."""


class Made(NamedTuple):
    """An example as it is written."""

    line: bytes
    row: Row


class Progress(NamedTuple):
    """How far a build has come."""

    num_done: int
    num_total: int
    num_resumed: int
    """Examples that were there when it began."""


Watcher = Callable[[Progress], None]


def build(
    job: Job,
    *,
    processes: int = 1,
    force: bool = False,
    figure: bool = True,
    watch: Watcher | None = None,
) -> Manifest:
    """Build a dataset, or go on with it; what it is. `force` replaces one that is there."""
    _check(job, processes)
    if not force:
        refuse_to_overwrite(job.out)
    task = open_task(job.task, job.settings)
    if task.num_available is not None and job.num > task.num_available:
        raise DataError(
            f"{job.task} has {task.num_available} different examples here, fewer than num={job.num}; "
            "lower num"
        )
    identity = identity_of(job, task)
    with _told_when_full(job.out), _locked(job.out), _Partial(job.out) as partial:
        partial.resume(identity, force=force)
        num_resumed = len(partial.rows)
        _tell(watch, partial, job, num_resumed)
        for made in _stream(job, task, range(num_resumed, job.num), processes):
            partial.append(made)
            _tell(watch, partial, job, num_resumed)
        manifest = _finished(job, task, identity, partial, figure=figure)
    return manifest


def is_built(job: Job) -> bool:
    """Whether this very dataset is there already, by its manifest."""
    manifest = read_manifest(job.out) if job.out.exists() else None
    if manifest is None:
        return False
    identity = identity_of(job, open_task(job.task, job.settings))
    known = {**manifest, "num": manifest["num_examples"]}
    return all(known.get(name) == value for name, value in identity.items())


def identity_of(job: Job, task: Task) -> dict[str, Any]:
    """All that decides what is in the file."""
    first = task.example(0)
    return {
        "memagent": __version__,
        "task": job.task,
        "settings": task.settings.model_dump(mode="json"),
        "num": job.num,
        "store": job.store,
        "sources": dict(sorted(first.origin.sources.items())) if first.origin else {},
    }


def refuse_to_overwrite(out: Path) -> None:
    """An error if the dataset is there."""
    if out.exists():
        raise DataError(f"{out} is there already; name another with --out, or replace it: --force")


def stored(example: Example, store: Storing) -> Example:
    """The example as it is written: with its documents, or with its origin only."""
    if store == "auto":
        store = "origin" if (example.num_tokens or 0) > MAX_STORED_TOKENS else "text"
    return replace(example, documents=None) if store == "origin" else example


def make(task: Task, index: int, store: Storing) -> Made:
    """The example of an index as it is written."""
    example = task.example(index)
    kept = stored(example, store)
    line = (to_json(kept) + "\n").encode()
    return Made(line, row_of(example, has_text=kept.documents is not None))


def _check(job: Job, processes: int) -> None:
    if job.num < 1:
        raise ConfigError(f"num={job.num}: a dataset has at least one example; raise num")
    if processes < 1:
        raise ConfigError(f"processes={processes}: at least one is needed")
    if not job.out.name.endswith(tuple(FORMATS)):
        raise DataError(f"{job.out}: a dataset ends in {', '.join(FORMATS)}; name it so with --out")
    if job.out.is_dir():
        raise DataError(f"{job.out} is a folder; name a file with --out")


def _tell(watch: Watcher | None, partial: _Partial, job: Job, num_resumed: int) -> None:
    if watch is not None:
        watch(Progress(len(partial.rows), job.num, num_resumed))


# --- processes ------------------------------------------------------------------------------------


def _stream(job: Job, task: Task, indices: range, processes: int) -> Iterator[Made]:
    """What is written, in the order of the indices."""
    processes = min(processes, len(indices))
    if processes <= 1:
        return (make(task, index, job.store) for index in indices)
    return _from_processes(job, indices, processes)


def _from_processes(job: Job, indices: range, processes: int) -> Iterator[Made]:
    pool = ProcessPoolExecutor(
        processes,
        mp_context=get_context("spawn"),  # the same everywhere, and safe beside threads
        initializer=_start_worker,
        initargs=(job.task, job.settings, job.store),
    )
    waiting: deque[Future[Made]] = deque()
    try:
        for index in indices:
            waiting.append(pool.submit(_make_in_worker, index))
            if len(waiting) >= processes * IN_FLIGHT:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool:
        raise DataError(
            "a process that made examples was ended from outside, perhaps for want of memory; give "
            "the command again with fewer --processes, and it goes on"
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


_worker: tuple[Task, Storing] | None = None


def _start_worker(task: str, settings: dict[str, Any], store: Storing) -> None:
    global _worker
    threading.Thread(target=end_with_parent, daemon=True).start()
    _worker = open_task(task, settings), store


def _make_in_worker(index: int) -> Made:
    assert _worker is not None, "the pool starts its workers with _start_worker"
    task, store = _worker
    return make(task, index, store)


def end_with_parent() -> None:
    """A parent that is killed cannot end its workers, and they would wait for work forever."""
    parent = parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    os._exit(1)


# --- what is done so far --------------------------------------------------------------------------


class _Partial:
    """The lines that are there, and a journal of where each ends and what the manifest needs of it."""

    def __init__(self, out: Path) -> None:
        self.path = out.with_name(f"{out.name}.part")
        self.journal_path = out.with_name(f"{out.name}.journal")
        self.rows: list[Row] = []
        self.sha256 = hashlib.sha256()
        self.num_bytes = 0
        self._num_journal_bytes = 0
        self._stack = ExitStack()
        self._data: BinaryIO | None = None
        self._journal: BinaryIO | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def resume(self, identity: dict[str, Any], *, force: bool) -> None:
        """Take over what is there of this very dataset, else begin."""
        head = (json.dumps({"identity": identity}, sort_keys=True) + "\n").encode()
        self._num_journal_bytes = self._take_over(head, force=force)
        self._data = self._stack.enter_context(self.path.open("ab"))
        self._journal = self._stack.enter_context(self.journal_path.open("ab"))
        self._data.truncate(self.num_bytes)
        self._journal.truncate(self._num_journal_bytes)
        if self._num_journal_bytes == 0:
            self._journal.write(head)
            self._journal.flush()
            self._num_journal_bytes = len(head)

    def append(self, made: Made) -> None:
        """Put an example on disk: all of it, or nothing."""
        assert self._data is not None
        assert self._journal is not None
        known = {"size": len(made.line), "crc": zlib.crc32(made.line), "row": asdict(made.row)}
        note = (json.dumps(known) + "\n").encode()
        try:
            self._data.write(made.line)
            self._data.flush()
            self._journal.write(note)
            self._journal.flush()
        except OSError:
            self._cut_back(self._data, self.path, self.num_bytes)
            self._cut_back(self._journal, self.journal_path, self._num_journal_bytes)
            raise
        self._num_journal_bytes += len(note)
        self._count(made.line, made.row)

    def remove(self) -> None:
        """Nothing is left of it."""
        self._stack.close()
        self.path.unlink(missing_ok=True)
        self.journal_path.unlink(missing_ok=True)

    def _take_over(self, head: bytes, *, force: bool) -> int:
        """Read what is there as far as it is whole; how much of the journal that is."""
        try:
            first, *notes = self.journal_path.read_bytes().splitlines(keepends=True)
        except (FileNotFoundError, ValueError):
            return 0
        if first != head:
            if not force and first.endswith(b"\n"):
                raise DataError(
                    f"{self.path} is of another build ({_difference(first, head)}); finish that one, "
                    "or give it up with --force"
                )
            return 0
        if not self.path.exists():
            return 0
        num_journal_bytes = len(first)
        with self.path.open("rb") as data:
            for note in notes:
                line = self._read_line(data, note)
                if line is None:
                    break
                self._count(*line)
                num_journal_bytes += len(note)
        return num_journal_bytes

    def _read_line(self, data: BinaryIO, note: bytes) -> Made | None:
        """The line that a note of the journal speaks of; None if it did not reach the disk whole."""
        try:
            known = json.loads(note)
        except ValueError:
            return None
        if not note.endswith(b"\n"):
            return None
        line = data.read(known["size"])
        if zlib.crc32(line) != known["crc"]:
            return None
        row = known["row"]
        return Made(line, Row(**{**row, "depths": tuple(row["depths"])}))

    def _count(self, line: bytes, row: Row) -> None:
        self.rows.append(row)
        self.sha256.update(line)
        self.num_bytes += len(line)

    def _cut_back(self, file: BinaryIO, path: Path, size: int) -> None:
        with suppress(OSError):  # what could not be flushed must not be tried again on closing
            file.close()
        with suppress(OSError):
            os.truncate(path, size)


def _difference(first: bytes, head: bytes) -> str:
    """The first thing in which two builds differ, for people."""
    try:
        there, asked = json.loads(first)["identity"], json.loads(head)["identity"]
    except (ValueError, KeyError):
        return "its journal is damaged"
    there, asked = ({**one.pop("settings"), **one} for one in (there, asked))
    for name, value in asked.items():
        if there.get(name) != value:
            return f"{name} is {there.get(name)} there and {value} here"
    return "its settings differ"


@contextmanager
def _locked(out: Path) -> Iterator[None]:
    out.parent.mkdir(parents=True, exist_ok=True)
    path = out.with_name(f".{out.name}.lock")
    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise DataError(f"{out} is being built by another process") from None
    try:
        yield
    finally:
        path.unlink(missing_ok=True)  # while it is held: the next one makes a new file
        lock.release()


@contextmanager
def _told_when_full(out: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        hint = "make room and give the command again; it goes on" if _is_full(error) else None
        reason = error.strerror or str(error)
        raise DataError(
            f"cannot write {out}: {reason.lower()}" + (f"; {hint}" if hint else "")
        ) from None


def _is_full(error: OSError) -> bool:
    return error.errno in DISK_FULL


# --- the end --------------------------------------------------------------------------------------


def _finished(
    job: Job, task: Task, identity: dict[str, Any], partial: _Partial, *, figure: bool
) -> Manifest:
    """Turn what was collected into the dataset, its manifest and its figure."""
    if job.out.name.endswith(".jsonl"):
        ready, sha256, num_bytes = partial.path, partial.sha256.hexdigest(), partial.num_bytes
    else:
        ready = _converted(partial.path, job.out)
        with ready.open("rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        num_bytes = ready.stat().st_size
    rows = partial.rows
    manifest = Manifest(
        file=job.out.name,
        sha256=sha256,
        num_bytes=num_bytes,
        task=job.task,
        settings=identity["settings"],
        store=job.store,
        sources=identity["sources"],
        num_examples=len(rows),
        num_with_text=sum(row.has_text for row in rows),
        num_answers=answer_counts(rows),
        tokens=lengths_of(rows),
        depth=depths_of(rows),
        about=getattr(task, "about", {}),
        memagent=__version__,
    )
    for old in (manifest_path(job.out), figure_path(job.out)):
        old.unlink(missing_ok=True)
    write_manifest(job.out, manifest)
    os.replace(ready, job.out)
    if figure and manifest.depth is not None:
        draw_depths(job.out, manifest.depth)
    partial.remove()
    return manifest


def _converted(lines: Path, out: Path) -> Path:
    """The lines in the format of `out`, under another name."""
    ready = out.with_name(f".ready-{out.name}")
    with lines.open("rb") as file, ExampleWriter(ready) as writer:
        for number, line in enumerate(file, start=1):
            writer.write(from_json(line, f"{lines}, line {number}"))
    return ready
