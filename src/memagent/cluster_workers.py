"""Worker processes on all nodes of a cluster, as a pool: `submit` a function, get a future.

    with open_cluster("auto") as cluster:
        pool = ClusterExecutor(cluster, initializer=open_task, initargs=(name,))
        pool.submit(work, 7).result()
        pool.shutdown()

    submit ──▶ waiting ──▶ a thread of the driver ──▶ workers that are ready      died: a new one, and its jobs again
                                                      those without room get nothing to do until they have it

It stands where `memagent.processes.ProcessPool` stands on one machine: each worker calls the initializer first, and
starts when there is work for it. When no worker is ready for `wait_seconds` of the cluster, everything that waits fails
with ClusterError. Files that the functions read must be at the same place on all nodes.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from queue import Empty, SimpleQueue
from time import monotonic
from typing import Any, TypeVar

from memagent.cluster import Cluster, OnClusterNote, full_store_errors, node_ids, on_node
from memagent.errors import ClusterError, MemagentError, one_line

T = TypeVar("T")

MAX_ATTEMPTS = 4
"""Attempts per function when workers die, and starts per worker without a finished function between them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Failed:
    """Errors travel as values: Ray would wrap them in its own."""

    error: Exception


class _ClusterWorker:
    """One process on some node. It runs as a Ray actor."""

    def start(
        self, initializer: Callable[..., None] | None, initargs: tuple[Any, ...]
    ) -> _Failed | None:
        """Call the initializer."""
        return None if initializer is None else self.work(initializer, initargs)

    def work(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        """Call a function."""
        try:
            return function(*arguments)
        except Exception as error:
            return _Failed(error=error)


@dataclass(slots=True, eq=False)
class _Job:
    """A function that was submitted."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    result: Future[Any]
    num_deaths: int = 0
    """How many workers died while they computed it."""


@dataclass(slots=True, eq=False)
class _Worker:
    """A worker as the driver sees it."""

    actor: Any = None
    is_ready: bool = False
    num_starts: int = 0
    num_jobs: int = 0
    """So far."""
    jobs: list[_Job] = field(default_factory=list)
    """Those that it has now."""


class ClusterExecutor(Executor):
    """Workers spread over the nodes."""

    def __init__(
        self,
        cluster: Cluster,
        num_workers: int | None = None,
        *,
        initializer: Callable[..., None] | None = None,
        initargs: tuple[Any, ...] = (),
        num_cpus: float = 1,
        max_jobs: int = 2,
        on_note: OnClusterNote = lambda text: None,
    ) -> None:
        """By default there are as many workers as the cluster has CPUs.

        Each reserves `num_cpus`, and has `max_jobs` functions at once: one that it computes, and the next one.
        `on_note` gets a line for each worker that dies, in a thread of the pool.
        """
        self.num_workers = num_workers or max(1, int(cluster.total("CPU")))
        self._cluster = cluster
        self._begin = (initializer, initargs)
        self._num_cpus = num_cpus
        self._max_jobs = max_jobs
        self._on_note = on_note
        self._workers = [_Worker() for _ in range(self.num_workers)]
        self._waiting: deque[_Job] = deque()
        self._failure: Exception | None = None
        """Why nothing is computed any more."""
        self._ready_at = monotonic()
        """When a worker was ready last, or the first one began to start."""
        self._events: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        # one thread has all of the state; callbacks of Ray must not call it
        self._thread = threading.Thread(target=self._serve, name="memagent-cluster", daemon=True)
        self._thread.start()

    def submit(  # type: ignore[override]  # as of any Executor, without its keywords
        self, function: Callable[..., T], /, *arguments: Any
    ) -> Future[T]:
        """The result of a function, computed by the least busy worker."""
        result: Future[T] = Future()
        job = _Job(function, arguments, result)
        self._events.put(partial(self._waiting.append, job))
        return result

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the workers, whatever they are computing."""
        self._events.put(None)
        self._thread.join()
        for worker in self._workers:
            self._end(worker)
        for job in self._waiting:
            job.result.cancel()

    # --- in the thread ---------------------------------------------------------------------------

    def _serve(self) -> None:
        while True:
            try:
                event = self._events.get(timeout=self._seconds_left())
            except Empty:
                missing = self._cluster.missing(
                    [{"CPU": self._num_cpus}] * self.num_workers,
                    f"{self.num_workers} workers",
                    "`processes`",
                )
                waited = self._cluster.wait_seconds
                self._failure = ClusterError(f"{missing}; waited {waited:.0f} s")
                self._dispatch()
                continue
            if event is None:
                return
            event()
            self._dispatch()

    def _seconds_left(self) -> float | None:
        """Until it has been too long that no worker was ready; None while one is, or none is needed."""
        is_waiting = any(one.actor for one in self._workers)
        if self._failure or not is_waiting or any(one.is_ready for one in self._workers):
            return None
        return max(0.0, self._ready_at + self._cluster.wait_seconds - monotonic())

    def _dispatch(self) -> None:
        """Give what waits to workers that are ready, the least busy one first."""
        self._start_needed()
        while self._waiting:
            if self._failure is not None:
                self._waiting.popleft().result.set_exception(self._failure)
                continue
            free = [one for one in self._workers if one.is_ready and len(one.jobs) < self._max_jobs]
            if not free:
                return
            worker = min(free, key=lambda one: (len(one.jobs), one.num_jobs))
            self._send(worker, self._waiting.popleft())

    def _start_needed(self) -> None:
        """Start workers for what waits, unless others are idle or starting."""
        num_idle = sum(one.actor is not None and not one.jobs for one in self._workers)
        num_missing = len(self._waiting) - num_idle
        if num_missing <= 0 or self._failure is not None:
            return
        new = [one for one in self._workers if one.actor is None and one.num_starts < MAX_ATTEMPTS]
        if all(one.actor is None for one in self._workers):
            self._ready_at = monotonic()
            if not new:
                message = f"all workers of the cluster died {MAX_ATTEMPTS} times"
                self._failure = ClusterError(message)
        for worker in new[:num_missing]:
            self._start(worker)

    def _send(self, worker: _Worker, job: _Job) -> None:
        if not job.result.running() and not job.result.set_running_or_notify_cancel():
            return
        worker.num_jobs += 1
        worker.jobs.append(job)
        self._call(worker, "work", (job.function, job.arguments), partial(self._done, job))

    def _call(
        self,
        worker: _Worker,
        method: str,
        arguments: tuple[Any, ...],
        on_done: Callable[[_Worker, Any, Future[Any]], None],
    ) -> None:
        """Call a worker; `on_done` runs in this thread, with the actor that was called."""
        actor = worker.actor
        try:
            called: Future[Any] = getattr(actor, method).remote(*arguments).future()
        except Exception as error:  # what does not fit into the object store
            called = Future()
            called.set_exception(error)
        called.add_done_callback(
            lambda done: self._events.put(partial(on_done, worker, actor, done))
        )

    def _done(self, job: _Job, worker: _Worker, actor: Any, done: Future[Any]) -> None:
        from ray.exceptions import RayActorError

        try:
            with full_store_errors("what a function gets or returns"):
                value = done.result()
        except RayActorError:
            self._lost(worker, actor)
            if job.num_deaths < MAX_ATTEMPTS:
                self._waiting.appendleft(job)
                return
            worker.num_starts = 0  # the function is the cause
            value = _Failed(error=ClusterError(f"{MAX_ATTEMPTS} workers died at one function"))
        except Exception as error:
            value = _Failed(error=_told(error))
        if worker.actor is actor:
            worker.jobs.remove(job)
            worker.num_starts = 1
        if isinstance(value, _Failed):
            job.result.set_exception(value.error)
        else:
            job.result.set_result(value)

    # --- workers ---------------------------------------------------------------------------------

    def _start(self, worker: _Worker) -> None:
        import ray

        worker.num_starts += 1
        options: dict[str, Any] = {"num_cpus": self._num_cpus, "scheduling_strategy": "SPREAD"}
        if not self._num_cpus:  # Ray does not spread what reserves nothing
            nodes = node_ids()
            options = on_node(nodes[self._workers.index(worker) % len(nodes)])
        kind: Any = ray.remote(_ClusterWorker)
        worker.actor = kind.options(**options, max_restarts=0).remote()
        self._call(worker, "start", self._begin, self._started)

    def _started(self, worker: _Worker, actor: Any, done: Future[Any]) -> None:
        from ray.exceptions import ActorUnschedulableError, RayActorError

        try:
            failed = done.result()
        except (RayActorError, ActorUnschedulableError):  # its node may have left
            self._lost(worker, actor)
        except Exception as error:
            self._failure = _told(error)
        else:
            if isinstance(failed, _Failed):
                self._failure = failed.error
            worker.is_ready = True

    def _lost(self, worker: _Worker, actor: Any) -> None:
        """A worker died. What it had comes back one by one; only what it was computing, the first, may be the cause."""
        if worker.actor is not actor:
            return
        if worker.jobs:
            worker.jobs[0].num_deaths += 1
        if worker.is_ready:
            self._ready_at = monotonic()
        worker.is_ready, worker.jobs, worker.actor = False, [], None
        self._on_note(
            "a worker process of the cluster died; it is replaced, and what it computed is computed again"
        )
        # idle ones may have died with it, which is no fault of a function
        for one in self._workers:
            if one.is_ready and not one.jobs:
                one.is_ready = False
                self._call(one, "start", (None, ()), self._started)

    def _end(self, worker: _Worker) -> None:
        import ray

        if worker.actor is not None:
            with suppress(Exception):  # the cluster may be gone
                ray.kill(worker.actor)


def _told(error: Exception) -> MemagentError:
    """What Ray reports, as an error of one line."""
    if isinstance(error, MemagentError):
        return error
    return ClusterError(f"a worker of the cluster failed: {one_line(error, 300)}")
