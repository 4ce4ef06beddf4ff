"""The client that agents call: the shape of an OpenAI client, on top of a session.

    completion = await client.chat.completions.create(messages=messages, max_tokens=200)
    completion.choices[0].message.content

An agent sees text only; the session behind the client records the tokens. Code that drives an engine, such
as `Reader`, takes `client.session`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from memagent.agent.model_call import all_or_none
from memagent.errors import ConfigError
from memagent.rl.agents.session import Session
from memagent.types import Message, Sampling, Usage

TEXT_KEYS = frozenset({"role", "content"})


# --- what create returns ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatMessage:
    """A reply of the model. It may be put into the messages of the next call as it is."""

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
    """The replies to one request, with the field names of the package openai."""

    model: str
    choices: tuple[Choice, ...]
    usage: ChatUsage


# --- the client -------------------------------------------------------------------------------------


class Client:
    """What an agent gets. `client.chat.completions.create` is as in the package openai."""

    def __init__(self, session: Session) -> None:
        self.model = session.model
        self.tokenizer = session.tokenizer
        """What `tokens.tokenizers.open_tokenizer` should open to count as the model does."""
        self.session = session
        """The engine behind the client, for agents that drive an engine."""
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
        """Replies of the policy. `model` is ignored: the model that is trained answers."""
        if n < 1:
            raise ConfigError(f"n={n} asks for no reply; ask for 1 or more")
        sampling = Sampling(
            max_tokens=max_tokens or max_completion_tokens or self._session.sampling.max_tokens,
            temperature=temperature,
            top_p=top_p,
            stop=(stop,) if isinstance(stop, str) else tuple(stop or ()),
        )
        plain = [plain_message(message) for message in messages]
        calls = [self._session.complete(plain, sampling) for _ in range(n)]
        completions = [await calls[0]] if n == 1 else await all_or_none(calls)
        usages = [completion.usage or Usage() for completion in completions]
        return ChatCompletion(
            model=self._session.model,
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


def plain_message(message: Mapping[str, Any] | ChatMessage) -> Message:
    """A message as role and text. Raises ConfigError for anything else, which would not reach the model."""
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
