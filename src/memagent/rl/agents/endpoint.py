"""The client of a rollout as an HTTP endpoint, for agents of any framework and in any process.

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
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from memagent.errors import MemagentError
from memagent.extras import require
from memagent.rl.agents.client import Client

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
