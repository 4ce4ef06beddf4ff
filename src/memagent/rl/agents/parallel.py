"""Parallel reading as an agent: notes on all sections at once, merges, and rounds while something is missing."""

from __future__ import annotations

from dataclasses import replace

from memagent.config import ReadingMode
from memagent.data.example import Example
from memagent.rl.agents import memory
from memagent.rl.agents.client import Client
from memagent.rl.types import Outcome


class ParallelSettings(memory.MemorySettings):
    """How the text is read, and how long it may be."""

    mode: ReadingMode = "parallel"
    """How sections are read; as for the memory agent, which reads them in order."""


DEFAULTS = ParallelSettings(prompts="boxed")


async def agent(task: Example, client: Client, settings: ParallelSettings = DEFAULTS) -> Outcome:
    """Read all sections of the task's text at once, merge what was noted, and answer its question."""
    outcome = await memory.agent(task, client, settings)
    steps = outcome.trace.steps if outcome.trace else ()
    reads = [step for step in steps if step.kind == "read"]
    return replace(
        outcome,
        metrics={
            **outcome.metrics,
            "merges": sum(step.kind == "merge" for step in steps),
            "noted_sections": sum("nothing" not in step.flags for step in reads),
        },
    )
