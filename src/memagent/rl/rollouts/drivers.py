"""Drivers decide when the calls of rollouts are sent. Agents and results are the same with each.

    free       each call is sent at once                    A ─▶ A ─▶ A ─▶
                                                            B ──────▶ B ─▶

    lockstep   calls wait until every live rollout has      A ─▶│ A ─▶│ A ─▶│
               one, then are sent together                  B ─▶│ B ─▶│     │

`free` keeps an engine with continuous batching busy. `lockstep` sends large even batches, and keeps all
rollouts of a group at the same section, whose shared prefix is computed once; but all rollouts wait for the
slowest. Time between calls counts: a tool of ten seconds delays a lockstep batch by ten seconds. Grading an
answer does not: the rollout has left by then.

With an engine that can be held, lockstep is also reproducible bit for bit: a batch is sent when no call is
in flight, its calls reach the engine in the order of tasks and rollouts, and the engine starts them
together. So batches do not depend on timing. This requires that all rollouts start together, and that an
agent awaits a tool only while none of its own calls is waiting.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    ExitStack,
    asynccontextmanager,
    nullcontext,
)
from typing import Literal, Protocol, runtime_checkable

from memagent.errors import ConfigError
from memagent.names import hint
from memagent.types import Engine

DriverName = Literal["free", "lockstep"]
RolloutKey = tuple[int, int]
"""Which rollout: the position of its task in the collection, and its number in the group."""
SETTLE_ROUNDS = 8
"""Rounds of the event loop in which the calls of a batch reach the engine. One would do, but a call that
is refused at once may make its rollout cancel others."""


@runtime_checkable
class HoldableEngine(Protocol):
    """An engine that can be held while requests arrive, as the local one can."""

    def hold(self, *, fresh: bool = False) -> AbstractContextManager[None]: ...


class Driver(Protocol):
    """Decides when calls are sent."""

    def enter(self, rollout: RolloutKey) -> None:
        """A rollout starts."""
        ...

    def leave(self, rollout: RolloutKey) -> None:
        """A rollout makes no more calls."""
        ...

    def turn(self, rollout: RolloutKey) -> AbstractAsyncContextManager[None]:
        """Entered when a call of the rollout may be sent, and left when its reply has arrived."""
        ...


class Free:
    """Every call is sent at once."""

    def enter(self, rollout: RolloutKey) -> None:
        """Nothing to do."""

    def leave(self, rollout: RolloutKey) -> None:
        """Nothing to do."""

    def turn(self, rollout: RolloutKey) -> AbstractAsyncContextManager[None]:
        """No wait."""
        return nullcontext()


class Lockstep:
    """Calls are sent together, when none is in flight and every live rollout has at least one waiting."""

    def __init__(self, engine: HoldableEngine | None = None) -> None:
        """The engine is held while the calls of a batch arrive."""
        self.batches: list[int] = []
        """Calls of each batch."""
        self._engine = engine
        self._live: set[RolloutKey] = set()
        self._waiting: dict[RolloutKey, list[asyncio.Future[None]]] = {}
        """Calls waiting for their turn, in the order in which each rollout made them."""
        self._num_in_flight = 0
        self._is_scheduled = False

    def enter(self, rollout: RolloutKey) -> None:
        """The others wait for it from now on."""
        self._live.add(rollout)

    def leave(self, rollout: RolloutKey) -> None:
        """The others no longer wait for it."""
        self._live.discard(rollout)
        self._check()

    @asynccontextmanager
    async def turn(self, rollout: RolloutKey) -> AsyncIterator[None]:
        """Wait for the other rollouts; the next batch waits for this reply."""
        await self._wait(rollout)
        self._num_in_flight += 1
        try:
            yield
        finally:
            self._num_in_flight -= 1
            self._check()

    async def _wait(self, rollout: RolloutKey) -> None:
        waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(rollout, []).append(waiting)
        self._check()
        try:
            await waiting
        except asyncio.CancelledError:
            self._cancel(rollout, waiting)
            raise

    def _cancel(self, rollout: RolloutKey, waiting: asyncio.Future[None]) -> None:
        """A waiting call was cancelled; the others do not wait for it."""
        calls = self._waiting.get(rollout, [])
        if waiting in calls:
            calls.remove(waiting)
            if not calls:
                del self._waiting[rollout]
            self._check()

    def _check(self) -> None:
        """Schedule a batch if it is complete. Calls that arrive in the same round still join it."""
        if not self._is_scheduled and self._is_complete():
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._send)

    def _is_complete(self) -> bool:
        if self._num_in_flight or not self._waiting or len(self._waiting) < len(self._live):
            return False
        return self._live <= self._waiting.keys()

    def _send(self) -> None:
        self._is_scheduled = False
        if not self._is_complete():
            return
        batch = [call for rollout in sorted(self._waiting) for call in self._waiting[rollout]]
        self._waiting = {}
        self.batches.append(len(batch))
        held = ExitStack()
        if (
            self._engine is not None
        ):  # the first batch starts on an empty cache, whatever ran before
            held.enter_context(self._engine.hold(fresh=len(self.batches) == 1))
        for call in batch:
            if not call.done():
                call.set_result(None)
        _after_rounds(SETTLE_ROUNDS, held.close)


def _after_rounds(count: int, act: Callable[[], None]) -> None:
    """Call `act` after so many rounds of the event loop."""
    if count:
        asyncio.get_running_loop().call_soon(_after_rounds, count - 1, act)
    else:
        act()


DRIVERS: tuple[DriverName, ...] = ("free", "lockstep")


def open_driver(name: str, engine: Engine) -> Driver:
    """A driver by name, for calls to an engine."""
    if name == "free":
        return Free()
    if name == "lockstep":
        return Lockstep(engine if isinstance(engine, HoldableEngine) else None)
    raise ConfigError(f"there is no driver {name!r}; {hint(name, DRIVERS)}")
