"""A scripted engine with tokens: one per byte, and a few special ones of a chat template.

TokenScript(reply)          the template renders every prompt, as at an endpoint
TokenTakingScript(reply)    also takes prompts as tokens, as the local engine does

A reply's tokens are its bytes, each with the log-probability that `logprob_of` gives it. `drift` makes the
script sample other tokens than its text encodes to: a pair of letters as one token.
"""

import asyncio
import hashlib
from collections.abc import Callable, Sequence

from memagent.engines.base import BaseEngine
from memagent.types import Completion, Message, Sampling, Usage

START, END = 256, 257
"""Special tokens: start and end of a turn."""
PAIR = 1000
"""A token above this is the pair of letters `PAIR + 256 * first + second`."""

Script = Callable[[Sequence[Message], Sampling], str]
Template = Callable[[Sequence[Message]], list[int]]


def encode(text: str) -> list[int]:
    return list(text.encode())


def decode(ids: Sequence[int]) -> str:
    flat: list[int] = []
    for token in ids:
        if token >= PAIR:
            flat += divmod(token - PAIR, 256)
        elif token < START:
            flat.append(token)
    return bytes(flat).decode("utf-8", "replace")


def in_pairs(text: str) -> list[int]:
    """The text in tokens that `encode` would never choose."""
    data = text.encode()
    pairs = [PAIR + 256 * data[n] + data[n + 1] for n in range(0, len(data) - 1, 2)]
    return pairs + list(data[len(pairs) * 2 :])


def chat_template(messages: Sequence[Message]) -> list[int]:
    """Each turn as START role newline content END, and the beginning of the next."""
    ids: list[int] = []
    for message in messages:
        ids += [START, *encode(f"{message['role']}\n{message['content']}"), END]
    return [*ids, START, *encode("assistant\n")]


def without_thoughts(messages: Sequence[Message]) -> list[int]:
    """As `chat_template`, but of earlier replies only what follows </think>, as some models' do."""
    return chat_template(
        [
            {**message, "content": message["content"].rpartition("</think>")[2]}
            if message["role"] == "assistant"
            else message
            for message in messages
        ]
    )


def without_ends(messages: Sequence[Message]) -> list[int]:
    """As `chat_template`, but nothing ends a turn."""
    return [token for token in chat_template(messages) if token != END]


def logprob_of(token: int, position: int) -> float:
    """Any value, the same for the same token and place."""
    return -((token * 31 + position * 7) % 97 + 1) / 100


class TokenScript(BaseEngine):
    """Replies by a script, with tokens and log-probabilities."""

    def __init__(
        self,
        script: Script,
        *,
        template: Template = chat_template,
        drift: bool = False,
        delay: Callable[[Sequence[Message]], float] | None = None,
        policy_version: int | None = 0,
    ) -> None:
        self.model = "token-script"
        self.tokenizer = "bytes"
        self.policy_version = policy_version
        self.prompts: list[tuple[int, ...]] = []
        self.seeds: list[int | None] = []
        self.most_at_once = 0
        self._script, self._template, self._drift, self._delay = script, template, drift, delay
        self._num_running = 0

    async def complete(self, messages: Sequence[Message], sampling: Sampling) -> Completion:
        self._num_running += 1
        self.most_at_once = max(self.most_at_once, self._num_running)
        try:
            await asyncio.sleep(self._delay(messages) if self._delay else 0)
        finally:
            self._num_running -= 1
        return self.completion(self._template(messages), messages, sampling)

    async def aclose(self) -> None:
        """Nothing to free."""

    def completion(
        self, prompt_ids: Sequence[int], messages: Sequence[Message], sampling: Sampling
    ) -> Completion:
        self.prompts.append(tuple(prompt_ids))
        self.seeds.append(sampling.seed)
        reply = self._script(messages, sampling)
        sampled = in_pairs(reply) if self._drift else encode(reply)
        is_cut = len(sampled) + 1 > sampling.max_tokens
        sampled = sampled[: sampling.max_tokens] if is_cut else [*sampled, END]
        start = len(prompt_ids)
        return Completion(
            text=decode(sampled),
            finish_reason="length" if is_cut else "stop",
            usage=Usage(calls=1, prompt_tokens=start, completion_tokens=len(sampled)),
            prompt_ids=tuple(prompt_ids),
            completion_ids=tuple(sampled),
            logprobs=tuple(logprob_of(token, start + n) for n, token in enumerate(sampled)),
            policy_version=self.policy_version,
        )


class TokenTakingScript(TokenScript):
    """Takes prompts as tokens too. Its script is given the text of the whole prompt as one message."""

    def prompt_ids(self, messages: Sequence[Message]) -> list[int]:
        return self._template(messages)

    def decode(self, ids: Sequence[int]) -> str:
        return decode(ids)

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        await asyncio.sleep(0)
        text = decode(prompt_ids)
        return self.completion(prompt_ids, [{"role": "user", "content": text}], sampling)


def random_reply(messages: Sequence[Message], sampling: Sampling) -> str:
    """Some letters that depend on the prompt and the seed, as a sampled reply does."""
    key = f"{sampling.seed}/{[message['content'] for message in messages]}"
    return hashlib.sha256(key.encode()).hexdigest()[:12]
