"""One question, one reply: the smallest agent."""

from __future__ import annotations

from pydantic import Field

from memagent.config import Settings
from memagent.data.example import Example
from memagent.rl.agents.client import Client
from memagent.rl.types import Outcome
from memagent.types import Message


class SingleSettings(Settings):
    """Wording and limit of the request."""

    system: str | None = None
    """System message; none when not given."""
    request: str = "Put the final answer in \\boxed{}."
    """Instruction below the question."""
    max_tokens: int = Field(default=512, ge=1)
    """Upper limit of tokens in the reply."""


DEFAULTS = SingleSettings()


async def agent(task: Example, client: Client, settings: SingleSettings = DEFAULTS) -> Outcome:
    """Ask the question, after the text if there is one."""
    parts = [task.text(), task.question, settings.request]
    messages: list[Message] = []
    if settings.system is not None:
        messages.append({"role": "system", "content": settings.system})
    messages.append({"role": "user", "content": "\n\n".join(filter(None, parts))})
    completion = await client.chat.completions.create(
        messages=messages, max_tokens=settings.max_tokens
    )
    reply = completion.choices[0]
    return Outcome(
        answer=reply.message.content, metrics={"is_cut": float(reply.finish_reason == "length")}
    )
