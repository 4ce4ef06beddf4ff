"""Demonstrations for the warm start: an agent, played with the right replies.

    Example ── rule for the agent's replies ──▶ the agent itself, on a scripted engine ──▶ Conversation*

    show = demonstrations_for("calculator", tokenizer=open_tokenizer("./my-model"))
    show(problem(0, seed=7))         # [system, problem, <calc>..., result, \\boxed{...}]

The agent that will be trained builds the prompts, so they are exactly those of its rollouts. What exceeds
the agent's limits is refused, never shortened.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from memagent import blocking
from memagent.data.example import Example
from memagent.documents.tokenizers import ByteTokenizer, Tokenizer
from memagent.engines.scripted import ScriptedEngine
from memagent.errors import ConfigError, DataError
from memagent.plugins import is_file_spec
from memagent.rl.agents import memory
from memagent.rl.agents.api import AGENTS, Agent, open_agent, with_defaults
from memagent.rl.agents.client import Client
from memagent.rl.agents.expressions import calculate
from memagent.rl.agents.session import Session
from memagent.rl.types import Outcome
from memagent.rl.warmstart import traces
from memagent.rl.warmstart.conversations import Conversation
from memagent.types import Message, Sampling

NO_LIMIT = 1 << 30
MEMORY_LIMITS = ("chunk_tokens", "memory_tokens", "answer_tokens")

Demonstrations = Callable[[Example], list[Conversation]]
"""The conversations of an example, with replies that lead to a right answer."""


def demonstrations_for(
    agent: str, settings: Mapping[str, Any] | None = None, *, tokenizer: Tokenizer
) -> Demonstrations:
    """Demonstrations of an agent. `tokenizer` is the model's, to check the agent's limits."""
    if is_file_spec(agent):
        raise ConfigError(
            f"there is no rule for the replies of {agent}; use files of conversations for its warm start"
        )
    opened = open_agent(agent, settings)  # checks the name and the settings
    if agent == "memory":
        config = with_defaults(memory.DEFAULTS, settings or {})
        return partial(traces.conversations, config=config, tokenizer=tokenizer)
    return partial(_played, opened, REPLIES[agent], tokenizer)


def texts_for(agent: str, settings: Mapping[str, Any] | None, example: Example) -> list[str]:
    """All texts of an example's demonstrations, whatever the limits: to train a tokenizer on."""
    if agent not in AGENTS:
        return [example.text(), example.question, *example.answers]
    limits = MEMORY_LIMITS if agent == "memory" else ("max_tokens",)
    values = {**(settings or {}), **dict.fromkeys(limits, NO_LIMIT)}
    if agent == "memory":
        values["window"] = 4 * NO_LIMIT
    found = demonstrations_for(agent, values, tokenizer=ByteTokenizer())(example)
    texts = [message["content"] for one in found for message in one.messages]
    return [*texts, traces.NOTHING_YET] if agent == "memory" else texts


# --- replies by rule --------------------------------------------------------------------------------


def calculation(example: Example) -> list[str]:
    """Send the whole expression to the calculator, then answer with its result."""
    expression = example.metadata.get("expression")
    if not isinstance(expression, str):
        raise DataError(
            f"{example.id} has no expression in its metadata; the calculator has demonstrations for "
            "tasks of arithmetic only"
        )
    return [f"<calc>{expression}</calc>", _boxed(calculate(expression))]


def answer(example: Example) -> list[str]:
    """Answer at once."""
    if not example.answers:
        raise DataError(f"{example.id} has no accepted answer to demonstrate")
    answers = example.answers if example.match == "all" else example.answers[:1]
    return [_boxed(", ".join(answers))]


REPLIES: dict[str, Callable[[Example], list[str]]] = {"calculator": calculation, "single": answer}
"""The replies of the model in order, by agent. Those of the memory agent are in `traces.py`."""


def _boxed(text: str) -> str:
    return f"\\boxed{{{text}}}"


def _played(
    agent: Agent, rule: Callable[[Example], list[str]], tokenizer: Tokenizer, example: Example
) -> list[Conversation]:
    """The last prompt of an agent that gets these replies, and the last reply."""
    replies = rule(example)
    upcoming = iter(replies)

    def script(messages: Sequence[Message], sampling: Sampling) -> str:
        reply = next(upcoming)
        num_tokens = tokenizer.count(reply) + 1  # the end-of-reply token
        if num_tokens > sampling.max_tokens:
            raise ConfigError(
                f"{example.id}: its reply has {num_tokens} tokens, more than the agent's "
                f"`max_tokens={sampling.max_tokens}`; raise `max_tokens`"
            )
        return reply

    engine = ScriptedEngine(script)
    session = Session(engine, task_id=example.id, index=0, seed=0, needs_tokens=False)
    blocking.run(_outcome(agent, example, Client(session)))
    if len(engine.prompts) < len(replies):
        raise ConfigError(
            f"{example.id} takes {len(replies)} replies, and the agent asks for "
            f"{len(engine.prompts)}; raise `max_turns`"
        )
    last: Message = {"role": "assistant", "content": replies[-1]}
    return [Conversation(id=example.id, messages=(*engine.prompts[-1], last))]


async def _outcome(agent: Agent, example: Example, client: Client) -> Outcome:
    return await agent(example, client)
