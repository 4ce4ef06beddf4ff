"""Demonstrations: conversations that show an agent what good replies are, for the warm start.

    Example ── rule for the agent's replies ──▶ the agent itself, with these replies ──▶ Conversation*
    file of conversations ──▶ read_conversations ──▶ those of one example together

    show = demonstrations_for("calculator", {}, tokenizer=open_tokenizer("./my-model"))
    show(problem(0, seed=7))         [system, problem, <calc>..., result, \\boxed{...}]

The agent that is trained builds the prompts here too, so they are the ones it will meet, byte for byte.
What does not fit the agent's limits is refused, never shortened.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

from memagent import blocking
from memagent.config import AgentConfig
from memagent.data.example import Example
from memagent.data.formats.json_stream import place, read_records
from memagent.documents.tokenizers import ByteTokenizer, Tokenizer
from memagent.engines.scripted import ScriptedEngine
from memagent.errors import ConfigError, DataError
from memagent.plugins import is_file_spec
from memagent.rl.agents import memory
from memagent.rl.agents.api import AGENTS, Agent, open_agent, with_defaults
from memagent.rl.agents.client import Client, plain_message
from memagent.rl.agents.expressions import calculate
from memagent.rl.agents.session import Session
from memagent.rl.types import Outcome
from memagent.rl.warmstart import traces
from memagent.types import Message, Sampling

ROLES = ("system", "user", "assistant", "tool")
NO_LIMIT = 1 << 30
MEMORY_LIMITS = ("chunk_tokens", "memory_tokens", "answer_tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """What was said, and what should be said: the assistant's messages are learnt.

    Example: Conversation(id="capital/0", messages=({"role": "user", ...}, {"role": "assistant", ...}))
    """

    id: str
    """Of the example; one example may have several conversations, such as one per section."""
    messages: tuple[Message, ...]


Demonstrations = Callable[[Example], list[Conversation]]
"""The conversations of an example, with replies that lead to a right answer."""


def demonstrations_for(
    agent: str, settings: Mapping[str, Any] | None = None, *, tokenizer: Tokenizer
) -> Demonstrations:
    """What shows an agent how to solve tasks. `tokenizer` counts as the model does."""
    if is_file_spec(agent):
        raise ConfigError(
            f"no right replies are known for {agent}; give files of conversations to warm it up"
        )
    opened = open_agent(agent, settings)  # says what is wrong with a name or a setting
    if agent == "memory":
        return partial(_read, with_defaults(memory.DEFAULTS, settings or {}), tokenizer)
    return partial(_played, opened, REPLIES[agent], tokenizer)


def texts_for(agent: str, settings: Mapping[str, Any] | None, example: Example) -> list[str]:
    """All that is said about an example, whatever the limits: what a tokenizer can be made from."""
    if agent not in AGENTS:
        return [example.text(), example.question, *example.answers]
    limits = MEMORY_LIMITS if agent == "memory" else ("max_tokens",)
    values = {**(settings or {}), **dict.fromkeys(limits, NO_LIMIT)}
    if agent == "memory":
        values["window"] = 4 * NO_LIMIT
    found = demonstrations_for(agent, values, tokenizer=ByteTokenizer())(example)
    said = [message["content"] for one in found for message in one.messages]
    return [*said, traces.NOTHING_YET] if agent == "memory" else said


def read_conversations(path: Path) -> list[tuple[Conversation, ...]]:
    """The conversations of a file, those of one example together.

    A line has `messages`, and an `id` where it belongs to an example, as `memagent data traces` writes
    them. Without an id it stands alone.
    """
    found = list(_conversations(path))
    if not found:
        raise DataError(f"{path} holds no conversation")
    return [tuple(group) for _, group in groupby(found, key=lambda one: one.id)]


# --- replies by rule --------------------------------------------------------------------------------


def calculation(example: Example) -> list[str]:
    """Ask the calculator for the whole expression, then give its result."""
    expression = example.metadata.get("expression")
    if not isinstance(expression, str):
        raise DataError(
            f"{example.id} has no expression in its metadata; the calculator is shown how to solve "
            "tasks of arithmetic only"
        )
    return [f"<calc>{expression}</calc>", _boxed(calculate(expression))]


def answer(example: Example) -> list[str]:
    """Say the answer."""
    if not example.answers:
        raise DataError(f"{example.id} has no accepted answer to be shown")
    given = example.answers if example.match == "all" else example.answers[:1]
    return [_boxed(", ".join(given))]


REPLIES: dict[str, Callable[[Example], list[str]]] = {"calculator": calculation, "single": answer}
"""What the model should say, one reply after the other, by agent."""


def _boxed(text: str) -> str:
    return f"\\boxed{{{text}}}"


def _read(config: AgentConfig, tokenizer: Tokenizer, example: Example) -> list[Conversation]:
    steps = traces.conversations(example, config=config, tokenizer=tokenizer)
    return [Conversation(id=step.id, messages=step.messages) for step in steps]


def _played(
    agent: Agent, rule: Callable[[Example], list[str]], tokenizer: Tokenizer, example: Example
) -> list[Conversation]:
    """Run the agent with given replies; what it has sent at last, and the last reply."""
    replies = rule(example)
    upcoming = iter(replies)

    def script(messages: Sequence[Message], sampling: Sampling) -> str:
        reply = next(upcoming)
        num_tokens = tokenizer.count(reply) + 1  # and the one that ends it
        if num_tokens > sampling.max_tokens:
            raise ConfigError(
                f"{example.id}: its reply takes {num_tokens} tokens, more than "
                f"max_tokens={sampling.max_tokens} of the agent; raise max_tokens"
            )
        return reply

    engine = ScriptedEngine(script)
    session = Session(engine, task_id=example.id, index=0, seed=0, needs_tokens=False)
    blocking.run(_outcome(agent, example, Client(session)))
    if len(engine.prompts) < len(replies):
        raise ConfigError(
            f"{example.id} takes {len(replies)} replies, and the agent asks for "
            f"{len(engine.prompts)}; raise max_turns"
        )
    last: Message = {"role": "assistant", "content": replies[-1]}
    return [Conversation(id=example.id, messages=(*engine.prompts[-1], last))]


async def _outcome(agent: Agent, example: Example, client: Client) -> Outcome:
    return await agent(example, client)


# --- files ------------------------------------------------------------------------------------------


def _conversations(path: Path) -> Iterator[Conversation]:
    for number, record in read_records(path):
        where = place(path, number)
        if not isinstance(record, dict):
            raise DataError(f"{where}: a conversation is an object with messages")
        yield Conversation(
            id=str(record.get("id", where)), messages=_messages(record.get("messages"), where)
        )


def _messages(found: object, where: str) -> tuple[Message, ...]:
    if not isinstance(found, list) or not found:
        raise DataError(f"{where}: there are no messages")
    messages = tuple(_message(one, where) for one in found)
    if messages[0]["role"] == "assistant":
        raise DataError(f"{where}: the assistant speaks first, and has nothing to reply to")
    if not any(message["role"] == "assistant" for message in messages):
        raise DataError(f"{where}: the assistant says nothing, so there is nothing to learn")
    return messages


def _message(found: object, where: str) -> Message:
    try:
        message = plain_message(found) if isinstance(found, dict) else None
    except ConfigError as error:
        raise DataError(f"{where}: {error}") from None
    if message is None:
        raise DataError(f"{where}: a message is an object with role and content")
    if message["role"] not in ROLES:
        raise DataError(f"{where}: there is no role {message['role']!r}; use {', '.join(ROLES)}")
    return message
