"""The memory reader: `Reader.steps` itself, each read a call of its own."""

from __future__ import annotations

from contextlib import suppress
from functools import lru_cache

from memagent.agent.reader import Reader
from memagent.agent.trace import Step
from memagent.config import AgentConfig
from memagent.data.example import Example
from memagent.documents.chunking import Chunks
from memagent.documents.document import Document
from memagent.documents.tokenizers import Tokenizer, tokenizer_for_model
from memagent.errors import EmptyAnswer
from memagent.rl.client import Client, ClientEngine
from memagent.rl.types import Outcome

DEFAULTS = AgentConfig(prompts="boxed")


async def agent(task: Example, client: Client, settings: AgentConfig = DEFAULTS) -> Outcome:
    """Read the text of the task section by section and answer its question."""
    tokenizer = _tokenizer(client.tokenizer)
    reader = Reader(ClientEngine(client), tokenizer=tokenizer, config=settings)
    chunks = _chunks(task.text(), client.tokenizer, settings.chunk_tokens)
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


@lru_cache(maxsize=4)
def _tokenizer(name: str) -> Tokenizer:
    """Opened once, not for each rollout."""
    return tokenizer_for_model(name)[0]


@lru_cache(maxsize=256)
def _chunks(text: str, tokenizer: str, chunk_tokens: int) -> Chunks:
    """Cut once for all rollouts of a group."""
    return Chunks(Document.from_text(text), _tokenizer(tokenizer), chunk_tokens)
