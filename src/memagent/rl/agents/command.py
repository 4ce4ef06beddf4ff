"""An agent that is a program: `command:python my_agent.py`. Any language, any framework with an OpenAI client.

    standard input     {"id": ..., "question": ..., "text": ...}
    environment        OPENAI_BASE_URL, OPENAI_API_KEY: the endpoint of this rollout
    standard output    the answer; or as the last line {"answer": ..., "reward": ..., "metrics": {...}}

The program calls the endpoint as any other and its calls are recorded. It is started once for each rollout. A
program that fails after a reply has failed by the reply, as a function that raises would have.

An agent in Python may have the same endpoint, for a framework:

    async def agent(task, client) -> Outcome:
        async with endpoint_of(client) as endpoint:
            model = ChatOpenAI(base_url=endpoint.base_url, api_key=endpoint.api_key)   # or any other program
            ...

All rollouts of an event loop share one server on this machine, which is there while any of them needs it; each
has a key of its own. Calls go through the client, so they are sampled, seeded and recorded as those of an agent
that calls the client itself.
"""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import shutil
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from pydantic import Field

from memagent.config import Settings
from memagent.errors import ConfigError, MemagentError, plain
from memagent.launcher import end_group, watched
from memagent.plugins import require
from memagent.rl.agents.client import Client
from memagent.rl.types import AgentTask, Outcome

if TYPE_CHECKING:
    from memagent.serve.agents import AgentCall, AgentReplies, AgentServer

LIBRARIES = ("fastapi", "uvicorn", "prometheus_client")


@dataclass(slots=True, kw_only=True)
class RolloutEndpoint:
    """Where the agent of a rollout sends its calls."""

    base_url: str
    api_key: str
    error: MemagentError | None = None
    """Why the last call failed; None where it did not."""


@asynccontextmanager
async def endpoint_of(client: Client, *, port: int = 0) -> AsyncIterator[RolloutEndpoint]:
    """An endpoint for the calls of one rollout, while the block runs.

    `port` is that of the server; 0 takes any free one. It counts where no other rollout has opened the server.
    """
    endpoint = RolloutEndpoint(base_url="", api_key="")

    async def answer(call: AgentCall) -> AgentReplies:
        endpoint.error = None
        try:
            return await _replies(client, call)
        except MemagentError as error:
            endpoint.error = error
            raise

    async with _shared_server(port) as server:
        with server.admitted(answer) as key:
            endpoint.base_url, endpoint.api_key = server.base_url, key
            yield endpoint


async def _replies(client: Client, call: AgentCall) -> AgentReplies:
    from memagent.serve.agents import AgentReplies

    completion = await client.chat.completions.create(
        messages=call.messages,
        max_tokens=call.max_tokens,
        temperature=call.temperature,
        top_p=call.top_p,
        stop=call.stop,
        n=call.n,
    )
    return AgentReplies(
        model=completion.model,
        replies=tuple(
            (choice.message.content, choice.finish_reason) for choice in completion.choices
        ),
        prompt_tokens=completion.usage.prompt_tokens,
        completion_tokens=completion.usage.completion_tokens,
    )


# --- the server that rollouts share -----------------------------------------------------------------


class _SharedServer:
    """Opened by the first rollout that needs it, and closed by the last."""

    def __init__(self) -> None:
        self._changing = asyncio.Lock()
        self._num_users = 0
        self._stack = AsyncExitStack()
        self._server: AgentServer | None = None

    async def enter(self, port: int) -> AgentServer:
        async with self._changing:
            if self._server is None:
                for library in LIBRARIES:
                    require(
                        library,
                        f'agents behind an endpoint need {library}; pip install "memagent[serve]"',
                    )
                from memagent.serve.agents import serving_agents

                self._server = await self._stack.enter_async_context(serving_agents(port=port))
            self._num_users += 1
            return self._server

    async def leave(self) -> None:
        async with self._changing:
            self._num_users -= 1
            if not self._num_users:
                self._server = None
                await self._stack.aclose()


_servers: WeakKeyDictionary[asyncio.AbstractEventLoop, _SharedServer] = WeakKeyDictionary()


@asynccontextmanager
async def _shared_server(port: int) -> AsyncIterator[AgentServer]:
    shared = _servers.setdefault(asyncio.get_running_loop(), _SharedServer())
    server = await shared.enter(port)
    try:
        yield server
    finally:
        await asyncio.shield(shared.leave())


PREFIX = "command:"
POLL_SECONDS = 0.5
MAX_OUTPUT = 1_000_000
"""Characters of output that are looked at; an answer is at the end."""


class CommandSettings(Settings):
    """How programs are started."""

    max_processes: int | None = Field(default=None, ge=1)
    """Programs that run at once, at most; four for each core when not given."""
    port: int = Field(default=0, ge=0, le=65535)
    """Port of the endpoint that programs call; 0 takes any free one."""


class AgentProgramError(Exception):
    """A program that ended with an error, or without an answer."""


def is_command(spec: str) -> bool:
    """Whether the name of an agent means a program."""
    return spec.startswith(PREFIX)


def command_agent(spec: str, settings: CommandSettings) -> partial[Any]:
    """The agent that runs a program."""
    try:
        arguments = shlex.split(spec.removeprefix(PREFIX))
    except ValueError as error:
        raise ConfigError(f"{spec} is no command: {error}") from None
    if not arguments:
        raise ConfigError(f"name a program after {PREFIX}, such as `{PREFIX}python my_agent.py`")
    return partial(_agent, arguments=arguments, settings=settings)


async def _agent(
    task: AgentTask, client: Client, *, arguments: list[str], settings: CommandSettings
) -> Outcome:
    async with _slots(settings), endpoint_of(client, port=settings.port) as endpoint:
        output = await _output(arguments, _described(task), endpoint)
    return _outcome(output)


def _described(task: AgentTask) -> bytes:
    """What a program gets of its task: never the accepted answers."""
    text = getattr(task, "text", None)
    values = {
        "id": task.id,
        "question": getattr(task, "question", ""),
        "text": text() if callable(text) else "",
    }
    return json.dumps(values).encode() + b"\n"


async def _output(arguments: list[str], task: bytes, endpoint: RolloutEndpoint) -> str:
    """What the program writes. Raises what made it fail."""
    environment = {
        **os.environ,
        "OPENAI_BASE_URL": endpoint.base_url,
        "OPENAI_API_KEY": endpoint.api_key,
    }
    if shutil.which(arguments[0]) is None:
        raise ConfigError(f"cannot run {arguments[0]}: there is no such program")
    theirs, ours = os.pipe()
    try:
        process = await asyncio.create_subprocess_exec(
            *watched(theirs, 0.0),
            *arguments,
            stdin=PIPE,
            stdout=PIPE,
            stderr=PIPE,
            env=environment,
            start_new_session=True,
            pass_fds=(theirs,),
        )
        ended = asyncio.ensure_future(_end_rest(process))
        try:
            written, errors = await process.communicate(task)
        finally:
            ended.cancel()
            end_group(process.pid)
            await process.wait()
    finally:
        os.close(theirs)
        os.close(ours)
    if process.returncode:
        if endpoint.error is not None:
            raise endpoint.error
        said = plain(errors.decode("utf-8", "replace").strip().rpartition("\n")[2]) or "no message"
        raise AgentProgramError(f"{arguments[0]} ended with code {process.returncode}: {said}")
    return written.decode("utf-8", "replace")[-MAX_OUTPUT:]


async def _end_rest(process: Process) -> None:
    """End what keeps the output open when the watchdog is gone, which may have been killed."""
    while process.returncode is None:
        await asyncio.sleep(POLL_SECONDS)
    end_group(process.pid)


def _outcome(output: str) -> Outcome:
    text = output.strip()
    try:
        found = json.loads(text.rpartition("\n")[2])
    except ValueError:
        found = None
    if not isinstance(found, dict) or not isinstance(found.get("answer"), str):
        return Outcome(answer=text)
    return Outcome(
        answer=found["answer"], reward=found.get("reward"), metrics=found.get("metrics") or {}
    )


_semaphores: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[int, asyncio.Semaphore]] = (
    WeakKeyDictionary()
)


def _slots(settings: CommandSettings) -> asyncio.Semaphore:
    """Places for programs, shared by the rollouts of an event loop."""
    number = settings.max_processes or 4 * (os.cpu_count() or 1)
    mine = _semaphores.setdefault(asyncio.get_running_loop(), {})
    return mine.setdefault(number, asyncio.Semaphore(number))
