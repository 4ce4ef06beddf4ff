"""Pools of worker processes that end with the program, even when it is killed.

    with ProcessPool(4, initializer=start, initargs=(settings,)) as pool:
        pool.submit(work, item)

    submit ──▶ thread ──pipe──▶ worker      one thread and one pipe for each worker

Workers share no lock and no pipe, so that one that is killed, at whatever moment, takes nothing with it: its thread
sees the end of the pipe, and starts another one. They are spawned: a fork of a process with threads (an engine's,
torch's) can hang. Ctrl-C is left to the program, which decides what becomes of the work.
"""

from __future__ import annotations

import os
import pickle
import signal
import threading
import traceback
import weakref
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import suppress
from multiprocessing import connection, get_context, parent_process
from multiprocessing.context import SpawnProcess
from typing import Any, NamedTuple, Protocol, TypeVar

from memagent.errors import ConfigError, EngineError

T = TypeVar("T")

MAX_WORKERS = 1024


class WorkerDied(EngineError):
    """The process that ran a function ended before the function did."""


class OpenPool(Protocol):
    """Opens a pool of workers: processes of this machine (`ProcessPool`), or those of a cluster."""

    def __call__(
        self,
        num_workers: int,
        *,
        initializer: Callable[..., None] | None = None,
        initargs: tuple[Any, ...] = (),
    ) -> Executor:
        """A pool whose workers call `initializer(*initargs)` first."""
        ...


class _Worker(NamedTuple):
    process: SpawnProcess
    pipe: connection.Connection

    def end(self) -> None:
        """End the process, whatever it is doing: a function that hangs would keep the program from ending."""
        self.process.kill()
        self.process.join()


class _Outcome(NamedTuple):
    value: Any = None
    error: Exception | None = None
    lines: str = ""
    """The traceback of the error, which does not travel with it."""


class ProcessPool(Executor):
    """Runs functions in processes of this machine, which start when they are needed."""

    def __init__(
        self,
        num_workers: int,
        *,
        initializer: Callable[..., None] | None = None,
        initargs: tuple[Any, ...] = (),
        max_attempts: int = 2,
    ) -> None:
        """Workers call `initializer(*initargs)` first. A function whose worker dies is run again by a new one, up to
        `max_attempts` times in all; then it raises WorkerDied.
        """
        if num_workers > MAX_WORKERS:
            raise ConfigError(f"`processes={num_workers}` is too many; give at most {MAX_WORKERS}")
        self._begin = (initializer, initargs)
        self._max_attempts = max_attempts
        self._threads = ThreadPoolExecutor(num_workers, thread_name_prefix="memagent-worker")
        self._workers: dict[int, _Worker] = {}
        """By the thread that waits for it."""
        self._starting = threading.Lock()
        self._is_ended = False
        weakref.finalize(self, _end, self._workers)  # also when the program ends

    def submit(  # type: ignore[override]  # as of any Executor, without its keywords
        self, function: Callable[..., T], /, *arguments: Any
    ) -> Future[T]:
        """What the function returns or raises in its worker."""
        return self._threads.submit(self._run, function, arguments)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the workers when all is done; with `cancel_futures` at once, whatever they are doing."""
        self._threads.shutdown(wait and not cancel_futures, cancel_futures=cancel_futures)
        with self._starting:
            self._is_ended = True
        _end(self._workers)
        self._threads.shutdown(wait)

    def _run(self, function: Callable[..., T], arguments: tuple[Any, ...]) -> T:
        work = pickle.dumps((function, arguments))
        thread = threading.get_ident()
        for _ in range(self._max_attempts):
            try:
                worker = self._living(thread) or self._start(thread)
                worker.pipe.send_bytes(work)
                received = worker.pipe.recv_bytes()
            except (EOFError, OSError):  # it has ended, or cannot be started
                self._remove(thread)
                continue
            outcome: _Outcome = pickle.loads(received)
            if outcome.error is not None:
                raise outcome.error from _InWorker(outcome.lines)
            value: T = outcome.value
            return value
        raise WorkerDied(
            "a worker process died, perhaps because memory ran out; free some, or use fewer processes"
        )

    def _living(self, thread: int) -> _Worker | None:
        """The worker of a thread; none if it died before it had work, which is no fault of the work."""
        worker = self._workers.get(thread)
        if worker is not None and worker.process.is_alive():
            return worker
        self._remove(thread)
        return None

    def _remove(self, thread: int) -> None:
        if died := self._workers.pop(thread, None):
            died.end()

    def _start(self, thread: int) -> _Worker:
        context = get_context("spawn")
        with self._starting:
            if self._is_ended:
                raise WorkerDied("the pool of processes was closed")
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, *self._begin))
            process.start()
            theirs.close()  # so that the pipe ends with the worker
            worker = self._workers[thread] = _Worker(process, ours)
        return worker


class _InWorker(Exception):
    """The traceback of an error in a worker, as text."""


def _end(workers: dict[int, _Worker]) -> None:
    for worker in list(workers.values()):
        worker.end()


def _serve(
    pipe: connection.Connection, initializer: Callable[..., None] | None, initargs: tuple[Any, ...]
) -> None:
    """The life of a worker: what fails is an answer too."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    begin = _outcome_of(initializer, initargs) if initializer is not None else _Outcome()
    with suppress(EOFError, OSError):  # the pool was closed
        while True:
            work = pipe.recv_bytes()
            outcome = begin if begin.error is not None else _outcome_of(_run_pickled, (work,))
            try:
                answer = pickle.dumps(outcome)
            except Exception as error:  # pickle raises errors of many types
                answer = pickle.dumps(_Outcome(error=TypeError(f"not sent from a worker: {error}")))
            pipe.send_bytes(answer)


def _run_pickled(work: bytes) -> Any:
    function, arguments = pickle.loads(work)
    return function(*arguments)


def _outcome_of(function: Callable[..., Any], arguments: tuple[Any, ...]) -> _Outcome:
    try:
        return _Outcome(value=function(*arguments))
    except Exception as error:
        return _Outcome(error=error, lines="".join(traceback.format_exception(error)))


def _end_with_parent() -> None:
    """A parent that is killed cannot end its workers, and they would go on with what they compute."""
    parent = parent_process()
    assert parent is not None, "a worker is started by a program"
    connection.wait([parent.sentinel])
    os._exit(1)
