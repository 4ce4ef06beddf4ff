"""Which sections a note or a merged memory is on.

step 0  section 1 ─┐
step 1  section 2 ─┼─▶ step 3, a merge: sections 1-3
step 2  section 3 ─┘

Extents(steps).place(3, number_at)      # "1-3"
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol


class PlacedStep(Protocol):
    """What is needed of a step."""

    @property
    def start(self) -> int | None:
        """Where its section begins; None for merges."""
        ...

    @property
    def inputs(self) -> Sequence[int]: ...


class Extent(NamedTuple):
    """Where what a step is on begins in the text, and where its last section begins."""

    first: int
    last: int


class Extents:
    """What the steps of a reading are on, by index."""

    def __init__(self, steps: Iterable[PlacedStep] = ()) -> None:
        self._all: list[Extent] = []
        for step in steps:
            self.add(step)

    def add(self, step: PlacedStep) -> None:
        """Take in the next step: its section, or what its inputs are on."""
        if step.start is not None:
            self._all.append(Extent(step.start, step.start))
            return
        parts = [self._all[index] for index in step.inputs] or [Extent(0, 0)]
        self._all.append(Extent(min(one.first for one in parts), max(one.last for one in parts)))

    def place(self, index: int, number_at: Callable[[int], int]) -> str:
        """The sections that a step is on, such as 3 or 3-17; `number_at` gives a section's index by its start."""
        numbers = (number_at(start) + 1 for start in self._all[index])
        return "-".join(str(number) for number in dict.fromkeys(numbers))
