"""How far a run is, how long it may take, and how long it will take."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from time import perf_counter

from memagent.config import check_numbers

PACE_STEPS = 50
"""Steps that the time left is estimated from."""


@dataclass(slots=True, kw_only=True)
class TrainProgress:
    """How far a run is: with weights and optimizer, the content of a checkpoint."""

    warm_step: int = 0
    """Finished steps of the warm start."""
    step: int = 0
    """Finished steps of reinforcement learning; also the version of the weights."""
    position: int = 0
    """Tasks taken from the stream."""
    num_unused: int = 0
    """Consecutive steps without signal."""
    validated: int = -1
    """The step after which the last validation ran; 0 is before the first."""
    pending: list[tuple[int, int]] = field(default_factory=list)
    """Tasks before `position` that no step has taken, with asynchronous rollouts: each with the last version
    of the weights at which it may be."""

    @property
    def total(self) -> int:
        """Finished steps of both phases."""
        return self.warm_step + self.step

    @property
    def checkpoint(self) -> str:
        """Name of the checkpoint of these steps: step-000040, or warm-000140 in the warm start."""
        return f"step-{self.step:06}" if self.step else f"warm-{self.warm_step:06}"


class TimeLimit:
    """The time a run may take, counted from the creation of this object."""

    def __init__(self, minutes: float | None) -> None:
        check_numbers(max_minutes=minutes)
        self.minutes = minutes
        self._started = perf_counter()

    @property
    def share(self) -> float:
        """Fraction of the time that has passed; 0 without a limit."""
        if self.minutes is None:
            return 0.0
        return (perf_counter() - self._started) / (60 * self.minutes)

    @property
    def is_over(self) -> bool:
        """Whether all of it has passed."""
        return self.share >= 1.0

    def limited(self, seconds: float) -> float:
        """The given time, but not more than is left."""
        if self.minutes is None:
            return seconds
        return max(0.0, min(seconds, 60 * self.minutes - (perf_counter() - self._started)))


class Pace:
    """Estimates how long the rest of a phase takes, from the time between the ends of its last steps.

    Validations and checkpoints between steps are part of that time.
    """

    def __init__(self) -> None:
        self._ends: deque[float] = deque([perf_counter()], maxlen=PACE_STEPS + 1)

    def step(self) -> None:
        """A step has ended."""
        self._ends.append(perf_counter())

    def seconds_for(self, num_steps: int) -> float:
        """Time for this many further steps; at least one step must have ended."""
        return (self._ends[-1] - self._ends[0]) / (len(self._ends) - 1) * num_steps
