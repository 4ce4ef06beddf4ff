"""Replies that new weights cut short: the rest is sampled by the new ones, and every token keeps its version.

    first half, version 4 ──▶ vLLM aborts it for new weights ──▶ prompt + first half ──▶ rest, version 5
                                                                                       └──▶ joined

vLLM is asked for the rest with the tokens so far as the prompt, so that the reply continues exactly those. It
computes them again, on the new weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from hashlib import blake2b
from typing import Any

from memagent.engines.openai import EndpointEngine, parse_completion
from memagent.engines.retry import Failure
from memagent.types import Completion, Message, Sampling, Usage

ABORTED = "abort"
"""Why vLLM ended a reply that was cut short."""


def is_cut_short(result: Completion | Failure) -> bool:
    """Whether vLLM ended a reply for new weights."""
    return isinstance(result, Completion) and result.finish_reason == ABORTED


def can_continue(part: Completion, sampling: Sampling) -> bool:
    """Whether the rest of a reply can be sampled so that it is as if it had never been cut.

    Not where a stop string may have begun: vLLM would not see it in the rest.
    """
    has_tokens = bool(part.prompt_ids and part.completion_ids)
    heads = (stop[:end] for stop in sampling.stop for end in range(1, len(stop)))
    return has_tokens and part.reasoning is None and not part.text.endswith(tuple(heads))


async def continue_reply(
    endpoint: EndpointEngine,
    messages: Sequence[Message],
    sampling: Sampling,
    parts: Sequence[Completion],
) -> Completion | Failure:
    """One request for what comes after the parts of a reply."""
    body = endpoint._body([], _rest(sampling, parts))
    del body["messages"]
    body["prompt"] = [*(parts[0].prompt_ids or ()), *_ids(parts)]
    if body.get("logprobs"):
        body["logprobs"] = 0  # as many as each token has besides the sampled one
    version, shield = endpoint._policy_version, endpoint._shielded(messages)
    result = await endpoint._post("/completions", body, parse_continuation)
    if isinstance(result, Failure):
        return result
    return replace(result, text=shield.restored(result.text), policy_version=version)


def joined(parts: Sequence[Completion]) -> Completion:
    """The parts of a reply as one, with the version of each token where they differ."""
    first, last = parts[0], parts[-1]
    versions = tuple(part.policy_version or 0 for part in parts for _ in part.completion_ids or ())
    is_mixed = len(set(versions)) > 1
    has_logprobs = all(part.logprobs is not None for part in parts)
    return replace(
        last,
        text="".join(part.text for part in parts),
        usage=_usage(parts),
        prompt_ids=first.prompt_ids,
        completion_ids=_ids(parts),
        logprobs=tuple(one for part in parts for one in part.logprobs or ())
        if has_logprobs
        else None,
        policy_version=min(versions) if is_mixed else first.policy_version,
        token_versions=versions if is_mixed else None,
    )


def parse_continuation(data: Any) -> Completion:
    """The completion in a reply to a prompt of tokens. Raises ValueError with the reason when there is none."""
    try:
        choice = data["choices"][0]
        message = {"content": choice["text"]}
        logprobs = (choice.get("logprobs") or {}).get("token_logprobs") or []
        entries = {"content": [{"logprob": one} for one in logprobs]}
    except (KeyError, IndexError, TypeError, AttributeError):
        raise ValueError("no text in it") from None
    return parse_completion(
        {**data, "choices": [{**choice, "message": message, "logprobs": entries}]}
    )


def _rest(sampling: Sampling, parts: Sequence[Completion]) -> Sampling:
    """As many tokens as are left, with other random numbers than those of the parts."""
    num_tokens = len(_ids(parts))
    seed = sampling.seed
    if seed is not None:
        digest = blake2b(f"{seed}:{num_tokens}".encode(), digest_size=4).digest()
        seed = int.from_bytes(digest, "big") >> 1
    return replace(sampling, max_tokens=sampling.max_tokens - num_tokens, seed=seed)


def _ids(parts: Sequence[Completion]) -> tuple[int, ...]:
    return tuple(token for part in parts for token in part.completion_ids or ())


def _usage(parts: Sequence[Completion]) -> Usage | None:
    """Of one call: tokens that were computed again on new weights do not count."""
    usages = [part.usage for part in parts if part.usage is not None]
    if len(usages) < len(parts):
        return None
    return replace(usages[0], completion_tokens=sum(one.completion_tokens for one in usages))
