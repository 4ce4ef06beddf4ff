"""The memory reader: `Reader.steps` itself, each read a call of its own."""

from __future__ import annotations

from contextlib import suppress

from pydantic import Field

from memagent.agent.reader import Reader
from memagent.agent.trace import Step
from memagent.config import AgentConfig
from memagent.data.example import Example
from memagent.errors import EmptyAnswer
from memagent.rl.agents.client import Client, ClientEngine
from memagent.rl.agents.sections import sections_of, tokenizer_of
from memagent.rl.types import Outcome


class MemorySettings(AgentConfig):
    """How the text is read, and how long it may be."""

    max_sections: int | None = Field(default=None, ge=1)
    """Sections a text may have, at most; longer ones are refused. No limit when not given."""


DEFAULTS = MemorySettings(prompts="boxed")


async def agent(task: Example, client: Client, settings: MemorySettings = DEFAULTS) -> Outcome:
    """Read the text of the task section by section and answer its question."""
    tokenizer = tokenizer_of(client.tokenizer)
    reader = Reader(ClientEngine(client), tokenizer=tokenizer, config=settings)
    chunks = sections_of(
        task,
        client.tokenizer,
        chunk_tokens=settings.chunk_tokens,
        max_sections=settings.max_sections,
    )
    steps: list[Step] = []
    with suppress(EmptyAnswer):  # it is wrong, and that is to be learnt
        async for step in reader.steps(task.question, chunks):
            steps.append(step)
    reads = [step for step in steps if step.kind == "read"]
    flags = [flag for step in reads for flag in step.flags]
    return Outcome(
        answer=steps[-1].reply if len(steps) > len(reads) else "",
        metrics={
            "sections": len(reads),
            "memory_tokens": sum(step.usage.completion_tokens for step in reads) / len(reads),
            "cut_memories": flags.count("reply_cut") + flags.count("memory_cut"),
            "kept_memories": flags.count("memory_kept"),
        },
        record={"memories": [step.memory for step in reads]},
    )
