"""collecting(tasks, agent, engine, group_size=2, seed=3, num_groups=6): a collection in one call."""

from collections.abc import Iterable
from dataclasses import fields
from typing import Any

from memagent.rl.rollouts.collect import Collection, RolloutSpec
from memagent.rl.types import AgentTask
from memagent.types import Engine

OF_SPEC = frozenset(field.name for field in fields(RolloutSpec))


def collecting(
    tasks: Iterable[AgentTask], agent: Any, engine: Engine, **options: Any
) -> Collection:
    """Options of the spec and of `Collection`, separated by name."""
    spec = {name: value for name, value in options.items() if name in OF_SPEC}
    others = {name: value for name, value in options.items() if name not in OF_SPEC}
    return Collection(tasks, engine, RolloutSpec(agent=agent, **spec), **others)
