"""Supervised training: conversations as rows of tokens, and the mean of -log p over their replies.

    Conversation ─▶ tokenized ─▶ Sample* ─▶ sft_rows ─▶ TrainingRow* ─▶ packing ─▶ accumulate_sft

    samples = [tokenized(one, loaded, max_tokens=4096) for one in conversations]
    rows = sft_rows(samples)                         # each conversation is an example here
    accumulate_sft(policy, pack(rows, max_tokens=4096))

Tokens are those of a rollout with the same replies: the prompt as the engine sends it, the reply, the token
that ends it. A conversation of several replies is one row where its prompts extend each other, by the
rules of `recorder.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from memagent.engines.local.loading import LoadedModel
from memagent.errors import ConfigError, DataError
from memagent.rl.agents.recorder import Call, Turn, continued_prompt, merge_calls
from memagent.rl.types import Sample
from memagent.rl.update.loss import LossStats, merged
from memagent.rl.update.packing import Pack
from memagent.rl.update.policy import Policy
from memagent.rl.update.rows import TrainingRow
from memagent.rl.warmstart.conversations import Conversation
from memagent.types import Message


def tokenized(
    conversation: Conversation, loaded: LoadedModel, *, max_tokens: int
) -> tuple[Sample, ...]:
    """The rows of a conversation. Every reply of the assistant carries loss.

    A conversation that exceeds `max_tokens`, the limit of a packed sequence, or the window of the model is
    refused: training on half a reply would teach the model to stop there.
    """
    end = end_id(loaded)
    calls: list[Call] = []
    turn: Turn | None = None
    for place, message in enumerate(conversation.messages):
        if message["role"] != "assistant":
            continue
        turn = _turn(conversation, place, loaded, end, before=turn)
        calls.append(turn.call)
    _check_length(conversation, max(len(call.ids) for call in calls), loaded, max_tokens)
    return merge_calls(calls)


def sft_rows(examples: Sequence[Sequence[Sample]]) -> tuple[TrainingRow, ...]:
    """The rows of one optimizer step, from the samples of each example; all tokens have the same weight, together 1."""
    total = sum(sample.num_sampled for samples in examples for sample in samples)
    return tuple(
        TrainingRow(sample=sample, group=number, rollout=number, advantage=1.0, weight=1 / total)
        for number, samples in enumerate(examples)
        for sample in samples
    )


def accumulate_sft(policy: Policy, packs: Sequence[Pack], *, scale: float = 1.0) -> LossStats:
    """Add the gradient of some packs of a step to the parameters; their statistics.

    The loss of a step is minus `logprob`, the mean over its tokens. `scale` as for `accumulate`.
    """
    found: list[LossStats] = []
    for pack in packs:
        logprobs = policy(pack).logprobs
        weights = torch.from_numpy(pack.targets.weights).to(logprobs)
        torch.autograd.backward((-scale * weights * logprobs).sum())
        found.append(
            {
                "num_tokens": weights.new_tensor(float(len(weights))),
                "logprob": logprobs.detach().sum(),
            }
        )
    return merged(found)


def end_id(loaded: LoadedModel) -> int:
    """The token that ends a reply: the chat template's if it is an end token of the model."""
    if not loaded.eos_ids:
        raise ConfigError(
            f"{loaded.name} has no end token; set eos_token_id in its generation_config.json"
        )
    probe: list[Message] = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    written = loaded.vocabulary.encode(loaded.vocabulary.rendered(probe, is_open=False))
    return next(
        (token for token in reversed(written) if token in loaded.eos_ids), loaded.eos_ids[0]
    )


def _turn(
    conversation: Conversation, place: int, loaded: LoadedModel, end: int, *, before: Turn | None
) -> Turn:
    """A reply as if the model had sampled it after the messages before it."""
    messages = conversation.messages[:place]
    reply = conversation.messages[place]["content"]
    rendered = loaded.vocabulary.prompt_ids(messages)
    prompt = (
        continued_prompt(before, rendered, loaded.vocabulary.decode) if before is not None else None
    )
    reply_ids = loaded.vocabulary.encode(reply)
    if loaded.vocabulary.decode(reply_ids).strip() != reply.strip():
        raise DataError(
            f"{conversation.id}: the reply {reply[:40]!r} is not what its tokens decode to; remove "
            "special tokens of the chat template from it"
        )
    sampled_ids = (*reply_ids, end)
    return Turn(
        messages=messages,
        reply=reply,
        rendered_ids=tuple(rendered),
        call=Call(
            prompt_ids=tuple(rendered) if prompt is None else prompt,
            completion_ids=sampled_ids,
            logprobs=(0.0,) * len(sampled_ids),
            policy_version=0,
        ),
    )


def _check_length(
    conversation: Conversation, num_tokens: int, loaded: LoadedModel, max_tokens: int
) -> None:
    if num_tokens > loaded.window:
        raise DataError(
            f"{conversation.id}: a conversation has {num_tokens} tokens, and the window of "
            f"{loaded.name} is {loaded.window}; remove it, or lower the agent's `chunk_tokens`"
        )
    if num_tokens > max_tokens:
        raise ConfigError(
            f"{conversation.id}: a conversation has {num_tokens} tokens, more than a packed "
            f"sequence of {max_tokens}; set `update.max_tokens={num_tokens}`"
        )
