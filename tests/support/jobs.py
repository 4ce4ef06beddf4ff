"""Tasks for agents in tests."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A task that says how many turns an agent takes."""

    id: str
    num_turns: int = 1


def jobs(count: int) -> list[Job]:
    """Jobs of 1, 2, 3 ... turns."""
    return [Job(id=f"job{number}", num_turns=number + 1) for number in range(count)]
