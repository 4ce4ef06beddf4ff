"""Places for calls, of which a limited number works at once, how long calls wait for one, and when a failed call is
tried again.

    slots, queue = Slots(8), Queue()
    with queue.call() as call:         # one call of this item; several may be in flight
        async with slots.slot():
            ...
    call.seconds, queue.seconds        # how long it waited; time in which every call in flight was waiting

Waiting of one call does not count while another call of the same queue is being answered.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from heapq import heappop, heappush
from itertools import count
from typing import Literal


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


# --- when to try a failed call again ----------------------------------------------------------------

# Retries have jittered backoff, the server's Retry-After, and a deadline. What decides is time, not a number of attempts: an
# endpoint that is down for a minute costs a minute.


FIRST_DELAY = 0.25
LONGEST_DELAYS = {"unreachable": 2.0, "failed": 5.0, "busy": 20.0}
SHORTEST_WAIT, LONGEST_FLOOR = 0.25, 1.0
"""Seconds between attempts at least, whatever the server asks for: the first time, and after several."""
LONGEST_WAIT = 366 * 86400.0
"""Longer waits that a server asks for count as this one."""
FIRST_CONTACT_PATIENCE = 20.0
"""Seconds for an address that has never answered: more likely mistyped than down."""

FailureKind = Literal["unreachable", "failed", "busy"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A failed attempt that may be tried again."""

    kind: FailureKind
    reason: str
    retry_after: float | None = None
    """Seconds the server asked us to wait; 0 where the next attempt can be sent at once."""
    num_attempts: int = 1
    """Requests that failed: more than one where several endpoints were tried in turn."""


RetryListener = Callable[[Failure, float], None]
"""Gets each failed attempt and the seconds before the next."""


class Patience:
    """Decides, for one call, how long to wait before the next attempt and when to stop."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._started: float | None = None
        self.num_failures = 0
        self.num_attempts = 0
        """Requests so far; a failure may stand for several."""

    def delay(self, failure: Failure, *, has_answered: bool) -> float | None:
        """Seconds to wait before trying again, or None when patience has run out.

        `has_answered`: the endpoint has answered some call by now.
        """
        now = time.monotonic()
        self._started = now if self._started is None else self._started
        delay = _delay(failure, self.num_failures)
        self.num_failures += 1
        self.num_attempts += failure.num_attempts
        is_first_contact = failure.kind == "unreachable" and not has_answered
        limit = min(self._seconds, FIRST_CONTACT_PATIENCE) if is_first_contact else self._seconds
        return None if now - self._started + delay > limit else delay

    @property
    def waited(self) -> float:
        """Seconds since the first failure."""
        return 0.0 if self._started is None else time.monotonic() - self._started


def _delay(failure: Failure, num_failures: int) -> float:
    if failure.retry_after is not None:
        floor = min(LONGEST_FLOOR, SHORTEST_WAIT * 2.0 ** min(num_failures, 16))
        wait = max(failure.retry_after, floor) if failure.retry_after else 0.0
        return wait * random.uniform(1.0, 1.1)
    longest = LONGEST_DELAYS[failure.kind]
    return min(longest, FIRST_DELAY * 2.0 ** min(num_failures, 16)) * random.uniform(0.5, 1.0)


def retry_after(headers: Mapping[str, str]) -> float | None:
    """The wait a server asks for, in seconds: `retry-after-ms`, or `Retry-After` as number or date.

    None where it makes no sense; never shorter than `SHORTEST_WAIT`.
    """
    try:
        if milliseconds := headers.get("retry-after-ms"):
            seconds = float(milliseconds) / 1000
        elif value := headers.get("retry-after"):
            seconds = _seconds(value)
        else:
            return None
    except (ValueError, TypeError, OverflowError):
        return None
    return min(max(seconds, SHORTEST_WAIT), LONGEST_WAIT) if math.isfinite(seconds) else None


def _seconds(value: str) -> float:
    try:
        return float(value)
    except ValueError:
        return parsedate_to_datetime(value).timestamp() - time.time()
