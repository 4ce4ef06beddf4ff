"""Several turns with a tool: the model may use a calculator before it answers.

Model:  <calc>(14 + 9) * 3</calc>       Tool:  69       Model:  \\boxed{69}
"""

from __future__ import annotations

import re

from pydantic import Field

from memagent.config import Settings
from memagent.data.example import Example
from memagent.rl.agents.client import ChatMessage, Client
from memagent.rl.agents.expressions import calculation_reply, is_error
from memagent.rl.types import Outcome

SYSTEM = (
    "Solve the problem. For a calculation write <calc>EXPRESSION</calc> and stop; its result is the "
    "next message. When you know the answer, write it as \\boxed{NUMBER}."
)
_request = re.compile(r"<calc>(.*?)</calc>", re.DOTALL)


class CalculatorSettings(Settings):
    """Limits of the conversation."""

    max_turns: int = Field(default=6, ge=1)
    """Replies of the model, at most."""
    max_tokens: int = Field(default=128, ge=1)
    """Upper limit of tokens in one reply."""


DEFAULTS = CalculatorSettings()


async def agent(task: Example, client: Client, settings: CalculatorSettings = DEFAULTS) -> Outcome:
    """Let the model calculate until it answers or reaches `max_turns`."""
    messages = [
        ChatMessage(role="system", content=SYSTEM),
        ChatMessage(role="user", content=task.question),
    ]
    results: list[str] = []
    for _ in range(settings.max_turns):
        completion = await client.chat.completions.create(
            messages=messages, max_tokens=settings.max_tokens
        )
        messages.append(completion.choices[0].message)
        request = _request.search(messages[-1].content)
        if request is None:
            break
        results.append(calculation_reply(request[1]))
        messages.append(ChatMessage(role="user", content=results[-1]))
    return Outcome(
        answer=messages[-1].content if messages[-1].role == "assistant" else "",
        metrics={"results": len(results), "errors": sum(map(is_error, results))},
        record={"messages": [[message.role, message.content] for message in messages]},
    )
