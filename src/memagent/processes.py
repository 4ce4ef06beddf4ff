"""Pools of worker processes that end with the program, even when it is killed.

    with worker_pool(4, initializer=start, initargs=(settings,)) as pool:
        pool.submit(work, item)

Workers are spawned: a fork of a process with threads (an engine's, torch's) can hang. Ctrl-C is left to
the program, which decides what becomes of the work.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import Executor, ProcessPoolExecutor
from multiprocessing import connection, get_context, parent_process
from typing import Any, Protocol


class OpenPool(Protocol):
    """Opens a pool of workers: processes of this machine (`worker_pool`), or those of a cluster."""

    def __call__(
        self,
        num_workers: int,
        *,
        initializer: Callable[..., None] | None = None,
        initargs: tuple[Any, ...] = (),
    ) -> Executor:
        """A pool whose workers call `initializer(*initargs)` first."""
        ...


def worker_pool(
    num_workers: int,
    *,
    initializer: Callable[..., None] | None = None,
    initargs: tuple[Any, ...] = (),
) -> ProcessPoolExecutor:
    """A pool whose workers call `initializer(*initargs)` first."""
    return ProcessPoolExecutor(
        num_workers,
        mp_context=get_context("spawn"),
        initializer=_start_worker,
        initargs=(initializer, initargs),
    )


def end_workers(pool: ProcessPoolExecutor) -> None:
    """End a pool at once, whatever its workers are doing."""
    processes = list((pool._processes or {}).values())
    pool.shutdown(wait=False, cancel_futures=True)
    for process in processes:
        process.terminate()  # a function that hangs would keep the program from ending
    for process in processes:
        process.join()


def _start_worker(initializer: Callable[..., None] | None, initargs: tuple[Any, ...]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    if initializer is not None:
        initializer(*initargs)


def _end_with_parent() -> None:
    """A parent that is killed cannot end its workers, and they would wait for work forever."""
    parent = parent_process()
    assert parent is not None, "a worker is started by a program"
    connection.wait([parent.sentinel])
    os._exit(1)
