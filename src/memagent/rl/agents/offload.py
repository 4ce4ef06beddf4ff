"""Work that would hold up everybody else goes to other processes.

    value = await offload(slow_check, answer, tests)       # in an agent, a tool or a reward

All rollouts share one thread: a second of computing in one of them is a second in which no other asks or
hears anything. `offload` runs a function in a pool of processes and waits without holding up anyone.
The function and its arguments are sent there, so it must be a function of a module or of a file of
yours, not a lambda.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import pickle
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextvars import ContextVar
from typing import Any, Self, TypeVar

from memagent.errors import ConfigError, EngineError
from memagent.plugins import portable

T = TypeVar("T")


class WorkerPool:
    """Processes that run functions. They start when the first one comes, and end with the pool."""

    def __init__(self, num_workers: int | None = None) -> None:
        """By default one worker per core but one, which generation may need."""
        self._num_workers = num_workers or max(1, (os.cpu_count() or 2) - 1)
        self._executor: ProcessPoolExecutor | None = None

    async def run(self, function: Callable[..., T], *arguments: Any) -> T:
        """The function's result; what it raises is raised here."""
        work = portable(function)
        try:
            pickle.dumps((work, arguments))
        except Exception as error:  # pickle raises what it likes
            name = getattr(function, "__name__", repr(function))
            raise ConfigError(
                f"{name} cannot be sent to another process ({error}); offload functions of a module, "
                "with plain values"
            ) from None
        executor = self._executor or self._start()
        try:
            result: T = await asyncio.wrap_future(executor.submit(work, *arguments))
            return result
        except BrokenProcessPool:
            if self._executor is executor:  # the next call gets new workers
                self._executor = None
                executor.shutdown(wait=False)
            raise EngineError("a worker process died, out of memory or by a crash") from None

    def close(self) -> None:
        """End the processes, whatever they are doing."""
        executor, self._executor = self._executor, None
        if executor is None:
            return
        processes = list((executor._processes or {}).values())
        executor.shutdown(wait=False, cancel_futures=True)
        for process in processes:
            process.terminate()  # a function that hangs would keep the whole program from ending
        for process in processes:
            process.join()

    def use(self) -> None:
        """Let `offload` find this pool, in this task and those that it starts."""
        _pool.set(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _start(self) -> ProcessPoolExecutor:
        # a fork of a process with threads (the engine's, torch's) can hang
        context = multiprocessing.get_context("spawn")
        self._executor = ProcessPoolExecutor(
            self._num_workers, mp_context=context, initializer=_prepare_worker
        )
        return self._executor


def _prepare_worker() -> None:
    """Leave Ctrl-C to the program, and end with it even when it was killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    program = multiprocessing.parent_process()
    assert program is not None, "a worker is started by a program"

    def end_with_the_program() -> None:
        program.join()
        os._exit(1)

    threading.Thread(target=end_with_the_program, daemon=True).start()


_pool: ContextVar[WorkerPool | None] = ContextVar("memagent_pool", default=None)


async def offload(function: Callable[..., T], *arguments: Any) -> T:
    """The result of a function that runs in another process; in a thread where no pool is open."""
    pool = _pool.get()
    if pool is None:
        return await asyncio.to_thread(function, *arguments)
    return await pool.run(function, *arguments)
