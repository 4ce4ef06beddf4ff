"""How long calls wait for their turn, apart from how long they take.

    queue = Queue()
    with queue.call():                 # one call of this item; several may be in flight
        await engine.complete(...)     # the engine waits with `async with slot(semaphore)`
    queue.seconds                      # time in which every call in flight was waiting

Waiting of one call does not count while another call of the same queue is being answered.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar


class Queue:
    """The calls in flight that belong together, and how long all of them waited."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._num_calls = 0
        self._num_waiting = 0
        self._since: float | None = None

    @contextmanager
    def call(self) -> Iterator[QueuedCall]:
        """One call, from here until its reply."""
        call = QueuedCall(self)
        token = _current.set(call)
        self._change(calls=1)
        try:
            yield call
        finally:
            self._change(calls=-1)
            _current.reset(token)

    def _change(self, *, calls: int = 0, waiting: int = 0) -> None:
        now = time.perf_counter()
        if self._since is not None:
            self.seconds += now - self._since
        self._num_calls += calls
        self._num_waiting += waiting
        is_queued = 0 < self._num_calls <= self._num_waiting
        self._since = now if is_queued else None

    def wait(self, num: int) -> None:
        """So many more calls wait."""
        self._change(waiting=num)


class QueuedCall:
    """One call of a queue."""

    def __init__(self, queue: Queue) -> None:
        self.queue = queue
        self.seconds = 0.0
        """How long it waited."""


@asynccontextmanager
async def slot(slots: asyncio.Semaphore) -> AsyncIterator[None]:
    """A place among those that work at once; waiting for it is counted for the current call."""
    call = _current.get()
    if call is None or not slots.locked():
        async with slots:
            yield
        return
    started = time.perf_counter()
    call.queue.wait(1)
    try:
        await slots.acquire()
    finally:
        call.queue.wait(-1)
        call.seconds += time.perf_counter() - started
    try:
        yield
    finally:
        slots.release()


_current: ContextVar[QueuedCall | None] = ContextVar("queued_call", default=None)
