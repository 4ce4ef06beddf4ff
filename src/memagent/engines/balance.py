"""Several endpoints as one engine: the least busy gets a call, a failing one is set aside for a while.

    complete ──▶ choose ──▶ endpoint 1   2 calls in flight
                   │    ──▶ endpoint 2   1 call in flight     <- the least busy of those in use
                   │    ──▶ endpoint 3   set aside until 12:00:30, then tried with one call
                   └─ prompts with a common prefix go where the last one went, if it is not much busier

A call that fails at one endpoint goes to the next at once. Only when all of them have failed it, it
waits and is tried again as with a single endpoint: same patience, same refusals, same limit of requests
in flight, which holds for all endpoints together.

    open_engine("openai:MODEL", base_url="http://one:8000/v1,http://two:8000/v1")
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from weakref import WeakKeyDictionary

from memagent.config import EngineConfig
from memagent.engines.addresses import addresses, public_url
from memagent.engines.limit import Failure, FailureKind, RetryListener, Slots
from memagent.engines.openai import EndpointEngine
from memagent.errors import ConfigError
from memagent.types import Completion, Message, Sampling

FAILURES_BEFORE_ASIDE: dict[FailureKind, int] = {"unreachable": 1, "busy": 1, "failed": 3}
"""In a row. A single bad reply says little of a server; no connection says all."""
FIRST_ASIDE_SECONDS = 1.0
LONGEST_ASIDE_SECONDS = 30.0
"""An endpoint is set aside for longer each time it fails again."""
PREFIX_CHARS = 2048
"""Prompts are compared in blocks of this size, the first one holding instructions and question."""
MAX_PREFIX_BLOCKS = 32
MAX_PREFIXES = 100_000
"""Beginnings of prompts that are remembered; the oldest are forgotten first."""
AFFINITY_SLACK = 4
"""Calls that an endpoint may be ahead of the least busy one and still get a prompt it knows."""
Request = Callable[[EndpointEngine], Awaitable[Completion | Failure]]
"""Asks an endpoint."""


@dataclass(slots=True)
class _State:
    """What is known of one endpoint."""

    num_active: int = 0
    num_started: int = 0
    num_failures: int = 0
    """Since its last good reply."""
    num_asides: int = 0
    """Times it was set aside since its last good reply."""
    aside_until: float = 0.0


class Balancer:
    """Decides which of several endpoints gets a call. It calls nothing itself."""

    def __init__(
        self,
        num_endpoints: int,
        *,
        slack: int = AFFINITY_SLACK,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._slack = slack
        self._states = [_State() for _ in range(num_endpoints)]
        self._clock = clock
        self._homes: OrderedDict[bytes, int] = OrderedDict()
        """Which endpoint saw the beginning of a prompt last."""

    def choose(self, prefixes: Sequence[bytes] = (), *, tried: Collection[int] = ()) -> int | None:
        """The endpoint for a call, by number; None when all that are in use have failed it.

        When all are set aside and none was tried, it is the one whose time is up first, to find
        out whether it is back.
        """
        states = self._states
        in_use = [n for n in range(len(states)) if n not in tried and self._is_in_use(n)]
        if not in_use:
            all_states = [(one.aside_until, one.num_active, n) for n, one in enumerate(states)]
            return None if tried else min(all_states)[2]
        least = min(states[number].num_active for number in in_use)
        for prefix in reversed(prefixes):
            home = self._homes.get(prefix)
            if home in in_use and states[home].num_active - least <= self._slack:
                return home
        return min(in_use, key=lambda n: (states[n].num_active, states[n].num_started))

    def begin(self, number: int, prefixes: Iterable[bytes] = ()) -> None:
        """A call goes to an endpoint."""
        self._states[number].num_active += 1
        self._states[number].num_started += 1
        for prefix in prefixes:
            self._homes[prefix] = number
            self._homes.move_to_end(prefix)
        while len(self._homes) > MAX_PREFIXES:
            self._homes.popitem(last=False)

    def end(self, number: int) -> None:
        """A call has come to its end, whichever."""
        self._states[number].num_active -= 1

    def succeeded(self, number: int) -> None:
        """The endpoint gave a reply."""
        state = self._states[number]
        state.num_failures = state.num_asides = 0
        state.aside_until = 0.0

    def failed(self, number: int, failure: Failure) -> None:
        """The endpoint failed a call; it is set aside if that says enough."""
        state = self._states[number]
        state.num_failures += 1
        if state.num_failures < FAILURES_BEFORE_ASIDE[failure.kind]:
            return
        now = self._clock()
        if state.aside_until > now:  # of calls sent together, the first failure counts
            return
        seconds = min(FIRST_ASIDE_SECONDS * 2.0**state.num_asides, LONGEST_ASIDE_SECONDS)
        state.num_asides += 1
        state.aside_until = now + max(seconds, failure.retry_after or 0.0)

    def _is_in_use(self, number: int) -> bool:
        """Not set aside; after that, one call at a time until it has given a good reply."""
        state = self._states[number]
        if not state.num_asides:
            return True
        return self._clock() >= state.aside_until and not state.num_active


class BalancedEngine(EndpointEngine):
    """Several endpoints that serve one model, behind one engine."""

    def __init__(self, config: EngineConfig, on_retry: RetryListener | None = None) -> None:
        super().__init__(config, on_retry)
        self.endpoints = tuple(
            EndpointEngine(config.model_copy(update={"base_url": url}))
            for url in addresses(config.base_url)
        )
        self._balancer = Balancer(len(self.endpoints))
        # a semaphore belongs to the event loop it was first waited for in
        self._slots: WeakKeyDictionary[asyncio.AbstractEventLoop, Slots] = WeakKeyDictionary()

    @property
    def address(self) -> str:
        """All addresses, fit to be shown."""
        return ", ".join(public_url(endpoint.config.base_url or "") for endpoint in self.endpoints)

    async def inspect(self) -> None:
        """Ask all endpoints what they serve. Those that are silent now may still answer later."""
        listed = await asyncio.gather(*(endpoint.list_models() for endpoint in self.endpoints))
        listing = [
            (endpoint, models)
            for endpoint, models in zip(self.endpoints, listed, strict=True)
            if models
        ]
        for endpoint, models in listing or [(self.endpoints[0], [])]:
            endpoint.model = endpoint.model or self.model
            endpoint._learn(models)
        known = [endpoint for endpoint, _ in listing] or [self.endpoints[0]]
        self._check_alike(known)
        await asyncio.gather(*(endpoint._learn_window() for endpoint, _ in listing))
        self.model, self.tokenizer = known[0].model, known[0].tokenizer
        self.reading_defaults = known[0].reading_defaults
        windows = [engine.served_window for engine in known if engine.served_window is not None]
        self.served_window = min(windows, default=None)
        for endpoint in self.endpoints:
            endpoint.model = self.model

    async def aclose(self) -> None:
        """Close the connections of this event loop."""
        self._slots.pop(asyncio.get_running_loop(), None)
        for endpoint in self.endpoints:
            await endpoint.aclose()

    async def _attempt(
        self, messages: Sequence[Message], sampling: Sampling
    ) -> Completion | Failure:
        prefixes = prefix_keys(messages)
        return await self._over_endpoints(
            prefixes, lambda endpoint: endpoint._attempt(messages, sampling)
        )

    async def _over_endpoints(
        self, prefixes: Sequence[bytes], request: Request
    ) -> Completion | Failure:
        """One request to one endpoint after the other, each at most once, until one replies."""
        failures: dict[int, Failure] = {}
        slots = Slots(self.config.concurrency)
        async with self._slots.setdefault(asyncio.get_running_loop(), slots).slot():
            number = self._balancer.choose(prefixes)
            while number is not None:
                result = await self._ask(number, prefixes, request)
                if isinstance(result, Completion):
                    return replace(result, num_attempts=len(failures) + 1)
                failures[number] = result
                number = self._balancer.choose(prefixes, tried=failures)
                if number is not None and self.on_retry:
                    self.on_retry(result, 0.0)
        # the shortest wait of all endpoints: the call may then go to that one
        soonest = min(failures.values(), key=lambda failure: failure.retry_after or 0.0)
        return replace(soonest, num_attempts=len(failures))

    async def _ask(
        self, number: int, prefixes: Sequence[bytes], request: Request
    ) -> Completion | Failure:
        endpoint = self.endpoints[number]
        self._balancer.begin(number, prefixes)
        try:
            result = await request(endpoint)
        finally:
            self._balancer.end(number)
        if isinstance(result, Completion):
            self._balancer.succeeded(number)
        else:
            self._balancer.failed(number, result)
        if isinstance(result, Completion) or result.kind != "unreachable":
            endpoint._has_answered = True
        return result

    def _check_alike(self, engines: Sequence[EndpointEngine]) -> None:
        models = {engine.model: engine.address for engine in engines}
        if len(models) > 1:
            served = ", ".join(f"{model} at {address}" for model, address in models.items())
            raise ConfigError(f"endpoints that are balanced serve one model, but: {served}")


def prefix_keys(messages: Sequence[Message]) -> list[bytes]:
    """Keys of the beginnings of a conversation, block by block: equal keys, equal beginnings.

    A last block that is not full has no key, so a short conversation may have none.
    """
    text = "".join(f"{message['role']}\n{message['content']}\n" for message in messages)
    digest = blake2b(digest_size=12)
    keys = []
    for end in range(
        PREFIX_CHARS, min(len(text), MAX_PREFIX_BLOCKS * PREFIX_CHARS) + 1, PREFIX_CHARS
    ):
        digest.update(text[end - PREFIX_CHARS : end].encode("utf-8", "surrogatepass"))
        keys.append(digest.digest())
    return keys
