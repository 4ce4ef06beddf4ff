"""The recorder keeps the tokens of every call of a rollout and builds rows from them.

    call 1   [system user] SAMPLED
    call 2   [system user  SAMPLED  tool] SAMPLED          its prompt extends call 1: one row
    call 3   [system other user] SAMPLED                   it does not: a new row

A token carries loss if and only if the policy sampled it in a call of this rollout. The mask follows from
where a token came from, so it works with any chat template, and every sampled token carries loss in exactly
one row: where a call starts a new row, what was sampled before is part of its prompt.

Chat templates rewrite earlier turns (they trim them, drop reasoning, leave out the end-of-turn token), and
re-encoding a reply does not always give the tokens that were sampled. Then the prompt does not extend the
earlier call and starts a new row. With an engine that takes tokens, `continued_prompt` avoids the second
case: it keeps the sampled tokens and appends what the template puts after them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from memagent.errors import EngineError, EngineRefused
from memagent.rl.types import Sample
from memagent.types import Completion, Message

NO_TOKENS = (
    "{model} returns no token ids with log-probabilities, and training needs both; use an engine "
    "local:MODEL, or vLLM with return_token_ids and logprobs"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """The tokens of one call.

    Example: Call(prompt_ids=(5, 6), completion_ids=(7, 2), logprobs=(-0.3, -0.1), policy_version=0)
    """

    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    """The sampled tokens, the one that ended the reply included."""
    logprobs: tuple[float, ...]
    policy_version: int
    """The weights that sampled it; of several, the oldest."""
    token_versions: tuple[int, ...] | None = None
    """The weights that sampled each token, where they changed during the reply."""

    @property
    def versions(self) -> tuple[int, ...]:
        """The weights that sampled each token."""
        return self.token_versions or (self.policy_version,) * len(self.completion_ids)

    @property
    def ids(self) -> tuple[int, ...]:
        """Prompt and reply."""
        return self.prompt_ids + self.completion_ids


def call_of(completion: Completion, *, model: str, policy_version: int) -> Call:
    """The tokens of a completion. `policy_version` is used where the engine reports none.

    Raises EngineRefused where the engine returns no tokens, EngineError where they are inconsistent.
    """
    prompt_ids, completion_ids = completion.prompt_ids, completion.completion_ids
    if prompt_ids is None or completion_ids is None or completion.logprobs is None:
        raise EngineRefused(NO_TOKENS.format(model=model))
    if not prompt_ids or len(completion_ids) != len(completion.logprobs):
        raise EngineError(
            f"{model} returned {len(prompt_ids)} prompt tokens, {len(completion_ids)} reply tokens and "
            f"{len(completion.logprobs)} log-probabilities, which are inconsistent"
        )
    if not all(math.isfinite(logprob) and logprob <= 1e-3 for logprob in completion.logprobs):
        raise EngineError(f"{model} returned an invalid log-probability")
    versions = completion.token_versions
    if versions is not None and len(versions) != len(completion_ids):
        raise EngineError(
            f"{model} returned {len(completion_ids)} reply tokens and {len(versions)} versions of weights"
        )
    reported = completion.policy_version
    return Call(
        prompt_ids=tuple(prompt_ids),
        completion_ids=tuple(completion_ids),
        logprobs=tuple(completion.logprobs),
        policy_version=policy_version if reported is None else reported,
        token_versions=versions,
    )


def merge_calls(calls: Iterable[Call]) -> tuple[Sample, ...]:
    """The rows of calls, both in the order in which they started.

    A prompt that extends several rows continues the longest one. A row is continued once: when two calls
    extend it, the second starts a new row with everything before it as its prompt.
    """
    rows: list[_Row] = []
    for call in calls:
        extended = [row for row in rows if row.is_prefix_of(call.prompt_ids)]
        if extended:
            max(extended, key=lambda row: len(row.ids)).extend(call)
        else:
            rows.append(_Row(call))
    return tuple(row.sample() for row in rows)


class _Row:
    """A row under construction."""

    def __init__(self, call: Call) -> None:
        self.ids: tuple[int, ...] = ()
        self._is_sampled: list[bool] = []
        self._logprobs: list[float] = []
        self._versions: list[int] = []
        """The versions of all tokens; 0 for those that were not sampled."""
        self._oldest = call.policy_version
        self._is_mixed = False
        self.extend(call)

    def is_prefix_of(self, prompt_ids: tuple[int, ...]) -> bool:
        length = len(self.ids)
        return (
            length <= len(prompt_ids)
            and prompt_ids[length - 1] == self.ids[-1]  # rules out most rows without a copy
            and prompt_ids[:length] == self.ids
        )

    def extend(self, call: Call) -> None:
        num_prompt = len(call.prompt_ids) - len(self.ids)
        num_sampled = len(call.completion_ids)
        self.ids = call.ids
        self._is_sampled += [False] * num_prompt + [True] * num_sampled
        self._logprobs += [0.0] * num_prompt + list(call.logprobs)
        self._versions += [0] * num_prompt + list(call.versions)
        self._is_mixed |= call.token_versions is not None or call.policy_version != self._oldest
        self._oldest = min(self._oldest, call.policy_version)

    def sample(self) -> Sample:
        return Sample(
            ids=self.ids,
            is_sampled=tuple(self._is_sampled),
            logprobs=tuple(self._logprobs),
            policy_version=self._oldest,
            token_versions=tuple(self._versions) if self._is_mixed else None,
        )


class Recorder:
    """The calls of one rollout. They may run concurrently; rows follow the order in which they started."""

    def __init__(self) -> None:
        self._calls: dict[int, Call | None] = {}

    def start(self) -> int:
        """The number of a call that starts now."""
        number = len(self._calls)
        self._calls[number] = None
        return number

    def finish(self, number: int, call: Call) -> None:
        """Keep the tokens of a call."""
        self._calls[number] = call

    @property
    def calls(self) -> tuple[Call, ...]:
        """The finished calls, in the order in which they started."""
        return tuple(call for call in self._calls.values() if call is not None)

    def samples(self) -> tuple[Sample, ...]:
        """The rows of all finished calls."""
        return merge_calls(self.calls)


# --- continuing a conversation with the sampled tokens ---------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """A call as a part of a conversation: its messages, the reply, and the tokens of both."""

    messages: tuple[Message, ...]
    reply: str
    rendered_ids: tuple[int, ...]
    """The prompt as the chat template renders it. The prompt of `call` differs from it where it continues
    the tokens of an earlier turn."""
    call: Call


def continues(messages: Sequence[Message], turn: Turn) -> bool:
    """Whether a conversation continues a turn: the same messages, then the reply, word for word."""
    length = len(turn.messages)
    return (
        len(messages) > length
        and tuple(messages[:length]) == turn.messages
        and messages[length] == {"role": "assistant", "content": turn.reply}
    )


def continued_prompt(
    turn: Turn, rendered_ids: Sequence[int], decode: Callable[[Sequence[int]], str]
) -> tuple[int, ...] | None:
    """The prompt of a conversation that continues a turn, with the turn's own sampled tokens.

        rendered_ids   [ the turn's prompt ][ the reply, re-encoded ][ end, what follows ]
        the result     [ the turn's prompt ][ the reply, as sampled ][ end, what follows ]

    `decode` leaves special tokens out; the first one after the reply is its end. It was sampled too or,
    where the limit cut the reply, it comes from the template and carries no loss. None where the result
    would differ from what the template renders: it must keep everything before the reply, the reply itself
    (outer white space aside), and the token that ended it.
    """
    before, sampled = turn.rendered_ids, turn.call.completion_ids
    if not sampled or tuple(rendered_ids[: len(before)]) != before:
        return None
    after = list(rendered_ids[len(before) :])
    end = next((place for place, token in enumerate(after) if not decode([token])), None)
    if end is None:
        return None
    texts = {decode(ids).strip() for ids in (after[:end], sampled)}
    if texts != {turn.reply.strip()}:  # the template changed it, or a stop text was removed
        return None
    if decode(sampled[-1:]):
        return turn.call.ids + tuple(after[end:])
    return turn.call.ids + tuple(after[end + 1 :]) if sampled[-1] == after[end] else None
