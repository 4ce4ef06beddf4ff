"""The engine as the items of an evaluation see it.

    method ──▶ ItemEngine ──▶ is the reply known? ──▶ yes: return it
                                   │ no
                                   └──▶ EngineGate ──▶ engine ──▶ RUN/replies.jsonl ──▶ method

Methods know nothing of this. A resumed run repeats no call of an unfinished item (`replies`).
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import NamedTuple

from memagent.engines.base import BaseEngine, facts_of
from memagent.engines.limit import Queue, Slots
from memagent.engines.local.embedding import Embedder, Vector
from memagent.errors import EngineError, EngineRefused
from memagent.replies import KeptReply, Scope
from memagent.types import Completion, Engine, Message, Sampling, TokenEngine

CHARS_PER_TOKEN = 4
"""For times of calls whose usage is not reported."""


class EngineGate:
    """An engine as all items share it: one limit on concurrent calls, and a count of failures in a row."""

    def __init__(self, engine: Engine, *, concurrency: int) -> None:
        """Engines that limit themselves ignore `concurrency`: their limit leaves out retry waits."""
        self.engine = engine
        self.concurrency = concurrency
        self.num_in_flight = 0
        """Calls that were sent or wait for a slot."""
        self.num_answered = 0
        self.num_failed_in_a_row = 0
        self.last_error: EngineError | EngineRefused | None = None
        self._slots = None if facts_of(engine).limits_itself else Slots(concurrency)

    async def answered(self, ask: Callable[[], Awaitable[Completion]]) -> Completion:
        """One reply of the engine, when it is this call's turn."""
        try:
            async with self._slots.slot() if self._slots else nullcontext():
                completion = await ask()
        except (EngineError, EngineRefused) as error:
            self.fail(error)
            raise
        self.num_answered += 1
        self.num_failed_in_a_row = 0
        return completion

    def fail(self, error: EngineError | EngineRefused) -> None:
        """Count a failed call."""
        self.num_failed_in_a_row += 1
        self.last_error = error


class GatedEmbedder(Embedder):
    """An embedder whose failures count as those of the engine: its outage is not the items' fault either."""

    def __init__(self, embedder: Embedder, gate: EngineGate) -> None:
        self.name = embedder.name
        self._embedder = embedder
        self._gate = gate

    async def embed(self, texts: Sequence[str], *, is_query: bool = False) -> list[Vector]:
        try:
            return await self._embedder.embed(texts, is_query=is_query)
        except (EngineError, EngineRefused) as error:
            self._gate.fail(error)
            raise

    async def aclose(self) -> None:
        await self._embedder.aclose()


class CallDone(NamedTuple):
    """A call that was answered now, not replayed."""

    method: str
    prompt_tokens: int
    seconds: float
    in_flight: int = 1
    """Calls that the engine was answering when this one was finished, itself included."""


OnCall = Callable[[CallDone], None]


class ItemEngine(BaseEngine):
    """The engine as one item sees it."""

    def __init__(
        self, gate: EngineGate, known: Scope, *, method: str = "", on_call: OnCall | None = None
    ) -> None:
        """`on_call` is called with each call that was answered now."""
        self.stand_for(gate.engine)
        self.calls_at_once = gate.concurrency
        self.seconds_before = 0.0
        """Time that known replies took when they were made."""
        self.queue = Queue()
        self._gate = gate
        self._known = known
        self._replies: list[KeptReply] = []
        self._method = method
        self._on_call = on_call

    async def complete(self, messages: Sequence[Message], sampling: Sampling) -> Completion:
        """The reply that is known, or a new one, which is on disk before it is returned."""
        num_chars = sum(len(message["content"]) for message in messages)
        num_tokens = num_chars // CHARS_PER_TOKEN
        ask = partial(self._gate.engine.complete, messages, sampling)
        return await self._reply(messages, sampling, ask, prompt_tokens=num_tokens)

    async def forget(self) -> None:
        """Ask all of the item again in a later process."""
        await self._known.forget(self._replies)

    async def aclose(self) -> None:
        """Nothing to free: the engine belongs to the run."""

    async def _reply(
        self,
        prompt: Sequence[Message] | Sequence[int],
        sampling: Sampling,
        ask: Callable[[], Awaitable[Completion]],
        *,
        prompt_tokens: int,
    ) -> Completion:
        """`prompt_tokens` counts where the engine reports no usage."""

        async def asked() -> KeptReply:
            started, clock = time.time(), time.perf_counter()
            self._gate.num_in_flight += 1
            try:
                with self.queue.call() as queued:
                    completion = await self._gate.answered(ask)
            finally:
                in_flight = min(self._gate.num_in_flight, self._gate.concurrency)
                self._gate.num_in_flight -= 1
            seconds = round(time.perf_counter() - clock - queued.seconds, 6)
            if self._on_call is not None:
                num = completion.usage.prompt_tokens if completion.usage else prompt_tokens
                self._on_call(CallDone(self._method, num, seconds, in_flight))
            return KeptReply(completion, round(started, 6), seconds)

        reply = await self._known.known(asked, prompt, sampling)
        self._replies.append(reply)
        self.seconds_before += reply.seconds if reply.is_known else 0.0
        return reply.completion


class TokenItemEngine(ItemEngine):
    """The engine of an item where it also takes prompts as tokens, such as the local one."""

    @property
    def _tokens(self) -> TokenEngine:
        engine = self._gate.engine
        assert isinstance(engine, TokenEngine), "item_engine chooses the class by the engine"
        return engine

    def prompt_ids(self, messages: Sequence[Message]) -> list[int]:
        """The tokens of a conversation, ready for the reply."""
        return self._tokens.prompt_ids(messages)

    def decode(self, ids: Sequence[int]) -> str:
        """Tokens as text without special tokens."""
        return self._tokens.decode(ids)

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        """As `complete`, for a prompt of tokens."""
        ask = partial(self._tokens.generate, prompt_ids, sampling)
        return await self._reply(prompt_ids, sampling, ask, prompt_tokens=len(prompt_ids))


def item_engine(
    gate: EngineGate, known: Scope, *, method: str = "", on_call: OnCall | None = None
) -> ItemEngine:
    """The engine as one item sees it; `on_call` is called with each call that was answered."""
    kind = TokenItemEngine if isinstance(gate.engine, TokenEngine) else ItemEngine
    return kind(gate, known, method=method, on_call=on_call)
