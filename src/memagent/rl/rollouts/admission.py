"""Which groups may start, and which a step takes, so that none is trained on by weights that are too new.

    version 4   groups 0 1 2 3 | 4 5 6 7 | 8 9 . .       prompts = 4, max_staleness = 2: three steps ahead
                    taken at 4     by 5      by 6        a group of version 4 is taken by version 6

A group that starts at version v is taken by version v + max_staleness, its deadline. At most
`(max_staleness + 1) x prompts` groups are outstanding, so taking the earliest deadlines first always meets
them. A step takes groups as they finish, but waits for one that would miss its deadline otherwise: slow
rollouts are not dropped, which would favour short replies. With `max_staleness = 0` a step takes exactly the
groups that were started for it.

No rollouts, no clock here: positions in, positions out.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(slots=True)
class _Ticket:
    """An outstanding group."""

    deadline: int
    """The last version at which it may be taken."""
    is_finished: bool = False


class Admission:
    """Outstanding groups, by the position of their task."""

    def __init__(
        self, *, prompts: int, max_staleness: int, max_unwanted: int, num_steps: int | None = None
    ) -> None:
        """`prompts` groups are taken in each step, up to version `num_steps`."""
        self._prompts = prompts
        self._max_staleness = max_staleness
        self._max_unwanted = max_unwanted
        self._num_steps = num_steps
        self._tickets: dict[int, _Ticket] = {}
        self._num_unwanted = 0
        """Since the last step."""
        self.version = 0
        """The version of the weights: finished steps."""
        self._next = 0
        """The version at which groups are taken next: the one after `version` while its update runs."""

    @property
    def outstanding(self) -> list[tuple[int, int]]:
        """Position and deadline of all groups that were not taken, in the order of deadlines."""
        pairs = ((position, ticket.deadline) for position, ticket in self._tickets.items())
        return sorted(pairs, key=lambda pair: (pair[1], pair[0]))

    @property
    def may_start(self) -> bool:
        """Whether one more group would still meet its deadline."""
        last = self.version + self._max_staleness
        if self._num_steps is not None:
            last = min(last, self._num_steps - 1)
        num_ahead = last + 1 - self._next
        return len(self._tickets) < num_ahead * self._prompts - self._num_excess

    def begin_step(self, version: int) -> None:
        """New weights sample, and the next step takes groups."""
        self.version = self._next = version

    def start(self, position: int, *, deadline: int | None = None) -> int:
        """A group starts, or is started again with the deadline that it had; its deadline."""
        if deadline is None:
            deadline = self.version + self._max_staleness
        self._tickets[position] = _Ticket(deadline)
        return deadline

    def finish(self, position: int, *, oldest: int | None = None) -> None:
        """A group is finished. `oldest` is the version of the weights that sampled it, the oldest of several."""
        ticket = self._tickets[position]
        ticket.is_finished = True
        if oldest is not None:  # an engine may have been behind
            ticket.deadline = min(ticket.deadline, oldest + self._max_staleness)

    def discard(self, position: int) -> None:
        """A group is not wanted; another may start instead, up to `max_unwanted` in a step."""
        del self._tickets[position]
        self._num_unwanted += 1

    def drop_stale(self) -> list[int]:
        """Remove the finished groups that are too old for this version; their positions."""
        stale = [
            position
            for position, ticket in self._tickets.items()
            if ticket.is_finished and ticket.deadline < self.version
        ]
        for position in stale:
            del self._tickets[position]
        return stale

    def take(self) -> list[int] | None:
        """The groups of a step in the order of their positions; None while the step has to wait.

        There are fewer than `prompts` where more than `max_unwanted` were not wanted.
        """
        needed = max(0, self._prompts - self._num_excess)
        finished = [at for at, _ in self.outstanding if self._tickets[at].is_finished]
        taken = finished[: self._prompts]
        if len(taken) < needed or not self._can_wait(taken):
            return None
        for position in taken:
            del self._tickets[position]
        self._num_unwanted = 0
        self._next = self.version + 1
        return sorted(taken)

    @property
    def _num_excess(self) -> int:
        """Groups that are not replaced any more in this step."""
        return max(0, self._num_unwanted - self._max_unwanted)

    def _can_wait(self, taken: Iterable[int]) -> bool:
        """Whether the unfinished groups meet their deadlines if only these are taken now."""
        gone = set(taken)
        left = [pair for pair in self.outstanding if pair[0] not in gone]
        return all(
            self._tickets[position].is_finished
            or self.version + 1 + place // self._prompts <= deadline
            for place, (position, deadline) in enumerate(left)
        )
