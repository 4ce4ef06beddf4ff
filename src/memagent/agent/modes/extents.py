"""Which sections a note or a merged memory is on.

step 0  section 1 ─┐
step 1  section 2 ─┼─▶ step 3, a merge: sections 1-3
step 2  section 3 ─┘

sections_of(steps[3], steps, number_at)      # "1-3"
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol


class PlacedStep(Protocol):
    """What is needed of a step."""

    @property
    def start(self) -> int | None:
        """Where its section begins; None for merges."""
        ...

    @property
    def segment(self) -> int | None: ...

    @property
    def inputs(self) -> Sequence[int]: ...


class Extent(NamedTuple):
    """Where what a step is on begins in the text, and where its last section begins."""

    first: int
    last: int


def extent_of(step: PlacedStep, steps: Sequence[PlacedStep]) -> Extent:
    """What a step is on: its section with those before it in its segment, or what its inputs are on."""
    if step.start is not None:
        others = [
            other.start
            for other in steps
            if step.segment is not None and other.segment == step.segment
            if other.start is not None
        ]
        return Extent(min([step.start, *others]), step.start)
    parts = [extent_of(steps[index], steps) for index in step.inputs]
    return Extent(min(part.first for part in parts), max(part.last for part in parts))


def sections_of(
    step: PlacedStep, steps: Sequence[PlacedStep], number_at: Callable[[int], int]
) -> str:
    """The sections that a step is on, such as 3 or 3-17; `number_at` gives a section's index by its start."""
    numbers = (number_at(start) + 1 for start in extent_of(step, steps))
    return "-".join(str(number) for number in dict.fromkeys(numbers))
