"""Worker processes on all nodes of a cluster, as a pool: `submit` a function, get a future.

    with open_cluster("auto") as cluster:
        pool = ClusterExecutor(cluster, initializer=open_task, initargs=(name,))
        pool.submit(work, 7).result()
        pool.shutdown()

It stands where `memagent.processes.worker_pool` stands on one machine: each worker calls the initializer first. A
worker that dies is started again by Ray, and what it was computing is computed again. Files that the functions
read must be at the same place on all nodes.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from memagent.cluster import Cluster
from memagent.errors import ClusterError

T = TypeVar("T")

MAX_RESTARTS = 3
"""How often a worker is started again, and what it was computing is tried again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Failed:
    """Errors travel as values: Ray would wrap them in its own."""

    error: Exception


class _ClusterWorker:
    """One process on some node. It runs as a Ray actor."""

    def __init__(self, initializer: Callable[..., None] | None, initargs: tuple[Any, ...]) -> None:
        if initializer is not None:
            initializer(*initargs)

    def work(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        try:
            return function(*arguments)
        except Exception as error:
            return _Failed(error=error)


class ClusterExecutor(Executor):
    """Workers of one CPU each, spread over the nodes."""

    def __init__(
        self,
        cluster: Cluster,
        num_workers: int | None = None,
        *,
        initializer: Callable[..., None] | None = None,
        initargs: tuple[Any, ...] = (),
    ) -> None:
        """By default there are as many workers as the cluster has CPUs."""
        import ray

        self.num_workers = num_workers or max(1, int(cluster.total("CPU")))
        options = {
            "num_cpus": 1,
            "scheduling_strategy": "SPREAD",
            "max_restarts": MAX_RESTARTS,
            "max_task_retries": MAX_RESTARTS,
        }
        worker: Any = ray.remote(_ClusterWorker).options(**options)
        self._workers = [worker.remote(initializer, initargs) for _ in range(self.num_workers)]
        self._loads = [0] * self.num_workers
        self._turns = [0] * self.num_workers

    def submit(  # type: ignore[override]  # as of any Executor, without its keywords
        self, function: Callable[..., T], /, *arguments: Any
    ) -> Future[T]:
        """The result of a function, computed by the least busy worker."""
        number = min(range(self.num_workers), key=lambda one: (self._loads[one], self._turns[one]))
        self._loads[number] += 1
        self._turns[number] += 1
        result: Future[T] = Future()
        sent = self._workers[number].work.remote(function, arguments).future()
        sent.add_done_callback(lambda done: self._settle(number, done, result))
        return result

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the workers, whatever they are computing."""
        import ray

        for worker in self._workers:
            with suppress(Exception):  # the cluster may be gone
                ray.kill(worker)
        self._workers = []

    def _settle(self, number: int, done: Future[Any], result: Future[T]) -> None:
        self._loads[number] -= 1
        if not result.set_running_or_notify_cancel():
            return
        try:
            value = done.result()
        except Exception as error:
            reason = " ".join(str(error).split())[:300]
            result.set_exception(ClusterError(f"a worker of the cluster was lost: {reason}"))
            return
        if isinstance(value, _Failed):
            result.set_exception(value.error)
        else:
            result.set_result(value)
