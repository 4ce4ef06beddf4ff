"""Agents: async functions that solve a task by calling a client. Shipped ones by name, others from files.

    async def agent(task, client) -> Outcome:
        messages = [{"role": "user", "content": task.question}]
        completion = await client.chat.completions.create(messages=messages)
        return Outcome(answer=completion.choices[0].message.content)

    agent = open_agent("calculator", {"max_turns": 6})
    agent = open_agent("my_agent.py:agent")
    agent = open_agent("command:python my_agent.py")     # a program, see `command`

An agent with settings has a parameter `settings` whose default is an instance of a class derived from
`memagent.config.Settings`; that class validates what the user sets.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from importlib import import_module
from numbers import Real
from typing import Any, TypeVar

from memagent.config import Settings
from memagent.errors import ConfigError
from memagent.names import hint
from memagent.plugins import is_file_spec, load_function
from memagent.rl.agents.client import Client
from memagent.rl.agents.command import CommandSettings, command_agent, is_command
from memagent.rl.types import Outcome

S = TypeVar("S", bound=Settings)
Agent = Callable[[Any, Client], Awaitable[Outcome]]

AGENTS: dict[str, str] = {
    "single": "memagent.rl.agents.single:agent",
    "calculator": "memagent.rl.agents.calculator:agent",
    "memory": "memagent.rl.agents.memory:agent",
}
"""Name to `module:function`; imported when used."""
PARAMETERS = ("task", "client")


def open_agent(spec: str, settings: Mapping[str, Any] | None = None) -> Agent:
    """An agent by name, from a file as `path.py:function`, or a program as `command:PROGRAM`."""
    if is_command(spec):
        return command_agent(spec, CommandSettings.parse(dict(settings or {})))
    if is_file_spec(spec):
        function = load_function(spec, what="agent", parameters=PARAMETERS)
    elif spec in AGENTS:
        module, name = AGENTS[spec].split(":")
        function = getattr(import_module(module), name)
    else:
        raise ConfigError(
            f"there is no agent {spec!r}; {hint(spec, AGENTS)}, path.py:function, or command:PROGRAM"
        )
    if not inspect.iscoroutinefunction(function):
        raise ConfigError(f"{spec} is not async; write it as async def, and await the client")
    return _with_settings(spec, function, dict(settings or {}))


def _with_settings(spec: str, function: Callable[..., Any], settings: dict[str, Any]) -> Agent:
    parameter = inspect.signature(function).parameters.get("settings")
    default = parameter.default if parameter else None
    if isinstance(default, Settings):
        return partial(function, settings=with_defaults(default, settings))
    if settings:
        names = ", ".join(settings)
        raise ConfigError(f"the agent {spec} has no settings; remove {names}")
    return function


def with_defaults(default: S, settings: Mapping[str, Any]) -> S:
    """Settings of an agent: those given, and the agent's own defaults for the others."""
    kept = default.model_dump(exclude_unset=True)
    return type(default).parse({**kept, **settings})


def check_outcome(outcome: object) -> Outcome:
    """What an agent returned, as an Outcome. Raises ConfigError when it is something else."""
    if not isinstance(outcome, Outcome) or not isinstance(outcome.answer, str):
        what = type(outcome).__name__
        if isinstance(outcome, Outcome):
            what = f"Outcome(answer={type(outcome.answer).__name__})"
        raise ConfigError(f"the agent returned {what}; return Outcome(answer=TEXT)")
    reported: Mapping[str, object] = outcome.metrics
    for name, value in reported.items():
        if not isinstance(value, Real):
            raise ConfigError(
                f"the agent returned {type(value).__name__} as its metric {name!r}; metrics are numbers"
            )
    try:
        json.dumps(dict(outcome.record))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"the record of an outcome must be plain JSON: {error}") from None
    return outcome
