"""All updates of a step together, and what is checked before the first."""

import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from memagent.engines.base import BaseEngine
from memagent.errors import ConfigError
from memagent.rl.settings import ObjectiveSettings, OptimSettings, UpdateSettings
from memagent.rl.types import Group, Sample
from memagent.rl.update.agreement import check_agreement, check_longer
from memagent.rl.update.learner import sample_turns, update
from memagent.rl.update.optim import Optimizer
from memagent.rl.update.packing import Pack
from memagent.rl.update.policy import Policy, score
from memagent.rl.update.rows import TrainingRow
from memagent.types import Completion, Message, Sampling
from tests.support.rollouts import near_policy, random_groups
from tests.support.tiny_models import make_tiny_model

NO_MODEL: Any = None
"""Without a reference, an update changes no weights but through the optimizer."""


@pytest.fixture
def model(tmp_path: Path) -> Any:
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    folder = make_tiny_model(tmp_path / "llama", "llama", **shape)
    return AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="sdpa", dtype=torch.float64
    )


@pytest.mark.parametrize("masks", [{}, {"mask": (0.9, 1.1)}])
def test_many_updates_of_exact_samples_are_drift_and_no_mismatch(
    model: Any, masks: dict[str, float]
) -> None:
    groups = near_policy(model, random_groups(model, num_groups=4), noise=0.0)
    config: Any = SimpleNamespace(
        objective=ObjectiveSettings(**masks), update=UpdateSettings(updates=4, max_tokens=200)
    )
    optimizer = Optimizer(model.named_parameters(), OptimSettings(lr=0.01), num_steps=1)
    metrics = update(config, Policy(model), NO_MODEL, groups, optimizer, None, policy_version=0)
    assert metrics["num_updates"] == 4
    assert metrics["mismatch_max"] < 1e-5
    assert metrics["masked"] == 0.0
    assert metrics["drift_max"] > 0.1


class Noisy(BaseEngine):
    """A reply of random tokens with the model's log-probabilities, changed."""

    model = "noisy"
    tokenizer = ""

    def __init__(self, model: Any, change: Callable[[float], float]) -> None:
        self._model, self._change = model, change

    async def aclose(self) -> None: ...

    async def complete(self, messages: Sequence[Message], sampling: Sampling) -> Completion:
        prompt, reply = random.Random("prompt"), random.Random(sampling.seed)
        size = self._model.config.vocab_size
        ids = [prompt.randrange(3, size) for _ in range(8)] + [
            reply.randrange(3, size) for _ in range(12)
        ]
        with torch.no_grad():
            row = torch.tensor([ids])
            logits = self._model(row, attention_mask=torch.ones_like(row)).logits
            logprobs = logits[0].log_softmax(-1)
        theirs = [logprobs[at - 1, ids[at]].item() for at in range(8, 20)]
        return Completion(
            text="x",
            finish_reason="stop",
            prompt_ids=tuple(ids[:8]),
            completion_ids=tuple(ids[8:]),
            logprobs=tuple(map(self._change, theirs)),
        )


Scores = Callable[[Sequence[Pack]], Awaitable[list[list[float]]]]


def scores_of(policy: Policy) -> Scores:
    async def scores(packs: Sequence[Pack]) -> list[list[float]]:
        return [one.tolist() for one in score(policy, packs)]

    return scores


async def agreement(
    model: Any, change: Callable[[float], float], temperature: float = 1.0, scores: Any = None
) -> Any:
    scores = scores or scores_of(Policy(model, temperature=temperature))
    vocabulary = model.config.vocab_size
    return await check_agreement(
        Noisy(model, change), scores, temperature=temperature, vocabulary=vocabulary
    )


async def test_an_engine_whose_log_probabilities_are_not_the_trainers_is_refused(
    model: Any,
) -> None:
    exact = await agreement(model, lambda p: p)
    assert len(exact) == 24
    assert exact.max() < 1e-5
    rounded = await agreement(model, lambda p: round(p, 1))
    assert 0 < rounded.mean() < 0.05
    with pytest.raises(
        ConfigError, match=r"over 24 tokens of 2 rows .* differ by 0\.300 per token"
    ):
        await agreement(model, lambda p: p - 0.3)
    with pytest.raises(ConfigError, match="noisy"):
        await agreement(model, lambda p: p, temperature=0.5)


def without_branches(model: Any) -> Scores:
    """Scores as of a model whose rows in a pack see each other."""

    async def scores(packs: Sequence[Pack]) -> list[list[float]]:
        found = []
        for one in packs:
            with torch.no_grad():
                logits = model(
                    torch.from_numpy(one.ids)[None],
                    position_ids=torch.from_numpy(one.positions)[None],
                    attention_mask=torch.ones((1, one.num_tokens), dtype=torch.int64),
                ).logits[0]
            chosen = logits.log_softmax(-1)[one.targets.places, one.targets.ids]
            found.append(chosen.tolist())
        return found

    return scores


async def test_rows_that_see_each_other_in_a_pack_are_refused(model: Any) -> None:
    with pytest.raises(ConfigError, match="over 24 tokens of 2 rows of up to 20 tokens"):
        await agreement(model, lambda p: p, scores=without_branches(model))


def longer(group: Group, num: int, model: Any) -> Group:
    """The group with prompts that are longer by `num` tokens, sampled from the model."""
    before = (5,) * num
    rollouts = [
        replace(
            rollout,
            samples=tuple(
                replace(
                    one,
                    ids=before + one.ids,
                    is_sampled=(False,) * num + one.is_sampled,
                    logprobs=(0.0,) * num + one.logprobs,
                )
                for one in rollout.samples
            ),
        )
        for rollout in group.rollouts
    ]
    return near_policy(model, [replace(group, rollouts=tuple(rollouts))], noise=0.0)[0]


async def test_rows_twice_as_long_as_what_was_compared_are_compared_again(model: Any) -> None:
    short, other = random_groups(model)
    long = longer(other, 10, model)
    num_long = max(len(one.ids) for rollout in long.rollouts for one in rollout.samples)
    policy_version = 0
    packs: list[Pack] = []

    async def scores(some: Sequence[Pack]) -> list[list[float]]:
        packs.extend(some)
        return await scores_of(Policy(model))(some)

    async def check(
        groups: Sequence[Group],
        num_checked: int,
        score: Scores = scores,
        served: str | None = "there",
    ) -> int:
        return await check_longer(
            groups, score, num_checked=num_checked, policy_version=policy_version, served=served
        )

    assert await check([short, long], 0) == num_long
    assert [len(set(one.targets.rows.tolist())) for one in packs] == [2, 1, 1, 2]
    assert await check([short, long], num_long // 2 + 1) == num_long // 2 + 1
    assert len(packs) == 4
    assert await check([short, long], 0, served=None) == num_long
    assert len(packs) == 7, "nothing is compared with an engine of this process"
    with pytest.raises(ConfigError, match="there reports log-probabilities that are not"):
        await check([short], 0)  # its log-probabilities are made up
    with pytest.raises(
        ConfigError, match=f"rows of up to {num_long} tokens score otherwise in a pack"
    ):
        await check([long], 0, without_branches(model), None)
    policy_version = 1  # the weights have changed since
    assert await check([short, long], 0) == 0


def run_update(
    model: Any, groups: Sequence[Group], *, max_tokens: int = 10_000, **objective: Any
) -> dict[str, float]:
    """The metrics of one update that changes nothing."""
    config: Any = SimpleNamespace(
        objective=ObjectiveSettings(**objective), update=UpdateSettings(max_tokens=max_tokens)
    )
    settings = OptimSettings(lr=1e-30)
    optimizer = Optimizer(model.named_parameters(), settings, num_steps=1)
    return update(config, Policy(model), NO_MODEL, groups, optimizer, None, policy_version=0)


def with_equal_rewards(group: Group) -> Group:
    same = tuple(replace(rollout, reward=1.0) for rollout in group.rollouts)
    return replace(group, rollouts=same)


@pytest.mark.parametrize("recompute", [False, True])
def test_statistics_cover_tokens_of_groups_without_signal(model: Any, recompute: bool) -> None:
    groups = near_policy(model, random_groups(model, num_groups=4), noise=0.1)
    objective: dict[str, Any] = {"clip_low": 0.01, "clip_high": 0.01}
    objective["old_logprobs"] = "recompute" if recompute else "engine"
    alone = run_update(model, groups[:1], **objective)
    both = run_update(model, [groups[0], with_equal_rewards(groups[1])], **objective)
    num_one, num_two = (
        sum(rollout.num_sampled for rollout in group.scored) for group in groups[:2]
    )
    assert alone["num_tokens"] == num_one
    assert both["num_tokens"] == pytest.approx(num_one + num_two)
    for name in ("clip_low", "clip_high"):
        share = alone[name] * num_one / (num_one + num_two)
        assert both[name] == pytest.approx(share), "tokens without advantage are not clipped"
    if not recompute:
        assert alone["clip_low"] > 0
    everything = run_update(model, groups[:2], **objective)
    assert both["entropy"] == pytest.approx(everything["entropy"])
    assert both["entropy"] != pytest.approx(alone["entropy"])


def test_a_step_without_signal_has_statistics_and_no_update(model: Any) -> None:
    groups = near_policy(model, random_groups(model, num_groups=2), noise=0.1)
    equal = [with_equal_rewards(group) for group in groups]
    metrics = run_update(model, equal)
    assert metrics["num_updates"] == 0
    assert metrics["entropy"] > 0
    assert metrics["mismatch_kl"] > 0
    assert metrics["clip_low"] == metrics["clip_high"] == 0
    trained = run_update(model, groups)
    assert metrics["num_tokens"] == trained["num_tokens"]
    assert metrics["entropy"] == pytest.approx(trained["entropy"])
    sampled = run_update(model, equal, max_tokens=200)
    assert sampled["packed_tokens"] < metrics["packed_tokens"], "a sample of the rows is scored"
    assert sampled["num_tokens"] == pytest.approx(trained["num_tokens"])
    assert sampled["entropy"] == pytest.approx(trained["entropy"], rel=0.05)


def test_rows_for_statistics_are_whole_turns_of_groups_at_even_distances() -> None:
    def row(group: int, rollout: int, turn: int) -> TrainingRow:
        ids = (group, turn, rollout, 9)
        sample = Sample(ids=ids, is_sampled=(False, False, False, True), logprobs=(0.0,) * 4)
        return TrainingRow(
            sample=sample, group=group, rollout=rollout, advantage=0.0, weight=0.0, turn=turn
        )

    rows = [
        row(group, rollout, turn) for group in (0, 1) for rollout in (0, 1, 2) for turn in (0, 1, 2)
    ]
    found = sample_turns(rows, max_tokens=30)  # of 72
    assert [(one.group, one.turn) for one in found] == [(0, 0)] * 3 + [(1, 0)] * 3
    assert [one.rollout for one in found] == [0, 1, 2] * 2
    assert sorted(sample_turns(rows, max_tokens=72), key=rows.index) == rows
    assert sample_turns([], max_tokens=72) == []
