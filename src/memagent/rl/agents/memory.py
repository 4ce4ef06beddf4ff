"""The memory reader as an agent: `Reader.steps` itself, each step one call of the rollout."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from pydantic import Field

from memagent.agent.reader import Reader
from memagent.agent.trace import Step
from memagent.config import AgentConfig, SectionEnds
from memagent.data.example import Example
from memagent.documents.chunking import Chunks
from memagent.documents.document import Document
from memagent.documents.tokenizers import Tokenizer, tokenizer_for_model
from memagent.errors import ConfigError, EmptyAnswer
from memagent.rewards.evidence import recall
from memagent.rl.agents.client import Client
from memagent.rl.types import Outcome


class MemorySettings(AgentConfig):
    """How the text is read, and how long it may be."""

    max_sections: int | None = Field(default=None, ge=1)
    """Sections a text may have, at most; longer ones are refused. No limit when not given."""


DEFAULTS = MemorySettings(prompts="boxed")


async def agent(task: Example, client: Client, settings: MemorySettings = DEFAULTS) -> Outcome:
    """Read the text of the task section by section and answer its question."""
    session = client.session
    reader = Reader(session, tokenizer=_tokenizer(client.tokenizer), config=settings)
    sections = _sections(task, client.tokenizer, settings)
    steps: list[Step] = []
    try:
        async for step in reader.steps(task.question, sections):
            steps.append(step)
    except EmptyAnswer:  # a wrong answer like any other, not a failure
        steps.append(_empty_answer(steps, session.steps[-1]))
    reads = steps[:-1]
    flags = [flag for step in reads for flag in step.flags]
    found = recall([item.text for item in task.evidence], [step.memory for step in reads])
    return Outcome(
        answer=steps[-1].reply,
        trace=reader.trace(task.question, sections.document, steps),
        metrics={
            "sections": len(reads),
            "memory_tokens": sum(step.usage.completion_tokens for step in reads) / len(reads),
            "cut_memories": flags.count("reply_cut") + flags.count("memory_cut"),
            "kept_memories": flags.count("memory_kept"),
            **(found._asdict() if found else {}),
        },
    )


def _empty_answer(reads: list[Step], call: Step) -> Step:
    """The step of an answer that holds no text, or nothing but reasoning."""
    reasoning = call.reasoning or call.reply.strip() or None
    return replace(
        call,
        kind="answer",
        index=len(reads),
        reply="",
        memory=reads[-1].memory,
        reasoning=reasoning,
    )


def _sections(task: Example, tokenizer: str, settings: MemorySettings) -> Chunks:
    """The sections of a task's text, which all rollouts of its group share."""
    sections = _cut(task.id, task.text(), tokenizer, settings.chunk_tokens, settings.section_ends)
    limit = settings.max_sections
    if limit is not None and sections.get(limit) is not None:
        raise ConfigError(
            f"the text of {task.id} has {sections.total()} sections, more than `max_sections={limit}`; "
            "raise it or `chunk_tokens`, or use shorter texts"
        )
    return sections


@lru_cache(maxsize=256)
def _cut(source: str, text: str, tokenizer: str, chunk_tokens: int, ends: SectionEnds) -> Chunks:
    document = Document.from_text(text, source=source)
    return Chunks(document, _tokenizer(tokenizer), chunk_tokens, ends=ends)


@lru_cache(maxsize=4)
def _tokenizer(name: str) -> Tokenizer:
    return tokenizer_for_model(name)[0]
