"""Reinforcement learning of a memory agent in one file: a tiny model learns to read, carry and answer.

    python examples/minimal_rl.py                # about ten seconds on one CPU core
    python examples/minimal_rl.py --steps 20     # a quick look

A text has three sections of four tokens. One of them holds a marked value; the rest is noise. The model
reads one section per call, together with a memory of one token, and its reply is the next memory. The last
call sees only the memory, and its reply is the answer. The reward is 1 for the right answer, else 0.

    section + memory ─▶ memory ─▶ section + memory ─▶ memory ─▶ ... ─▶ memory ─▶ answer ─▶ reward

A warm start demonstrates texts of one section. To keep a memory while reading noise is not demonstrated;
the model discovers it by reinforcement learning. Every part of a training run is here: warm start, groups
of rollouts, advantages within a group, weighted tokens, shared prefixes, clipped updates. The functions are
those of `memagent.rl`; docs/training.md has the formula. Engine and update share the weights in memory.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from typing import NamedTuple

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from memagent.engines.local.generator import Generator
from memagent.rl.settings import ObjectiveSettings
from memagent.rl.types import Group, Rollout, Sample
from memagent.rl.update.loss import merged, summary
from memagent.rl.update.packing import num_row_tokens, pack
from memagent.rl.update.policy import Policy, accumulate
from memagent.rl.update.rows import TrainingRow, rows_of, split_groups
from memagent.types import Sampling

VALUES = range(4)
EMPTY, NOISE, MARK, READ, ANSWER, END = range(4, 10)
NUM_SECTIONS, SECTION_TOKENS = 3, 4
WARM_STEPS, TASKS_PER_STEP, GROUP_SIZE, UPDATES_PER_STEP = 40, 16, 16, 2
OBJECTIVE = ObjectiveSettings(clip_low=0.2, clip_high=0.28)


class Task(NamedTuple):
    """A text in sections, and its value."""

    sections: list[list[int]]
    value: int


def make_task(rng: random.Random, num_sections: int = NUM_SECTIONS) -> Task:
    """One value, after a mark, somewhere in a text of noise."""
    value = rng.choice(VALUES)
    sections = [[NOISE] * SECTION_TOKENS for _ in range(num_sections)]
    place = rng.randrange(SECTION_TOKENS - 1)
    rng.choice(sections)[place : place + 2] = [MARK, value]
    return Task(sections, value)


def warm_start(policy: Policy, optimizer: torch.optim.Optimizer, rng: random.Random) -> None:
    """Train on the right replies for texts of one section: the mean of -log p over tokens."""
    for _ in range(WARM_STEPS):
        rows = []
        for task in (make_task(rng, num_sections=1) for _ in range(TASKS_PER_STEP)):
            for prompt in ([READ, *task.sections[0], EMPTY], [ANSWER, task.value]):
                sample = sample_of(prompt, [task.value], [0.0])
                weight = 1 / (2 * TASKS_PER_STEP)
                rows.append(
                    TrainingRow(sample=sample, group=0, rollout=0, advantage=1.0, weight=weight)
                )
        for one in pack(rows, max_tokens=1024):
            weights = torch.from_numpy(one.targets.weights)
            (-weights * policy(one).logprobs).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def sample_of(prompt: Sequence[int], reply: Sequence[int], logprobs: Sequence[float]) -> Sample:
    """A row of a prompt and a reply; the reply carries loss."""
    return Sample(
        ids=(*prompt, *reply),
        is_sampled=(*[False] * len(prompt), *[True] * len(reply)),
        logprobs=(*[0.0] * len(prompt), *logprobs),
    )


def roll_out(generator: Generator, tasks: list[Task], rng: random.Random) -> list[Group]:
    """A group of rollouts per task; all advance together, one call at a time."""
    attempts = [(number, task) for number, task in enumerate(tasks) for _ in range(GROUP_SIZE)]
    memories = [EMPTY] * len(attempts)
    samples: list[list[Sample]] = [[] for _ in attempts]
    for turn in range(NUM_SECTIONS + 1):
        requests = []
        for (_, task), memory in zip(attempts, memories, strict=True):
            is_final = turn == NUM_SECTIONS
            prompt = [ANSWER, memory] if is_final else [READ, *task.sections[turn], memory]
            sampling = Sampling(max_tokens=1, temperature=1.0)
            requests.append(generator.submit(prompt, sampling, seed=rng.getrandbits(32)))
        while generator.has_work:
            generator.step()
        memories = [request.completion_ids[0] for request in requests]
        for rows, request in zip(samples, requests, strict=True):
            rows.append(sample_of(request.prompt_ids, request.completion_ids, request.logprobs))
    rollouts = [
        Rollout(
            task_id=str(number),
            index=index % GROUP_SIZE,
            samples=tuple(samples[index]),
            reward=float(memories[index] == task.value),  # the last reply is the answer
        )
        for index, (number, task) in enumerate(attempts)
    ]
    starts = range(0, len(rollouts), GROUP_SIZE)
    return [
        Group(task_id=rollouts[start].task_id, rollouts=tuple(rollouts[start : start + GROUP_SIZE]))
        for start in starts
    ]


def train(num_steps: int, *, seed: int, every: int = 10) -> list[float]:
    """Train from random weights; the mean reward of each step of reinforcement learning."""
    torch.manual_seed(seed)
    rng = random.Random(seed)
    config = LlamaConfig(
        vocab_size=END + 1,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=32,
        eos_token_id=END,
        pad_token_id=END,
    )
    model = LlamaForCausalLM(config)
    policy = Policy(model)
    generator = Generator(
        model, num_slots=4096, eos_ids=[END], max_batch_tokens=2048, max_running=256
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.0)
    warm_start(policy, optimizer, rng)
    generator.weights_changed()
    rewards = []
    for step in range(num_steps):
        groups = roll_out(generator, [make_task(rng) for _ in range(TASKS_PER_STEP)], rng)
        rewards.append(
            sum(r.reward for g in groups for r in g.rollouts) / TASKS_PER_STEP / GROUP_SIZE
        )
        stats, saved = [], 1.0
        for part in split_groups(groups, UPDATES_PER_STEP):
            rows = rows_of(part, OBJECTIVE).rows
            packs = pack(rows, max_tokens=1024)
            if not packs:  # no group has signal
                continue
            saved = num_row_tokens(rows) / sum(one.num_tokens for one in packs)
            stats.append(accumulate(policy, packs, OBJECTIVE, with_entropy=True))
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        generator.weights_changed()
        if (step % every == 0 or step == num_steps - 1) and stats:
            metrics = summary(merged(stats))
            print(
                f"step {step:4}  reward {rewards[-1]:.2f}  entropy {metrics['entropy']:.2f}  "
                f"ratio {metrics['ratio']:.3f}  clipped {metrics['clip_low'] + metrics['clip_high']:.3f}  "
                f"{saved:.1f} x fewer tokens by sharing"
            )
    return rewards


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    train(arguments.steps, seed=arguments.seed)
