"""What the calls of a holder use: on disk, and within the holder's limits.

A call counts when it has left for the engine. One whose client goes away counts with its prompt, because the
engine has it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from memagent.agent.limits import Limits
from memagent.engines.base import BaseEngine
from memagent.serve.reading.state import GatewayState, in_thread
from memagent.tokens.tokenizers import Tokenizer
from memagent.types import Completion, Engine, Message, Prices, Sampling, Usage


@dataclass(frozen=True, slots=True)
class Account:
    """Counts what the calls of a holder use."""

    state: GatewayState
    owner: str
    limits: Limits
    prices: Prices | None

    async def written(self) -> None:
        """Return when what was added before is on disk."""
        await in_thread(self.state.counting, int)  # it has one thread: this comes after them

    def add(self, usage: Usage) -> None:
        """Put it on disk; blocks for the time of a write."""
        prices = self.prices or Prices(prompt=0.0, completion=0.0)
        cost = prices.cost(
            prompt_tokens=usage.prompt_tokens, completion_tokens=usage.completion_tokens
        )
        self.state.add_used(self.owner, usage, cost)


class CountedEngine(BaseEngine):
    """The engine of a server as the calls of one holder reach it."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer, limits: Limits) -> None:
        self.stand_for(engine)
        self._engine = engine
        self._tokenizer = tokenizer
        self._limits = limits

    async def complete(self, messages: Sequence[Message], sampling: Sampling) -> Completion:
        """One reply; a call that is cancelled counts with its prompt."""
        try:
            return await self._engine.complete(messages, sampling)
        except asyncio.CancelledError:
            prompt_tokens = self._tokenizer.count_messages(messages)
            usage = Usage(calls=1, prompt_tokens=prompt_tokens, is_estimated=True)
            self._limits.count(usage)  # the caller releases what it reserved
            if self._limits.on_used:
                self._limits.on_used(usage)
            raise

    async def aclose(self) -> None:
        """Nothing to free: the engine belongs to the server."""
