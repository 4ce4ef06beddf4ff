"""Calls to a model: one within limits on calls and cost and with its usage, or several of which all succeed or none counts.

call = await call_model(engine, tokenizer, limits, messages, sampling)
step = call.step("answer")
"""

from __future__ import annotations

import asyncio
import math
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial, reduce
from typing import Any, NamedTuple, TypeVar

from pydantic import ConfigDict, Field

from memagent.agent.memory import split_reasoning
from memagent.agent.trace import Step, StepKind
from memagent.config import FileRecord, check_numbers
from memagent.engines.base import Serving, facts_of
from memagent.engines.limit import Failure, Patience
from memagent.errors import ConfigError, EngineRefused, LimitReached, PromptCut
from memagent.replies import KeptReply, Scope
from memagent.tokens.tokenizers import Tokenizer
from memagent.types import Completion, Engine, Message, Prices, Sampling, Usage


class LimitSettings(FileRecord):
    """Limits and prices as commands take them and as manifests keep them; resumed runs count what they used before."""

    model_config = ConfigDict(strict=True)

    max_calls: int | None = Field(default=None, ge=1)
    """The run stops before more calls than this are made."""
    max_cost: float | None = Field(default=None, ge=0)
    """The run stops before it can cost more than this."""
    price_in: float | None = Field(default=None, ge=0)
    """Price of a million prompt tokens."""
    price_out: float | None = Field(default=None, ge=0)
    """Price of a million completion tokens."""

    @property
    def given(self) -> dict[str, Any]:
        """Those that are set, by name."""
        return self.model_dump(exclude_none=True)

    @property
    def prices(self) -> Prices | None:
        """What the endpoint charges; None if neither price is set."""
        return Prices.of(self.price_in, self.price_out)

    def over(self, earlier: LimitSettings) -> LimitSettings:
        """These, and those of an earlier run where they are not set."""
        return LimitSettings(**{**earlier.given, **self.given})

    def open(self) -> Limits:
        """Limits with nothing used."""
        return Limits(max_calls=self.max_calls, max_cost=self.max_cost, prices=self.prices)


NO_LIMITS = LimitSettings()


class Reservation(NamedTuple):
    """The highest cost of a call in flight."""

    cost: float


class Limits:
    """Counts what a run has used, calls in flight included at their highest possible cost."""

    def __init__(
        self,
        *,
        max_calls: int | None = None,
        max_cost: float | None = None,
        prices: Prices | None = None,
    ) -> None:
        check_numbers(max_calls=max_calls, max_cost=max_cost)
        if prices is not None:
            check_numbers(price_in=prices.prompt, price_out=prices.completion)
        if max_cost is not None and prices is None:
            raise ConfigError("a limit on cost needs prices; give `price_in` and `price_out`")
        self.max_calls = max_calls
        self.max_cost = max_cost
        self.has_prices = prices is not None
        self.num_calls = 0
        self.cost = 0.0
        self.on_used: Callable[[Usage], object] | None = None
        """Called with what each call used."""
        self._prices = prices or Prices(prompt=0.0, completion=0.0)

    def count(self, usage: Usage) -> None:
        """Count what was used before, as when a run is resumed."""
        self.num_calls += usage.calls
        self.cost += self._prices.cost_of(usage)

    def reserve(self, *, prompt_tokens: int, completion_tokens: int) -> Reservation:
        """Make room for a call. Raises LimitReached when it could exceed a limit."""
        cost = self._prices.cost(prompt_tokens=prompt_tokens, completion_tokens=completion_tokens)
        if self.max_calls is not None and self.num_calls + 1 > self.max_calls:
            calls = "1 call" if self.num_calls == 1 else f"{self.num_calls} calls"
            raise LimitReached(f"stopped after {calls}: `max_calls={self.max_calls}`")
        if self.max_cost is not None and self.cost + cost > self.max_cost:
            raise LimitReached(
                f"stopped at a cost of {self.cost:.4f}: the next call could cost {cost:.4f} and exceed "
                f"`max_cost={self.max_cost}`"
            )
        self.num_calls += 1
        self.cost += cost
        return Reservation(cost)

    def settle(self, reservation: Reservation, usage: Usage) -> None:
        """Replace what a call might have cost by what it did."""
        self.cost += self._prices.cost_of(usage) - reservation.cost
        if self.on_used and usage.calls:
            self.on_used(usage)

    def release(self, reservation: Reservation) -> None:
        """Give back the room of a call that failed."""
        self.num_calls -= 1
        self.cost -= reservation.cost


T = TypeVar("T")

REASONS = ("length", "content_filter")
"""Why a reply may be empty: requested again, it would be as well."""


class ModelCall(NamedTuple):
    """A completion and what it took."""

    completion: Completion
    usage: Usage
    """As reported, else estimated."""
    started: float
    """Unix time."""
    seconds: float
    replies: tuple[KeptReply, ...]
    """All that it took: empty ones, and those that told how prompts are cut."""

    scope: Scope | None = None

    def step(self, kind: StepKind, *, index: int = 0, memory: str = "", **fields: Any) -> Step:
        """The call as a step of a trace."""
        completion, last = self.completion, self.replies[-1]
        reply, reasoning = split_reasoning(completion.text)
        logprobs = completion.logprobs
        step = Step(
            kind=kind,
            index=index,
            reply=reply,
            memory=memory,
            reasoning=completion.reasoning or reasoning,
            usage=self.usage,
            refusal=completion.refusal,
            served=completion.served,
            logprob=None if logprobs is None else round(sum(logprobs), 4),
            num_attempts=completion.num_attempts,
            started=round(self.started, 6),
            seconds=round(self.seconds, 6),
            is_known=last.is_known or last.is_carried,
            **fields,
        )
        return step.flagged(
            reply_cut=completion.finish_reason == "length",
            withheld=completion.finish_reason == "content_filter",
            refused=bool(completion.refusal),
            carried=last.is_carried,
        )

    async def forget(self) -> None:
        """Ask again in a later process, as for a reply that leads to nothing."""
        if self.scope:
            await self.scope.forget(self.replies)


async def call_model(
    engine: Engine,
    tokenizer: Tokenizer,
    limits: Limits,
    messages: Sequence[Message],
    sampling: Sampling,
    *,
    prompt_tokens: int | None = None,
    known: Scope | None = None,
) -> ModelCall:
    """One reply. Raises LimitReached before a call that could exceed a limit.

    An empty reply of an endpoint is requested again a few times; each request is a call. What is `known` is not
    requested, and counts in no limit.
    Without `prompt_tokens` the prompt is counted only for a limit on cost, a missing usage or an endpoint that may
    cut it: counting a long prompt can take longer than the call.
    """
    facts = facts_of(engine)
    serving = facts.serving
    tries_left = serving.num_tries if serving else 1
    patience: Patience | None = None
    replies: list[KeptReply] = []

    async def count(others: Sequence[Message]) -> int | None:
        few = replace(sampling, max_tokens=16)
        ask = partial(_request, engine, tokenizer, limits, others, few, None)
        replies.append(await (known.known(ask, others, few) if known else ask()))
        usage = replies[-1].completion.usage
        return None if usage is None or usage.is_estimated else usage.prompt_tokens

    try:
        while True:
            ask = partial(_request, engine, tokenizer, limits, messages, sampling, prompt_tokens)
            reply = await (known.known(ask, messages, sampling) if known else ask())
            replies.append(reply)
            completion = reply.completion
            tries_left -= 1
            has_reason = completion.refusal or completion.finish_reason in REASONS
            if completion.text.strip() or has_reason or not tries_left:
                break
            if reply.is_known or reply.is_carried:
                continue
            failure = Failure(kind="failed", reason="an empty reply")
            patience = patience or Patience(math.inf)
            delay = patience.delay(failure, has_answered=True) or 0.0
            if facts.on_retry:
                facts.on_retry(failure, delay)
            await asyncio.sleep(delay)
        num_attempts = sum(each.completion.num_attempts for each in replies)
        usage = completion.usage
        if serving and usage and not reply.is_carried and not usage.is_estimated:
            own = prompt_tokens or tokenizer.count_messages(messages)
            await check_not_cut(serving, messages, tokenizer, count, usage.prompt_tokens, own)
    except BaseException:  # they lead to nothing, and are requested again when the work is resumed
        if known:
            await known.forget(replies)
        raise
    last = replies[-1]
    return ModelCall(
        completion=replace(completion, num_attempts=num_attempts),
        usage=reduce(Usage.__add__, (one.completion.usage or Usage() for one in replies)),
        started=replies[0].started,
        seconds=0.0 if reply.is_carried else last.started + last.seconds - replies[0].started,
        replies=tuple(replies),
        scope=known,
    )


async def _request(
    engine: Engine,
    tokenizer: Tokenizer,
    limits: Limits,
    messages: Sequence[Message],
    sampling: Sampling,
    prompt_tokens: int | None,
) -> KeptReply:
    """One reply with what it took, within the limits."""
    if prompt_tokens is None and limits.max_cost is not None:
        prompt_tokens = tokenizer.count_messages(messages)
    reservation = limits.reserve(
        prompt_tokens=prompt_tokens or 0, completion_tokens=sampling.max_tokens
    )
    started, clock = time.time(), time.perf_counter()
    try:
        completion = await engine.complete(messages, sampling)
    except BaseException:
        limits.release(reservation)
        raise
    seconds = time.perf_counter() - clock
    usage = completion.usage
    if usage is None:
        if prompt_tokens is None:
            prompt_tokens = tokenizer.count_messages(messages)
        usage = Usage(
            calls=1,
            prompt_tokens=prompt_tokens,
            completion_tokens=tokenizer.count(completion.text),
            is_estimated=True,
        )
    limits.settle(reservation, usage)
    return KeptReply(replace(completion, usage=usage), round(started, 6), round(seconds, 6))


async def all_or_none(calls: Sequence[Awaitable[T]]) -> list[T]:
    """All results. When one call fails or the caller is cancelled, the others are cancelled too.

    At a limit, calls that are in flight end first: they are paid for, and a log may keep their replies.
    """
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return list(await asyncio.gather(*tasks))
    except LimitReached:
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
    finally:
        for task in tasks:
            task.cancel()


# --- servers that cut prompts ---------------------------------------------------------------------

# Where it counts far fewer tokens than we do, or as many as of another prompt, a longer prompt is sent: a server that cuts
# counts no more tokens of that. Our own count only raises the suspicion, because it may be that of another tokenizer.
# What the server has counted once fits its window, so nothing shorter is suspicious.


Counter = Callable[[Sequence[Message]], Awaitable[int | None]]
"""Calls the server with other messages; the prompt tokens that it reports."""
LEAST_TOKENS = 256
"""No server has a smaller window; what reports less counts something else."""
SHARE, SPARE_TOKENS = 0.98, 96
"""A count is far below ours when it is less than this share of it, and so many tokens more."""
WINDOW_STEP = 1024
"""Most windows are multiples of it."""
SHORT: Message = {"role": "user", "content": "Say yes."}


async def check_not_cut(
    serving: Serving,
    messages: Sequence[Message],
    tokenizer: Tokenizer,
    count: Counter,
    reported: int,
    own: int,
) -> None:
    """Raise PromptCut where a server that reports so many tokens has cut a prompt of `own` tokens by our count."""
    longest = reported
    if _is_suspicious(serving, tokenizer, reported, own):
        known = await _longest_known(messages, reported, count)
        if known is None:
            fits, needed = -(-reported // 64) * 64, 1 << own.bit_length()
            raise PromptCut(
                f"the server cut the prompt to {reported:,} tokens, of about {own:,}; give it a window of "
                f"{needed} (OLLAMA_CONTEXT_LENGTH={needed} for Ollama) and resume, or begin again with "
                f"`window={fits}`"
            )
        longest = known
    if longest > serving.longest_prompt:
        serving.longest_prompt, serving.longest_counted = longest, own


def _is_suspicious(serving: Serving, tokenizer: Tokenizer, reported: int, own: int) -> bool:
    is_far_below = LEAST_TOKENS <= reported < SHARE * own - SPARE_TOKENS
    if not is_far_below or reported < serving.longest_prompt:
        return False
    differs = abs(own - serving.longest_counted) > own // 100
    is_round = reported % WINDOW_STEP in (0, WINDOW_STEP - 1)
    is_the_same = differs and reported == serving.longest_prompt
    return tokenizer.knows_template or is_round or is_the_same


async def _longest_known(messages: Sequence[Message], reported: int, count: Counter) -> int | None:
    """Most tokens that the server has counted of a prompt; None where it counts no more of a longer one."""
    *before, last = messages
    more = last["content"][: len(last["content"]) // 4]  # in front, so that no cache has it
    try:
        of_longer = await count([*before, {**last, "content": f"{more}\n{last['content']}"}])
        if of_longer is None or of_longer > 1.05 * reported:
            return of_longer or reported
        of_short = await count([SHORT])
    except (
        EngineRefused,
        LimitReached,
    ):  # it refuses what is too long, or there is no room to compare
        return reported
    return None if of_short is not None and of_short < reported else sys.maxsize
