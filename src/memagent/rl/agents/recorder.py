"""The recorder: keeps the tokens of every call of a rollout, and makes rows of them.

    call 1   [system user] SAMPLED
    call 2   [system user  SAMPLED  tool] SAMPLED          its prompt extends call 1: one row
    call 3   [system other user] SAMPLED                   it does not: a row of its own

A token carries loss if and only if the policy drew it in a call of this rollout. That is known by where
the token came from, so no chat template has to be understood, and every drawn token carries its loss
in exactly one row: where a call starts a new row, what was drawn before is part of its prompt.

Chat templates write earlier turns anew (they trim them, drop thoughts, leave out the token that ended a
turn), and text is not always cut into the tokens that were drawn. Then the prompt does not extend the
earlier call and starts a row. Where an engine takes tokens, `continued_prompt` avoids the second kind:
the drawn tokens stay as they are, and what the template puts after them follows.
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
    """The tokens that were drawn, the one that ended the reply included."""
    logprobs: tuple[float, ...]
    policy_version: int

    @property
    def ids(self) -> tuple[int, ...]:
        """All tokens that the model has seen when the call ends."""
        return self.prompt_ids + self.completion_ids


def call_of(completion: Completion, *, model: str, policy_version: int) -> Call:
    """The tokens of a completion. The version counts where the engine does not tell one.

    Raises EngineRefused where the engine gives no tokens, EngineError where they cannot be right.
    """
    prompt_ids, completion_ids = completion.prompt_ids, completion.completion_ids
    if prompt_ids is None or completion_ids is None or completion.logprobs is None:
        raise EngineRefused(NO_TOKENS.format(model=model))
    if not prompt_ids or len(completion_ids) != len(completion.logprobs):
        raise EngineError(
            f"{model} returned {len(prompt_ids)} tokens of the prompt, {len(completion_ids)} of the "
            f"reply and {len(completion.logprobs)} log-probabilities, which do not belong together"
        )
    if not all(math.isfinite(logprob) and logprob <= 1e-3 for logprob in completion.logprobs):
        raise EngineError(f"{model} returned a log-probability that is none")
    told = completion.policy_version
    return Call(
        prompt_ids=tuple(prompt_ids),
        completion_ids=tuple(completion_ids),
        logprobs=tuple(completion.logprobs),
        policy_version=policy_version if told is None else told,
    )


def merge_calls(calls: Iterable[Call]) -> tuple[Sample, ...]:
    """Calls, in the order in which they were made, as rows, in the order in which those began.

    Of several rows that a prompt extends, the longest goes on. A row is continued once: when two calls
    extend it, the second starts a row with what came before as its prompt.
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
    """A row while it grows."""

    def __init__(self, call: Call) -> None:
        self.ids: tuple[int, ...] = ()
        self._is_sampled: list[bool] = []
        self._logprobs: list[float] = []
        self._policy_version = call.policy_version
        self.extend(call)

    def is_prefix_of(self, prompt_ids: tuple[int, ...]) -> bool:
        length = len(self.ids)
        return (
            length <= len(prompt_ids)
            and prompt_ids[length - 1] == self.ids[-1]  # most others are told by it, without a copy
            and prompt_ids[:length] == self.ids
        )

    def extend(self, call: Call) -> None:
        num_given = len(call.prompt_ids) - len(self.ids)
        num_drawn = len(call.completion_ids)
        self.ids = call.ids
        self._is_sampled += [False] * num_given + [True] * num_drawn
        self._logprobs += [0.0] * num_given + list(call.logprobs)
        self._policy_version = min(self._policy_version, call.policy_version)

    def sample(self) -> Sample:
        return Sample(
            ids=self.ids,
            is_sampled=tuple(self._is_sampled),
            logprobs=tuple(self._logprobs),
            policy_version=self._policy_version,
        )


class Recorder:
    """The calls of one rollout. They may be under way at once; rows follow the order of starting."""

    def __init__(self) -> None:
        self._calls: dict[int, Call | None] = {}

    def start(self) -> int:
        """The number of a call that leaves now."""
        number = len(self._calls)
        self._calls[number] = None
        return number

    def finish(self, number: int, call: Call) -> None:
        """Keep the tokens of a call."""
        self._calls[number] = call

    @property
    def calls(self) -> tuple[Call, ...]:
        """The finished calls, in the order in which they left."""
        return tuple(call for call in self._calls.values() if call is not None)

    def samples(self) -> tuple[Sample, ...]:
        """The rows of all finished calls."""
        return merge_calls(self.calls)


# --- going on with the tokens that were drawn ------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """A call as a part of a conversation: what was asked, what was said, and in which tokens."""

    messages: tuple[Message, ...]
    reply: str
    rendered_ids: tuple[int, ...]
    """The prompt as the chat template writes it; other than the prompt of `call` where that went on
    with tokens of an earlier turn."""
    call: Call


def continues(messages: Sequence[Message], turn: Turn) -> bool:
    """Whether a conversation goes on from a turn: the same messages, then the reply, word for word."""
    length = len(turn.messages)
    return (
        len(messages) > length
        and tuple(messages[:length]) == turn.messages
        and messages[length] == {"role": "assistant", "content": turn.reply}
    )


def continued_prompt(
    turn: Turn, rendered_ids: Sequence[int], decode: Callable[[Sequence[int]], str]
) -> tuple[int, ...] | None:
    """The prompt of a conversation that continues a turn, with the turn's tokens as they were drawn.

        rendered_ids   [ the turn's prompt ][ the reply, cut anew ][ end, what follows ]
        the result     [ the turn's prompt ][ the reply, as drawn ][ end, what follows ]

    `decode` leaves special tokens out; the first one after the reply is its end. It is the one that was
    drawn, or, where the limit cut the reply, it is put there and carries no loss. None where the result
    would not be what the template makes of the conversation: it must keep what stood before the reply,
    the reply itself (white space at its ends aside), and the way in which it ended.
    """
    before, drawn = turn.rendered_ids, turn.call.completion_ids
    if not drawn or tuple(rendered_ids[: len(before)]) != before:
        return None
    after = list(rendered_ids[len(before) :])
    end = next((place for place, token in enumerate(after) if not decode([token])), None)
    if end is None:
        return None
    said = {decode(ids).strip() for ids in (after[:end], drawn)}
    if said != {turn.reply.strip()}:  # the template changed it, or a stop text was taken off
        return None
    if decode(drawn[-1:]):
        return turn.call.ids + tuple(after[end:])
    return turn.call.ids + tuple(after[end + 1 :]) if drawn[-1] == after[end] else None
