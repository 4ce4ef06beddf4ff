"""An OpenAI-compatible endpoint for agents in training: each rollout has a key of its own.

    agent, in any process ── POST /v1/chat/completions, key of the rollout ──▶ AnswerCall ──▶ the policy

    async with serving_agents() as server:
        with server.admitted(answer) as key:
            server.base_url, key    # what a client of OpenAI's API needs

The key is sent as `Authorization: Bearer KEY`, or in the header `x-memagent-rollout` by programs whose key cannot
be set. It runs in the event loop of the rollouts; what a call samples and records is decided by the caller.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.datastructures import Headers

from memagent.config import ServeConfig
from memagent.serve.chat import CHUNK, WHOLE, choice, delta, new_head, usage_of
from memagent.serve.guard import CLIENT_GONE, AdmissionGate, Metrics, Route
from memagent.serve.http import (
    END_OF_EVENTS,
    EventStream,
    Json,
    event,
    serving_here,
    unless_disconnected,
    web_app,
)
from memagent.serve.keys import KeyHolder, key_in
from memagent.serve.wire import ApiError, ChatRequest
from memagent.types import Message

ROLLOUT_HEADER = "x-memagent-rollout"
"""Header with the key of a rollout, for programs that send a key of their own."""
MAX_CALLS = 100_000
"""Calls at once; how many rollouts run is limited by training."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentCall:
    """What an agent asks for."""

    messages: list[Message]
    max_tokens: int | None
    temperature: float | None
    top_p: float | None
    stop: tuple[str, ...]
    n: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentReplies:
    """The replies to a call, each with the reason why it ended."""

    model: str
    replies: tuple[tuple[str, str | None], ...]
    prompt_tokens: int
    completion_tokens: int


AnswerCall = Callable[[AgentCall], Awaitable[AgentReplies]]
"""Answers the calls of one rollout."""


class AgentServer:
    """The endpoint while it is open."""

    def __init__(self) -> None:
        self.base_url = ""
        self._rollouts: dict[str, AnswerCall] = {}
        """By key."""

    @contextmanager
    def admitted(self, answer: AnswerCall) -> Iterator[str]:
        """The key of a rollout, which is valid inside the block."""
        key = f"rollout-{secrets.token_urlsafe(18)}"
        self._rollouts[key] = answer
        try:
            yield key
        finally:
            del self._rollouts[key]

    def app(self, config: ServeConfig, *, gate: AdmissionGate) -> FastAPI:
        """The ASGI application."""
        routes = [
            Route("POST", "/v1/chat/completions", self._chat),
            Route("GET", "/v1/models", self._models),
        ]
        return web_app(routes, config, self._holder, gate=gate, metrics=Metrics(tuple))

    async def _models(self, request: Request) -> Response:
        card = {"id": "policy", "object": "model", "created": 0, "owned_by": "memagent"}
        return JSONResponse({"object": "list", "data": [card]})

    async def _chat(self, request: Request, body: ChatRequest) -> Response:
        answer = self._rollout(request.headers)
        call = AgentCall(
            messages=body.conversation,
            max_tokens=body.token_limit,
            temperature=body.temperature,
            top_p=body.top_p,
            stop=body.stop,
            n=body.num_choices,
        )
        replies = await unless_disconnected(request, answer(call))
        if replies is None:
            return Response(status_code=CLIENT_GONE)
        if body.stream:
            return EventStream(_chunks(replies, has_usage=body.wants_usage))
        return JSONResponse(_whole(replies))

    def _holder(self, headers: Headers) -> KeyHolder:
        self._rollout(headers)
        return KeyHolder()

    def _rollout(self, headers: Headers) -> AnswerCall:
        key = headers.get(ROLLOUT_HEADER) or key_in(headers) or ""
        found = self._rollouts.get(key)
        if found is None:
            raise ApiError(
                401,
                f"no rollout has this key; send the key of a running one as `Authorization: Bearer KEY` or "
                f"`{ROLLOUT_HEADER}: KEY`",
                code="invalid_api_key",
            )
        return found


@asynccontextmanager
async def serving_agents(host: str = "127.0.0.1", port: int = 0) -> AsyncIterator[AgentServer]:
    """Serve agents in the running event loop while the block runs."""
    server = AgentServer()
    config = ServeConfig(host=host, port=port, max_concurrency=MAX_CALLS, drain_seconds=0.0)
    async with serving_here(partial(server.app, config), config) as url:
        server.base_url = f"{url}/v1"
        yield server


def _whole(replies: AgentReplies) -> Json:
    choices = [
        choice(index, text, reason or "stop")
        for index, (text, reason) in enumerate(replies.replies)
    ]
    head = new_head("chatcmpl", replies.model)
    usage = usage_of(replies.prompt_tokens, replies.completion_tokens)
    return {"id": head["id"], "object": WHOLE, **head, "choices": choices, "usage": usage}


async def _chunks(replies: AgentReplies, *, has_usage: bool) -> AsyncGenerator[str, None]:
    """The replies as a stream: each in one piece, because it is recorded whole."""
    whole = _whole(replies)
    head = {**whole, "object": CHUNK}
    usage = head.pop("usage")
    for one in whole["choices"]:
        said = {"role": "assistant", "content": one["message"]["content"]}
        for piece in (
            delta(one["index"], said),
            delta(one["index"], {}, one["finish_reason"]),
        ):
            yield event({**head, "choices": [piece]})
    if has_usage:
        yield event({**head, "choices": [], "usage": usage})
    yield END_OF_EVENTS
