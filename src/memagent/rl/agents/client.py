"""The client that agents call: the shape of an OpenAI client, with a recorder behind it.

    agent ── client.chat.completions.create(messages=...) ──▶ turn of the driver ──▶ engine
      ▲                                                                                │
      └──── text ◀──── recorder keeps prompt ids, drawn ids, log-probabilities ◀───────┘

    completion = await client.chat.completions.create(messages=messages, max_tokens=200)
    completion.choices[0].message.content

An agent sees text only. The seed of a call comes from the run's seed, the task, the number of the rollout,
what is asked, and how often the rollout has asked it before: so it does not depend on what other calls
do meanwhile.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any, Protocol, runtime_checkable

from memagent.engines.base import BaseEngine
from memagent.errors import ConfigError
from memagent.rl.agents.recorder import Recorder, Turn, call_of, continued_prompt, continues
from memagent.types import Completion, Engine, Message, Sampling, Usage

SEED_BITS = 31
"""What servers take as a seed."""
TEXT_KEYS = frozenset({"role", "content"})


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSampling:
    """How all calls of a run are sampled. What is learnt is learnt for this distribution."""

    temperature: float = 1.0
    top_p: float | None = None
    """None draws from all tokens. Training needs that: its log-probabilities are of all tokens."""
    max_tokens: int = 1024
    """Limit of a reply where the agent gives none."""
    is_forced: bool = False
    """True replaces what an agent asks for, for validation; else an agent that asks for another
    temperature or top_p fails with a message that says so."""


# --- what create returns ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatMessage:
    """What the model said. It may be put into the messages of the next call as it is."""

    content: str
    role: str = "assistant"


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One reply."""

    index: int
    message: ChatMessage
    finish_reason: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatUsage:
    """Tokens of a request and its replies."""

    prompt_tokens: int
    completion_tokens: int

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatCompletion:
    """The replies to one request, as `openai` names their parts."""

    model: str
    choices: tuple[Choice, ...]
    usage: ChatUsage


# --- the client -------------------------------------------------------------------------------------


@runtime_checkable
class TokenEngine(Protocol):
    """An engine that also takes prompts as tokens, so that a conversation goes on with those drawn."""

    def prompt_ids(self, messages: Sequence[Message]) -> list[int]: ...

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion: ...

    def decode(self, ids: Sequence[int]) -> str: ...


class Session:
    """One rollout's way to the engine: seeds, turns, tokens, counts."""

    def __init__(
        self,
        engine: Engine,
        *,
        task_id: str,
        index: int,
        seed: int,
        sampling: RunSampling | None = None,
        turn: Callable[[], AbstractAsyncContextManager[None]] = nullcontext,
        needs_tokens: bool = True,
        policy_version: int = 0,
    ) -> None:
        """Without `needs_tokens` nothing is recorded, and any engine will do: for validation.
        `turn` is entered for each call, which waits for nobody if none is given. `policy_version`
        counts where the engine tells none."""
        self.engine = engine
        self.sampling = sampling or RunSampling()
        self.recorder = Recorder()
        self.usage = Usage()
        self.replies: list[tuple[int, int]] = []
        """Tokens of each reply, and how many it might have had."""
        self.seconds = 0.0
        """Time in calls, the waiting for a turn not counted; of calls at once, each counts."""
        self._key = (seed, task_id, index)
        self._turn = turn
        self._needs_tokens = needs_tokens
        self._policy_version = policy_version
        self._num_asked: Counter[str] = Counter()
        self._turns: list[Turn] = []

    async def call(self, messages: Sequence[Message], sampling: Sampling) -> Completion:
        """One call, recorded."""
        number = self.recorder.start()
        asked = fingerprint(messages)
        seed = call_seed(*self._key, asked, self._num_asked[asked])
        self._num_asked[asked] += 1
        async with self._turn():  # nothing is waited for between its beginning and the engine
            started = perf_counter()
            rendered, completion = await self._complete(messages, replace(sampling, seed=seed))
            self.seconds += perf_counter() - started
        self.usage += completion.usage or Usage(calls=1, is_estimated=True)
        if completion.usage is not None:
            self.replies.append((completion.usage.completion_tokens, sampling.max_tokens))
        if self._needs_tokens:
            call = call_of(completion, model=self.engine.model, policy_version=self._policy_version)
            self.recorder.finish(number, call)
            self._turns.append(
                Turn(
                    messages=tuple(messages),
                    reply=completion.text,
                    rendered_ids=call.prompt_ids if rendered is None else tuple(rendered),
                    call=call,
                )
            )
        return completion

    async def _complete(
        self, messages: Sequence[Message], sampling: Sampling
    ) -> tuple[Sequence[int] | None, Completion]:
        """The completion, and the prompt in the template's own tokens where others were given."""
        earlier = [turn for turn in self._turns if continues(messages, turn)]
        if earlier and isinstance(self.engine, TokenEngine):
            turn = max(earlier, key=lambda turn: len(turn.messages))
            rendered = self.engine.prompt_ids(messages)
            prompt_ids = continued_prompt(turn, rendered, self.engine.decode)
            if prompt_ids is not None:
                return rendered, await self.engine.generate(prompt_ids, sampling)
        return None, await self.engine.complete(messages, sampling)


class Client:
    """What an agent gets. `client.chat.completions.create` is as in the package openai."""

    def __init__(self, session: Session) -> None:
        self.model = session.engine.model
        self.tokenizer = session.engine.tokenizer
        """What `documents.tokenizers.open_tokenizer` should open to count as the model does."""
        self.session = session
        self.chat = _Chat(Completions(session))


class Completions:
    """`client.chat.completions`."""

    def __init__(self, session: Session) -> None:
        self._session = session

    async def create(
        self,
        *,
        messages: Sequence[Mapping[str, Any] | ChatMessage],
        model: str | None = None,
        max_tokens: int | None = None,
        max_completion_tokens: int | None = None,
        temperature: float | None = None,
        top_p: float | None = None,
        stop: str | Sequence[str] | None = None,
        n: int = 1,
    ) -> ChatCompletion:
        """Replies of the policy. `model` is there for code that also runs elsewhere: who answers is
        the model that is trained."""
        run = self._session.sampling
        _check_wish("temperature", temperature, run.temperature, run)
        _check_wish("top_p", top_p, 1.0 if run.top_p is None else run.top_p, run)
        if n < 1:
            raise ConfigError(f"n={n} asks for no reply; ask for 1 or more")
        sampling = Sampling(
            max_tokens=max_tokens or max_completion_tokens or run.max_tokens,
            temperature=run.temperature,
            top_p=run.top_p,
            stop=(stop,) if isinstance(stop, str) else tuple(stop or ()),
        )
        given = [plain_message(message) for message in messages]
        calls = [self._session.call(given, sampling) for _ in range(n)]
        completions = [await calls[0]] if n == 1 else await all_or_none(calls)
        usages = [completion.usage or Usage() for completion in completions]
        return ChatCompletion(
            model=self._session.engine.model,
            choices=tuple(
                Choice(
                    index=index,
                    message=ChatMessage(content=completion.text),
                    finish_reason=completion.finish_reason,
                )
                for index, completion in enumerate(completions)
            ),
            usage=ChatUsage(
                prompt_tokens=usages[0].prompt_tokens,
                completion_tokens=sum(usage.completion_tokens for usage in usages),
            ),
        )


@dataclass(frozen=True, slots=True)
class _Chat:
    completions: Completions


class ClientEngine(BaseEngine):
    """A client as an engine, for code that drives engines: each call of it is a call of the rollout."""

    def __init__(self, client: Client) -> None:
        self.model = client.model
        self.tokenizer = client.tokenizer
        engine = client.session.engine
        self.served_window = getattr(engine, "served_window", None)
        self.reading_defaults = getattr(engine, "reading_defaults", {})
        self._client = client

    async def complete(self, messages: Sequence[Message], sampling: Sampling) -> Completion:
        """One reply of the policy; how it is drawn is the run's to say."""
        created = await self._client.chat.completions.create(
            messages=messages,
            max_tokens=sampling.max_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            stop=sampling.stop,
        )
        choice, usage = created.choices[0], created.usage
        return Completion(
            text=choice.message.content,
            finish_reason=choice.finish_reason,
            usage=Usage(
                calls=1,
                prompt_tokens=usage.prompt_tokens,
                completion_tokens=usage.completion_tokens,
            ),
        )

    async def aclose(self) -> None:
        """The engine behind the client belongs to others."""


# --- parts ------------------------------------------------------------------------------------------


async def all_or_none(calls: Sequence[Awaitable[Completion]]) -> list[Completion]:
    """All results; when one call fails or we are cancelled, the others do not go on."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()


def call_seed(seed: int, task_id: str, index: int, asked: str, repetition: int) -> int:
    """The seed of a call: of the run, the rollout, and the call's place in it."""
    key = json.dumps([seed, task_id, index, asked, repetition])
    digest = hashlib.sha256(key.encode()).digest()
    return int.from_bytes(digest[:4], "big") >> (32 - SEED_BITS)


def fingerprint(messages: Sequence[Message]) -> str:
    """What is asked, in a few characters."""
    return hashlib.sha256(json.dumps(list(messages)).encode()).hexdigest()


def plain_message(message: Mapping[str, Any] | ChatMessage) -> Message:
    """A message as role and text. Anything else would be lost on its way to the model."""
    if isinstance(message, ChatMessage):
        return {"role": message.role, "content": message.content}
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or not isinstance(content, str):
        raise ConfigError(
            f"a message needs a role and a text as content, not {str(dict(message))[:80]}"
        )
    if more := sorted(message.keys() - TEXT_KEYS):
        raise ConfigError(
            f"a message has only role and content; write {', '.join(more)} into the content"
        )
    return {"role": role, "content": content}


def _check_wish(name: str, wished: float | None, value: float, run: RunSampling) -> None:
    if wished is None or wished == value or run.is_forced:
        return
    raise ConfigError(
        f"the agent asks for {name}={wished:g} and the run samples with {value:g}; leave {name} out "
        "of the agent, or set it for the run"
    )
