"""Slow computation in other processes, so that it does not hold up other rollouts.

    result = await offload(slow_check, answer, tests)       # in an agent, a tool or a reward

All rollouts share one thread: while one of them computes for a second, no other can make or finish a call.
`offload` runs a function in a pool of processes and awaits its result; in a run on a cluster they are on all nodes. The
function and its arguments are pickled, so it must be a function of a module or of a file of the user, which is at the same
place on all nodes, not a lambda.
"""

from __future__ import annotations

import asyncio
import os
import pickle
from collections.abc import Callable
from concurrent.futures import Executor
from contextvars import ContextVar
from functools import partial
from typing import Any, Self, TypeVar

from memagent.cluster import Cluster, OnClusterNote
from memagent.cluster_workers import ClusterExecutor
from memagent.errors import ConfigError
from memagent.plugins import portable
from memagent.processes import ProcessPool

T = TypeVar("T")


class WorkerPool:
    """Processes that run functions. They start with the first function, and end with the pool."""

    def __init__(
        self,
        num_workers: int | None = None,
        open_pool: Callable[[int], Executor] | None = None,
    ) -> None:
        """By default one worker per core but one, which generation may need, on this machine."""
        self.num_workers = num_workers or max(1, (os.cpu_count() or 2) - 1)
        # a function that kills its worker would kill the next one too
        self._open_pool = open_pool or partial(ProcessPool, max_attempts=1)
        self._executor: Executor | None = None

    @classmethod
    def on_cluster(
        cls,
        cluster: Cluster,
        num_workers: int | None = None,
        *,
        on_note: OnClusterNote = lambda text: None,
    ) -> Self:
        """Processes on all nodes; by default one per core but one of each node. They reserve nothing.

        `on_note` gets a line for each process that dies and is replaced.
        """
        loop = asyncio.get_running_loop()

        def note(text: str) -> None:
            loop.call_soon_threadsafe(on_note, text)

        workers = partial(ClusterExecutor, cluster, num_cpus=0, max_jobs=1, on_note=note)
        return cls(num_workers or int(cluster.total("CPU")) - cluster.num_nodes or 1, workers)

    async def run(self, function: Callable[..., T], *arguments: Any) -> T:
        """The function's result; what it raises is raised here."""
        work = checked_work(function, arguments)
        if self._executor is None:
            self._executor = self._open_pool(self.num_workers)
        result: T = await asyncio.wrap_future(self._executor.submit(work, *arguments))
        return result

    def close(self) -> None:
        """End the processes, whatever they are doing."""
        executor, self._executor = self._executor, None
        if executor is not None:
            executor.shutdown(cancel_futures=True)

    def use(self) -> None:
        """Make this the pool of `offload`, in this task and those that it starts."""
        _pool.set(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def checked_work(function: Callable[..., T], arguments: tuple[Any, ...]) -> Callable[..., T]:
    """The function as it is sent to another process. Raises ConfigError where it cannot be."""
    work: Callable[..., T] = portable(function)
    try:
        pickle.dumps((work, arguments))
    except Exception as error:  # pickle raises errors of many types
        name = getattr(function, "__name__", repr(function))
        raise ConfigError(
            f"{name} cannot be sent to another process ({error}); offload functions of a module, "
            "with plain values"
        ) from None
    return work


_pool: ContextVar[WorkerPool | None] = ContextVar("memagent_pool", default=None)


async def offload(function: Callable[..., T], *arguments: Any) -> T:
    """The result of a function that runs in another process; in a thread where no pool is open."""
    pool = _pool.get()
    if pool is None:
        return await asyncio.to_thread(function, *arguments)
    return await pool.run(function, *arguments)
