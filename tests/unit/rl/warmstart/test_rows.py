"""The warm start: tokens of a rollout, the gradient of a plain mean over replies, lengths that fit."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from memagent.data.tasks.arithmetic import problem
from memagent.data.tasks.registry import open_task
from memagent.engines.base import BaseEngine
from memagent.engines.local.loading import LoadedModel, load
from memagent.errors import ConfigError, DataError
from memagent.rl.agents.api import open_agent
from memagent.rl.agents.client import Client
from memagent.rl.agents.session import Session
from memagent.rl.settings import ScratchSettings
from memagent.rl.types import Sample
from memagent.rl.update.learner import accumulate_sft
from memagent.rl.update.loss import summary
from memagent.rl.update.packing import pack, share_out
from memagent.rl.update.policy import Policy
from memagent.rl.warmstart.conversations import Conversation
from memagent.rl.warmstart.lessons import demonstrations_for, end_id, sft_rows, tokenized
from memagent.rl.weights.models import build_scratch
from memagent.tokens.tokenizers import open_tokenizer
from memagent.types import Completion, Message, Sampling
from tests.conftest import prose
from tests.support.tiny_models import make_tiny_model

READING = {
    **{"window": 500, "chunk_tokens": 40, "memory_tokens": 64, "answer_tokens": 24},
    "prompts": "small",
}
COLOURS = open_task("small/colours", {"sentences": 20, "tokenizer": "bytes"})
MAX_TOKENS = 1024


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    settings = ScratchSettings(
        vocab_size=300, hidden_size=32, num_layers=2, num_heads=2, window=1024
    )
    texts = [prose(20), *(problem(index, seed=9).question for index in range(20))]
    return build_scratch(settings, texts, tmp_path_factory.mktemp("models") / "scratch", seed=5)


@pytest.fixture(scope="module")
def loaded(folder: Path) -> LoadedModel:
    return load(str(folder), dtype=torch.float64)


def shown(loaded: LoadedModel, agent: str, index: int) -> list[Conversation]:
    tokenizer = open_tokenizer(str(loaded.tokenizer_folder))
    settings = READING if agent == "memory" else {}
    example = COLOURS.example(index) if agent == "memory" else problem(index, seed=1)
    return demonstrations_for(agent, settings, tokenizer=tokenizer)(example)


def samples_of(loaded: LoadedModel, conversations: Sequence[Conversation]) -> list[Sample]:
    return [
        sample for one in conversations for sample in tokenized(one, loaded, max_tokens=MAX_TOKENS)
    ]


def batch(loaded: LoadedModel) -> list[list[Sample]]:
    """Two texts that are read and two problems."""
    return [
        samples_of(loaded, shown(loaded, agent, index))
        for agent in ("memory", "calculator")
        for index in range(2)
    ]


# --- tokens -----------------------------------------------------------------------------------------


class Dictated(BaseEngine):
    """A model with given replies, in the tokens that it would sample."""

    def __init__(self, loaded: LoadedModel, replies: Sequence[str]) -> None:
        self.model = "dictated"
        self.tokenizer = str(loaded.tokenizer_folder)
        self.prompt_ids = loaded.vocabulary.prompt_ids
        self.decode = loaded.vocabulary.decode
        self._loaded = loaded
        self._replies = iter(replies)

    async def complete(self, messages: Sequence[Message], sampling: Sampling) -> Completion:
        return await self.generate(self.prompt_ids(messages), sampling)

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        reply = next(self._replies)
        ids = (*self._loaded.vocabulary.encode(reply), self._loaded.eos_ids[0])
        return Completion(
            text=reply, prompt_ids=tuple(prompt_ids), completion_ids=ids, logprobs=(0.0,) * len(ids)
        )

    async def aclose(self) -> None:
        """Nothing to free."""


@pytest.mark.parametrize("agent", ["memory", "calculator"])
def test_rows_are_those_of_a_rollout_with_the_same_replies(loaded: LoadedModel, agent: str) -> None:
    conversations = shown(loaded, agent, 0)
    replies = [
        message["content"]
        for one in conversations
        for message in one.messages
        if message["role"] == "assistant"
    ]
    session = Session(Dictated(loaded, replies), task_id="t", index=0, seed=0)
    example = COLOURS.example(0) if agent == "memory" else problem(0, seed=1)

    async def roll_out() -> None:
        settings = READING if agent == "memory" else {}
        await open_agent(agent, settings)(example, Client(session))

    asyncio.run(roll_out())
    assert tuple(samples_of(loaded, conversations)) == session.recorder.samples()


def test_turns_of_a_conversation_are_one_row_and_only_replies_carry_loss(
    loaded: LoadedModel,
) -> None:
    (conversation,) = shown(loaded, "calculator", 0)
    (sample,) = samples_of(loaded, [conversation])
    trained = [token for token, is_in in zip(sample.ids, sample.is_sampled, strict=True) if is_in]
    end = loaded.eos_ids[0]
    request, said = conversation.messages[2]["content"], conversation.messages[4]["content"]
    assert trained == [
        *loaded.vocabulary.encode(request),
        end,
        *loaded.vocabulary.encode(said),
        end,
    ]


def test_a_template_that_changes_replies_starts_rows(folder: Path, loaded: LoadedModel) -> None:
    messages: tuple[Message, ...] = (
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": "a <| b"},  # the template parts what looks like a mark
        {"role": "user", "content": "v"},
        {"role": "assistant", "content": "c"},
    )
    first, second = samples_of(loaded, [Conversation(id="x", messages=messages)])
    assert first.num_sampled == len(loaded.vocabulary.encode("a <| b")) + 1
    assert second.num_sampled == len(loaded.vocabulary.encode("c")) + 1


def test_the_end_of_a_reply_is_the_one_of_the_template(tmp_path: Path) -> None:
    chat = load(str(make_tiny_model(tmp_path, "llama")))
    assert end_id(chat) == chat.tokenizer.convert_tokens_to_ids("<|im_end|>")
    other = replace(chat, eos_ids=(7, *chat.eos_ids))
    assert end_id(other) == end_id(chat)
    assert end_id(replace(chat, eos_ids=(7,))) == 7, "the template writes none that ends a reply"
    with pytest.raises(ConfigError, match="has no end token"):
        end_id(replace(chat, eos_ids=()))


def test_a_reply_with_a_special_token_is_refused(loaded: LoadedModel) -> None:
    messages: tuple[Message, ...] = (
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": "so <|end|> it is"},
    )
    with pytest.raises(DataError, match=r"x: the reply 'so .* remove special tokens"):
        tokenized(Conversation(id="x", messages=messages), loaded, max_tokens=MAX_TOKENS)


def test_conversations_that_are_too_long_are_refused_with_the_remedy(loaded: LoadedModel) -> None:
    (conversation,) = shown(loaded, "calculator", 0)
    num_tokens = len(samples_of(loaded, [conversation])[0].ids)
    assert tokenized(conversation, loaded, max_tokens=num_tokens)
    with pytest.raises(ConfigError, match=f"set `update.max_tokens={num_tokens}`"):
        tokenized(conversation, loaded, max_tokens=num_tokens - 1)
    narrow = replace(loaded, window=num_tokens - 1)
    with pytest.raises(DataError, match=f"is {num_tokens - 1}; remove it"):
        tokenized(conversation, narrow, max_tokens=MAX_TOKENS)


# --- the gradient -----------------------------------------------------------------------------------


def textbook(folder: Path, samples: Sequence[Sample]) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradient of transformers on a padded batch, replies as labels."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    length = max(len(sample.ids) for sample in samples)
    ids, labels = torch.zeros(len(samples), length).long(), torch.full((len(samples), length), -100)
    mask = torch.zeros(len(samples), length).long()
    for row, sample in enumerate(samples):
        here = slice(0, len(sample.ids))
        ids[row, here] = torch.tensor(sample.ids)
        mask[row, here] = 1
        labels[row, here] = torch.where(torch.tensor(sample.is_sampled), ids[row, here], -100)
    loss = model(input_ids=ids, attention_mask=mask, labels=labels).loss
    loss.backward()
    return loss.item(), {name: one.grad for name, one in model.named_parameters()}


@pytest.mark.parametrize(
    ("max_tokens", "share", "num_ranks"),
    [(8192, True, 1), (8192, False, 1), (600, True, 1), (600, True, 2)],
    ids=["one pack", "unshared", "many packs", "two processes"],
)
def test_the_gradient_is_that_of_the_plain_mean(
    folder: Path, loaded: LoadedModel, max_tokens: int, share: bool, num_ranks: int
) -> None:
    examples = batch(loaded)
    loss, gradient = textbook(folder, [sample for one in examples for sample in one])
    policy = Policy(loaded.model)
    loaded.model.zero_grad()
    packs = pack(sft_rows(examples), max_tokens=max_tokens, share=share)
    assert (len(packs) > 1) == (max_tokens == 600)
    stats = [accumulate_sft(policy, part) for part in share_out(packs, num_ranks)]
    num_tokens = sum(one["num_tokens"] for one in stats)
    assert num_tokens == sum(sample.num_sampled for one in examples for sample in one)
    mean = sum(summary(one)["logprob"] * one["num_tokens"] for one in stats) / num_tokens
    assert -mean == pytest.approx(loss, abs=1e-6)
    for name, parameter in loaded.model.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad, gradient[name], atol=1e-6, rtol=1e-6)


def test_scale_multiplies_the_gradient_and_not_the_statistics(loaded: LoadedModel) -> None:
    policy = Policy(loaded.model)
    packs = pack(sft_rows(batch(loaded)[:1]), max_tokens=4096)
    found = []
    for scale in (1.0, 3.0):
        loaded.model.zero_grad()
        stats = accumulate_sft(policy, packs, scale=scale)
        found.append((policy.model.lm_head.weight.grad.clone(), stats["logprob"]))
    torch.testing.assert_close(found[1][0], 3 * found[0][0])
    assert found[0][1] == found[1][1]


def test_conversations_of_an_example_share_their_prefix(loaded: LoadedModel) -> None:
    sample = samples_of(loaded, shown(loaded, "calculator", 0))[0]
    together, apart = sft_rows([[sample, sample]]), sft_rows([[sample], [sample]])
    assert [len(pack(rows, max_tokens=4096)[0].ids) for rows in (together, apart)] == [
        len(sample.ids),
        2 * len(sample.ids),
    ]
