"""The memory reader as an agent: `Reader.steps` itself, each step one call of the rollout."""

from __future__ import annotations

from pydantic import Field

from memagent.agent.reader import Reader
from memagent.agent.trace import Step
from memagent.config import AgentConfig
from memagent.data.example import Example
from memagent.errors import EmptyAnswer
from memagent.rl.agents.client import Client
from memagent.rl.agents.readings import LongTexts, metrics_of, sections_of, tokenizer_of
from memagent.rl.types import Outcome


class MemorySettings(AgentConfig):
    """How the text is read, and how long it may be."""

    max_sections: int | None = Field(default=None, ge=1)
    """Sections a text may have, at most; no limit when not given."""
    long_texts: LongTexts = "refuse"
    """What happens to texts of more sections: they are refused, or cut_middle: their beginning and their end
    are read, and the middle is left out."""


DEFAULTS = MemorySettings(prompts="boxed")


async def agent(task: Example, client: Client, settings: MemorySettings = DEFAULTS) -> Outcome:
    """Read the text of the task section by section and answer its question."""
    session = client.session
    reader = Reader(session, tokenizer=tokenizer_of(client.tokenizer), config=settings)
    sections = sections_of(
        task,
        tokenizer=client.tokenizer,
        config=settings,
        max_sections=settings.max_sections,
        long_texts=settings.long_texts,
    )
    document = sections.chunks.document
    steps: list[Step] = []
    try:
        async for step in reader.steps(task.question, sections.chunks):
            steps.append(step)
    except EmptyAnswer as error:  # a wrong answer like any other, not a failure
        steps.append(error.step)
    trace = reader.trace(task.question, document, steps)
    return Outcome(
        answer=trace.answer or "",
        trace=trace,
        metrics={
            **metrics_of(task, trace, settings, is_cut=sections.is_cut),
            **({"cut_texts": float(sections.is_cut)} if settings.long_texts != "refuse" else {}),
        },
    )
