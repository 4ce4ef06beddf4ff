"""Drivers: when the calls of a batch of rollouts leave. The agents are the same, and so are the results.

    free       each call leaves at once                     A ─▶ A ─▶ A ─▶
                                                            B ──────▶ B ─▶

    lockstep   calls wait until every live rollout has      A ─▶│ A ─▶│ A ─▶│
               one, then leave together                     B ─▶│ B ─▶│     │

`free` keeps an engine with continuous batching busy. `lockstep` sends large even batches, and keeps all
rollouts of a group at the same section, where they share a prefix that is computed once; but everyone
waits for the slowest. What an agent does between calls counts: a tool of ten seconds holds up a
lockstep batch for ten seconds. Grading an answer does not: the rollout has left by then.

With an engine that can hold still, lockstep also repeats bit for bit: a batch leaves when no call is under
way, its calls come to the engine in the order of tasks and rollouts, and they begin together. What is
computed together is then the same whatever finished first. That needs all rollouts from the beginning,
and agents that wait for a tool only where none of their own calls waits.
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
from difflib import get_close_matches
from typing import Literal, Protocol, runtime_checkable

from memagent.errors import ConfigError
from memagent.types import Engine

DriverName = Literal["free", "lockstep"]
Place = tuple[int, int]
"""Which rollout: the position of its task in the collection, and its number in the group."""
SETTLE_ROUNDS = 8
"""Rounds of the event loop in which the calls of a batch reach the engine; one is enough for that, and a
call that is refused at once may make its rollout take others back."""


@runtime_checkable
class HoldableEngine(Protocol):
    """An engine that can hold still while requests come in, as the local one can."""

    def hold(self, *, fresh: bool = False) -> AbstractContextManager[None]: ...


class Driver(Protocol):
    """Decides when calls leave."""

    def enter(self, rollout: Place) -> None:
        """A rollout begins."""
        ...

    def leave(self, rollout: Place) -> None:
        """A rollout makes no more calls."""
        ...

    def turn(self, rollout: Place) -> AbstractAsyncContextManager[None]:
        """Entered when a call of the rollout may leave, and left when it has its reply."""
        ...


class Free:
    """Every call leaves at once."""

    def enter(self, rollout: Place) -> None:
        """Nobody waits for it."""

    def leave(self, rollout: Place) -> None:
        """Nobody waited for it."""

    def turn(self, rollout: Place) -> AbstractAsyncContextManager[None]:
        """At once."""
        return nullcontext()


class Lockstep:
    """Calls leave together, when none is under way and every live rollout waits with at least one."""

    def __init__(self, engine: HoldableEngine | None = None) -> None:
        """The engine is held while the calls of a batch come to it."""
        self.batches: list[int] = []
        """How many calls left together, for each time."""
        self._engine = engine
        self._live: set[Place] = set()
        self._waiting: dict[Place, list[asyncio.Future[None]]] = {}
        """Calls that wait for their turn, in the order in which each rollout made them."""
        self._num_under_way = 0
        self._is_scheduled = False

    def enter(self, rollout: Place) -> None:
        """Others wait for it from now on."""
        self._live.add(rollout)

    def leave(self, rollout: Place) -> None:
        """Others no longer wait for it."""
        self._live.discard(rollout)
        self._check()

    @asynccontextmanager
    async def turn(self, rollout: Place) -> AsyncIterator[None]:
        """Wait for the others; they wait for the reply."""
        await self._wait(rollout)
        self._num_under_way += 1
        try:
            yield
        finally:
            self._num_under_way -= 1
            self._check()

    async def _wait(self, rollout: Place) -> None:
        waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(rollout, []).append(waiting)
        self._check()
        try:
            await waiting
        except asyncio.CancelledError:
            self._give_up(rollout, waiting)
            raise

    def _give_up(self, rollout: Place, waiting: asyncio.Future[None]) -> None:
        """A call does not leave after all; it holds up nobody."""
        calls = self._waiting.get(rollout, [])
        if waiting in calls:
            calls.remove(waiting)
            if not calls:
                del self._waiting[rollout]
            self._check()

    def _check(self) -> None:
        """Let a batch go in a moment if all are there: others may come at this very moment."""
        if not self._is_scheduled and self._is_complete():
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._go)

    def _is_complete(self) -> bool:
        if self._num_under_way or not self._waiting or len(self._waiting) < len(self._live):
            return False
        return self._live <= self._waiting.keys()

    def _go(self) -> None:
        self._is_scheduled = False
        if not self._is_complete():
            return
        leaving = [call for rollout in sorted(self._waiting) for call in self._waiting[rollout]]
        self._waiting = {}
        self.batches.append(len(leaving))
        held = ExitStack()
        if self._engine is not None:  # fresh at first: nothing depends on what was asked before
            held.enter_context(self._engine.hold(fresh=len(self.batches) == 1))
        for call in leaving:
            if not call.done():
                call.set_result(None)
        _after_rounds(SETTLE_ROUNDS, held.close)


def _after_rounds(count: int, act: Callable[[], None]) -> None:
    """Do something when all that is ready now, and what follows from it at once, has been done."""
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
    near = get_close_matches(name, DRIVERS, n=1)
    hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(DRIVERS)}"
    raise ConfigError(f"there is no driver {name!r}; {hint}")
