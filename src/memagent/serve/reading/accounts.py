"""What the calls of a holder use: on disk, and within the holder's limits.

A call counts when it has left for the engine. One whose client goes away counts with its prompt, because the
engine has it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace

from memagent.agent.limits import Limits
from memagent.engines.base import BaseEngine
from memagent.engines.limit import Slots
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
        cost = self.prices.cost_of(usage) if self.prices else 0.0
        self.state.add_used(self.owner, usage, cost)


class OwnersEngine(BaseEngine):
    """The engine of a server as the calls of one holder reach it."""

    def __init__(
        self, engine: Engine, tokenizer: Tokenizer, account: Account, slots: Slots | None = None
    ) -> None:
        """With `slots`, those of readings, calls wait for their turn, and what is computed is used for this holder alone."""
        self.stand_for(engine)
        self.calls_at_once = slots.num if slots else self.calls_at_once
        self._engine = engine
        self._tokenizer = tokenizer
        self._account = account
        self._slots = slots

    async def complete(self, messages: Sequence[Message], sampling: Sampling) -> Completion:
        """One reply; a call that is cancelled after it has left counts with its prompt."""
        async with self._slots.slot() if self._slots else nullcontext():
            if self._slots:
                sampling = replace(sampling, cache_salt=self._account.owner)
            try:
                return await self._engine.complete(messages, sampling)
            except asyncio.CancelledError:
                limits = self._account.limits
                prompt_tokens = self._tokenizer.count_messages(messages)
                usage = Usage(calls=1, prompt_tokens=prompt_tokens, is_estimated=True)
                limits.count(usage)  # the caller releases what it reserved
                if limits.on_used:
                    limits.on_used(usage)
                raise

    async def aclose(self) -> None:
        """Nothing to free: the engine belongs to the server."""
