"""The agent of `facts.toml` and `answers.toml`: it reads the text of a task, or answers from a memory that the task already has.

A task with `metadata.memory` (`prepare.py` and `collect_memories.py` write them) is one call: a step of training sees many
more answers, from memories as long texts leave them, for the tokens of one text. `reward` also counts the words of an answer
that is not exact: without it most groups of hard questions have equal rewards and teach nothing.
"""

from __future__ import annotations

from memagent.agent.prompts import open_prompts
from memagent.data.example import Example
from memagent.rl.agents import memory as reading
from memagent.rl.agents.client import Client
from memagent.rl.agents.memory import MemorySettings
from memagent.rl.agents.rewards import open_reward
from memagent.rl.types import Outcome

STRICT, OVERLAP = open_reward("strict"), open_reward("f1")


async def agent(
    task: Example, client: Client, settings: MemorySettings = reading.DEFAULTS
) -> Outcome:
    """Read and answer, or answer alone."""
    if "memory" not in task.metadata:
        return await reading.agent(task, client, settings)
    messages = open_prompts(settings.prompts).answer_messages(
        question=task.question,
        memory=task.metadata["memory"],
        num_sections=1,
        answer_tokens=settings.answer_tokens,
    )
    completion = await client.chat.completions.create(
        messages=messages, max_tokens=settings.answer_tokens
    )
    return Outcome(answer=completion.choices[0].message.content)


async def reward(task: Example, outcome: Outcome) -> float:
    """The mean of the strict grade and of the overlap of words."""
    return (await STRICT(task, outcome) + await OVERLAP(task, outcome)) / 2
