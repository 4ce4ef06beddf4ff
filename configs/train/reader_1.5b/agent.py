"""The agent of `facts.toml`: it reads the text of a task, or answers from a memory that the task already has.

A task with `metadata.memory` (`collect_memories.py` writes them) is one call: a step of training sees many more answers, from
memories as long texts leave them, for the tokens of one text.
"""

from __future__ import annotations

from memagent.agent.prompts import open_prompts
from memagent.data.example import Example
from memagent.rl.agents import memory as reading
from memagent.rl.agents.client import Client
from memagent.rl.agents.memory import MemorySettings
from memagent.rl.types import Outcome


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
