"""Places for calls, of which a limited number works at once, and how long calls wait for one.

    slots, queue = Slots(8), Queue()
    with queue.call() as call:         # one call of this item; several may be in flight
        async with slots.slot():
            ...
    call.seconds, queue.seconds        # how long it waited; time in which every call in flight was waiting

Waiting of one call does not count while another call of the same queue is being answered.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from heapq import heappop, heappush
from itertools import count


class Slots:
    """Places for calls of one event loop; the lowest key gets the next one, and of equal keys the first call."""

    def __init__(self, num: int) -> None:
        self.num = num
        self.num_waiting = 0
        self._num_free = num
        self._waiting: list[tuple[tuple[int, ...], int, asyncio.Future[None]]] = []
        self._order = count()

    @asynccontextmanager
    async def slot(self, key: tuple[int, ...] = ()) -> AsyncIterator[None]:
        """A place. Calls with a key wait for others that come at the same time, which may have a lower one."""
        if key or self._waiting or not self._num_free:
            await self._turn(key)
        else:
            self._num_free -= 1
        try:
            yield
        finally:
            self._give_back()

    async def _turn(self, key: tuple[int, ...]) -> None:
        """Wait for a place; the time counts for the current call if all are taken."""
        loop = asyncio.get_running_loop()
        turn: asyncio.Future[None] = loop.create_future()
        heappush(self._waiting, (key, next(self._order), turn))
        loop.call_soon(self._grant)
        self.num_waiting += 1
        try:
            with _waiting():
                await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._give_back()
            raise
        finally:
            self.num_waiting -= 1

    def _grant(self) -> None:
        while self._num_free and self._waiting:
            turn = heappop(self._waiting)[-1]
            if not turn.done():
                self._num_free -= 1
                turn.set_result(None)

    def _give_back(self) -> None:
        self._num_free += 1
        self._grant()


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
        self.change(calls=1)
        try:
            yield call
        finally:
            self.change(calls=-1)
            _current.reset(token)

    def change(self, *, calls: int = 0, waiting: int = 0) -> None:
        """So many more calls are in flight, so many more of them wait."""
        now = time.perf_counter()
        if self._since is not None:
            self.seconds += now - self._since
        self._num_calls += calls
        self._num_waiting += waiting
        is_queued = 0 < self._num_calls <= self._num_waiting
        self._since = now if is_queued else None


class QueuedCall:
    """One call of a queue."""

    def __init__(self, queue: Queue) -> None:
        self.queue = queue
        self.seconds = 0.0
        """How long it waited."""


@contextmanager
def _waiting() -> Iterator[None]:
    """Time that counts as waiting for the current call."""
    call = _current.get()
    if call is None:
        yield
        return
    started = time.perf_counter()
    call.queue.change(waiting=1)
    try:
        yield
    finally:
        call.queue.change(waiting=-1)
        call.seconds += time.perf_counter() - started


_current: ContextVar[QueuedCall | None] = ContextVar("queued_call", default=None)
