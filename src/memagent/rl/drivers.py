"""Drivers: when the calls of a batch of rollouts leave. The agents are the same, and so are the results.

    free       each call leaves at once                     A ─▶ A ─▶ A ─▶
                                                            B ──────▶ B ─▶

    lockstep   calls wait until every live rollout has      A ─▶│ A ─▶│ A ─▶│
               one, then leave together                     B ─▶│ B ─▶│     │

`free` keeps an engine with continuous batching busy. `lockstep` sends large even batches, and keeps all
rollouts of a group at the same section, where they share a prefix that is computed once; but everyone
waits for the slowest. What an agent does between calls counts: a tool of ten seconds holds up a
lockstep batch for ten seconds. Grading an answer does not: the rollout has left by then.
"""

from __future__ import annotations

import asyncio
from collections.abc import Hashable
from difflib import get_close_matches
from typing import Literal, Protocol

from memagent.errors import ConfigError

DriverName = Literal["free", "lockstep"]


class Driver(Protocol):
    """Decides when calls leave."""

    def enter(self, rollout: Hashable) -> None:
        """A rollout begins."""
        ...

    def leave(self, rollout: Hashable) -> None:
        """A rollout makes no more calls."""
        ...

    async def turn(self, rollout: Hashable) -> None:
        """Returns when a call of the rollout may leave."""
        ...


class Free:
    """Every call leaves at once."""

    def enter(self, rollout: Hashable) -> None:
        """Nobody waits for it."""

    def leave(self, rollout: Hashable) -> None:
        """Nobody waited for it."""

    async def turn(self, rollout: Hashable) -> None:
        """At once."""


class Lockstep:
    """Calls leave together, when every live rollout waits with at least one."""

    def __init__(self) -> None:
        self.batches: list[int] = []
        """How many calls left together, for each time."""
        self._live: set[Hashable] = set()
        self._waiting: dict[Hashable, list[asyncio.Future[None]]] = {}
        self._is_scheduled = False

    def enter(self, rollout: Hashable) -> None:
        """Others wait for it from now on."""
        self._live.add(rollout)

    def leave(self, rollout: Hashable) -> None:
        """Others no longer wait for it."""
        self._live.discard(rollout)
        self._check()

    async def turn(self, rollout: Hashable) -> None:
        """Wait for the others."""
        place: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(rollout, []).append(place)
        self._check()
        try:
            await place
        except asyncio.CancelledError:
            self._give_up(rollout, place)
            raise

    def _give_up(self, rollout: Hashable, place: asyncio.Future[None]) -> None:
        """A call does not leave after all; it holds up nobody."""
        places = self._waiting.get(rollout, [])
        if place in places:
            places.remove(place)
            if not places:
                del self._waiting[rollout]
            self._check()

    def _check(self) -> None:
        """Let a batch go in a moment if all are there: others may come at this very moment."""
        if not self._is_scheduled and self._is_complete():
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._go)

    def _is_complete(self) -> bool:
        if not self._waiting or len(self._waiting) < len(self._live):
            return False
        return self._live <= self._waiting.keys()

    def _go(self) -> None:
        self._is_scheduled = False
        if not self._is_complete():
            return
        leaving = [place for places in self._waiting.values() for place in places]
        self._waiting = {}
        self.batches.append(len(leaving))
        for place in leaving:
            if not place.done():
                place.set_result(None)


DRIVERS: dict[str, type[Free] | type[Lockstep]] = {"free": Free, "lockstep": Lockstep}
"""Name to driver."""


def open_driver(name: str) -> Driver:
    """A driver by name."""
    if name not in DRIVERS:
        near = get_close_matches(name, DRIVERS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(DRIVERS)}"
        raise ConfigError(f"there is no driver {name!r}; {hint}")
    return DRIVERS[name]()
