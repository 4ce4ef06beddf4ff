"""The records that every room shares: messages, sampling, usage, completions, prices.

Records of one room live there: `documents.document` has Document and Chunk, `agent.trace` has Step
and Trace.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, TypedDict, runtime_checkable

from memagent.errors import ConfigError

AttemptStatus = Literal["ok", "failed"]
"""How an attempt ended: at a task in training, at an item in an evaluation."""


class Message(TypedDict):
    """One chat message, in the shape every OpenAI-compatible endpoint takes."""

    role: str
    content: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How one reply is sampled. None leaves the choice to the engine."""

    max_tokens: int
    """Upper limit of new tokens in the reply, reasoning included."""
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    """Texts that end the reply; they are not part of it."""
    cache_salt: str | None = field(default=None, repr=False)
    """What the engine computed of a prompt is used again for calls with the same salt only. It is not part of what
    identifies a call, hence not of its `repr`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What calls cost, in tokens. Adds up with `+`."""

    calls: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens the engine did not have to compute again; part of `prompt_tokens`."""
    is_estimated: bool = False
    """True when the engine reported nothing for at least one call and we counted ourselves."""

    def __add__(self, other: Usage) -> Usage:
        return Usage(
            calls=self.calls + other.calls,
            prompt_tokens=self.prompt_tokens + other.prompt_tokens,
            completion_tokens=self.completion_tokens + other.completion_tokens,
            cached_tokens=self.cached_tokens + other.cached_tokens,
            is_estimated=self.is_estimated or other.is_estimated,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One reply of an engine."""

    text: str
    """The reply as the model wrote it; may hold a reasoning block."""
    finish_reason: str | None = None
    """"stop", "length" when the limit cut it, "content_filter" when text was withheld, or whatever else the engine says."""
    refusal: str | None = None
    """What the model said instead of a reply, where the engine marks it as a refusal."""
    served: str | None = None
    """What the server says has replied, model and `system_fingerprint`; None where that is the model that was asked."""
    usage: Usage | None = None
    """None when the engine reports no usage."""
    reasoning: str | None = None
    """Reasoning that the engine returned apart from the text."""
    num_attempts: int = 1
    """Requests it took, the successful one included."""
    prompt_ids: tuple[int, ...] | None = None
    """The prompt in tokens; None when the engine does not report it, as for the three below."""
    completion_ids: tuple[int, ...] | None = None
    """The tokens the model sampled, the one that ended the reply included."""
    logprobs: tuple[float, ...] | None = None
    """Log-probability of each sampled token under the distribution it was sampled from."""
    policy_version: int | None = None
    """Which weights sampled it: the number of updates since the engine was opened; the oldest of several."""
    token_versions: tuple[int, ...] | None = None
    """The weights that sampled each token, where they changed during the reply; else None."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamedToken:
    """One token of a reply, as soon as it was sampled."""

    token_id: int | None
    """None, as its log-probability, where llama.cpp does not report it."""
    logprob: float | None
    text: str
    """Text that is certain now; empty while a character or a stop text may still be completed.
    The texts of all tokens make up the text of the completion."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    """How busy an engine is."""

    num_running: int
    num_waiting: int
    num_slots: int
    """Tokens whose keys and values the cache can hold."""
    num_used_slots: int
    """Slots in use: of running requests, or cached for prompts with the same prefix."""


class Engine(Protocol):
    """Anything that turns messages into a Completion."""

    @property
    def model(self) -> str:
        """Name of the model that answers, as the engine knows it."""
        ...

    @property
    def tokenizer(self) -> str:
        """What `tokens.tokenizers.open_tokenizer` should open to count as this model does."""
        ...

    async def complete(self, messages: Sequence[Message], sampling: Sampling) -> Completion:
        """One reply. Raises EngineError when the engine fails for good."""
        ...

    async def aclose(self) -> None:
        """Free connections, processes and memory."""
        ...


@runtime_checkable
class TokenEngine(Protocol):
    """An engine that also takes prompts as tokens, so that a conversation continues the sampled ones."""

    def prompt_ids(self, messages: Sequence[Message]) -> list[int]:
        """The tokens of a conversation, ready for the reply."""
        ...

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        """One reply to a prompt of tokens."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Tokens as text without special tokens."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """What an endpoint charges, per million tokens, in any one currency."""

    prompt: float
    completion: float

    @classmethod
    def of(cls, price_in: float | None, price_out: float | None) -> Prices | None:
        """The prices as settings give them; None where neither is given."""
        if price_in is None and price_out is None:
            return None
        if price_in is None or price_out is None:
            missing, what = ("in", "prompts") if price_in is None else ("out", "replies")
            raise ConfigError(
                f"`price_{missing}` is not given, so {what} would count as free; give it, 0 if they are"
            )
        return cls(prompt=price_in, completion=price_out)

    def cost_of(self, usage: Usage) -> float:
        """The price of what calls have used."""
        return self.cost(
            prompt_tokens=usage.prompt_tokens, completion_tokens=usage.completion_tokens
        )

    def cost(self, *, prompt_tokens: int, completion_tokens: int) -> float:
        """The price of so many tokens."""
        return (prompt_tokens * self.prompt + completion_tokens * self.completion) / 1e6
