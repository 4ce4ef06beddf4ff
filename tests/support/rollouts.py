"""Rollouts of random tokens: groups that share sections, with a tool turn in between.

random_groups(model)                groups of rollouts, rewards between 0 and 1
near_policy(model, groups)          the same, as if weights near the model's had sampled them
random_until(seed, vocabulary=3)    `until` of a pack of random rows
dense_mask(until)                   who sees whom in a pack, pair by pair
"""

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from memagent.rl.types import Group, Rollout, Sample
from memagent.rl.update.packing import pack
from memagent.rl.update.rows import TrainingRow


def random_groups(
    model: Any, *, seed: int = 0, num_groups: int = 2, group_size: int = 3
) -> list[Group]:
    """Rollouts of two sections and an answer, and one with a tool in between; random tokens."""
    rng = random.Random(seed)

    def tokens(count: int) -> list[int]:
        return [rng.randrange(3, model.config.vocab_size) for _ in range(count)]

    groups = []
    for number in range(num_groups):
        question, sections = tokens(4), [tokens(rng.randint(10, 14)) for _ in range(2)]
        rollouts = []
        for index in range(group_size):
            samples = []
            for section in sections:
                prompt = [*question, *section, *tokens(rng.randint(0, 4))]
                samples.append(sample(prompt, tokens(rng.randint(1, 6)), rng))
            samples.append(sample(question, tokens(3), rng, then=(tokens(2), tokens(2))))
            rollouts.append(
                Rollout(
                    task_id=str(number), index=index, samples=tuple(samples), reward=rng.random()
                )
            )
        groups.append(Group(task_id=str(number), rollouts=tuple(rollouts)))
    return groups


def sample(
    prompt: Sequence[int],
    reply: Sequence[int],
    rng: random.Random,
    then: tuple[list[int], list[int]] = ([], []),
) -> Sample:
    tool, more = then
    marks = [False] * len(prompt) + [True] * len(reply) + [False] * len(tool) + [True] * len(more)
    return Sample(
        ids=(*prompt, *reply, *tool, *more),
        is_sampled=tuple(marks),
        logprobs=tuple(-5.5 + rng.random() if mark else 0.0 for mark in marks),
    )


def near_policy(model: Any, groups: Sequence[Group], *, noise: float = 0.4) -> list[Group]:
    """The same rollouts with behaviour near the model's own, so that some ratios are clipped."""
    rng = random.Random(1)

    def with_logprobs(one: Sample) -> Sample:
        own = row_logprobs(model, one.ids).tolist()
        values = [
            logprob + rng.gauss(0, noise) if mark else 0.0
            for mark, logprob in zip(one.is_sampled, [0.0, *own], strict=True)
        ]
        return Sample(ids=one.ids, is_sampled=one.is_sampled, logprobs=tuple(values))

    return [
        Group(
            task_id=group.task_id,
            rollouts=tuple(
                Rollout(
                    task_id=rollout.task_id,
                    index=rollout.index,
                    samples=tuple(map(with_logprobs, rollout.samples)),
                    reward=rollout.reward,
                )
                for rollout in group.rollouts
            ),
        )
        for group in groups
    ]


@torch.no_grad()
def row_logprobs(model: Any, ids: Sequence[int]) -> torch.Tensor:
    logits = model(torch.tensor([ids])).logits[0, :-1]
    chosen: torch.Tensor = logits.log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    return chosen


def dense_mask(until_N: torch.Tensor) -> torch.Tensor:
    """Who sees whom, as [queries, keys]."""
    places_N = torch.arange(len(until_N))
    return (places_N[None, :] <= places_N[:, None]) & (places_N[:, None] < until_N[None, :])


def random_until(
    seed: int, *, vocabulary: int, num_rows: int = 12, longest: int = 30
) -> np.ndarray:
    """Of a pack of random rows; with few different tokens they part at many depths."""
    rng = random.Random(seed)
    rows = []
    for number in range(num_rows):
        ids = tuple(rng.randrange(vocabulary) for _ in range(rng.randint(1, longest)))
        one = Sample(ids=ids, is_sampled=(False,) * len(ids), logprobs=(0.0,) * len(ids))
        rows.append(TrainingRow(sample=one, group=number % 2, rollout=0, advantage=0.0, weight=0.0))
    (packed,) = pack(rows, max_tokens=10_000)
    return packed.until
