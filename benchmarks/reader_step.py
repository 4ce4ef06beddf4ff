"""A step of training a reader with its real weights: `python -m benchmarks.rl_step --model MODEL --adapter FOLDER`.

The load is that of the 1.5B reader: 16 groups of 8 rollouts over 7K tokens. A rollout reads four sections of 2,048
tokens that its group shares, one after the other, and answers. Each prompt ends with a memory of the rollout's own;
replies have a fixed length, so that both models sample the same number of tokens.

    base      replies by the embedded engine on the model without an adapter
    adapter   the same with the adapter merged into a copy of the weights, as training does
    update    of the adapter, on the rollouts of `adapter`, once for each share of `--signal`: in so many groups
              rewards differ, the others are not trained on

Times are the best of several steps after a warm-up. Merging the adapter again is part of the update. Rollouts are
sampled once for all shares.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from memagent.engines.local.generator import Generator
from memagent.engines.local.scheduler import GenerationRequest
from memagent.rl.settings import (
    ModelSettings,
    ObjectiveSettings,
    OptimSettings,
    RolloutSettings,
    UpdateSettings,
)
from memagent.rl.types import Group, Rollout, Sample
from memagent.rl.update.learner import update
from memagent.rl.update.optim import Optimizer
from memagent.rl.update.policy import Policy
from memagent.rl.weights.models import MergedCopy, open_model
from memagent.types import Sampling

LR = 1e-6
SIGNALS = (1.0, 0.5)
"""Shares of groups with signal: all of them, and about what training shows."""


class ReaderLoad(NamedTuple):
    """Rollouts of one step."""

    groups: int = 16
    group_size: int = 8
    sections: int = 4
    section: int = 2200
    """Tokens that the prompts of a group share at one section: instructions, question, text."""
    memory: int = 120
    reply: int = 80
    answer: int = 16
    max_tokens: int = 16384
    """Of a packed sequence."""
    repeats: int = 3

    @property
    def num_rollouts(self) -> int:
        return self.groups * self.group_size

    @property
    def num_slots(self) -> int:
        own = (self.sections + 1) * (self.memory + self.reply + 256)
        return self.groups * self.sections * self.section + self.num_rollouts * own


SMALL = ReaderLoad(groups=2, group_size=4, section=60, memory=8, reply=6, answer=4, max_tokens=400)


class StepSettings(NamedTuple):
    """The part of a run's settings that an update reads."""

    objective: ObjectiveSettings
    update: UpdateSettings


class UpdateTime(NamedTuple):
    """Seconds of an update on rollouts of which a share has signal."""

    signal: float
    update: float
    metrics: dict[str, float]


class ReaderTimes(NamedTuple):
    """Seconds of the parts of a step."""

    base: float
    adapter: float
    updates: list[UpdateTime]

    def step(self, of: UpdateTime) -> float:
        """Rollouts with the adapter, and an update."""
        return self.adapter + of.update

    @property
    def speed(self) -> float:
        """Rollouts with the adapter relative to those without."""
        return self.base / self.adapter


class Prompts:
    """The prompts of every rollout; they do not depend on replies."""

    def __init__(self, load: ReaderLoad, vocabulary: int) -> None:
        self._load = load
        self._rng = random.Random(0)
        self._vocabulary = vocabulary
        self._sections = {
            (group, turn): self._some(load.section)
            for group in range(load.groups)
            for turn in range(load.sections)
        }

    def prompt(self, rollout: int, turn: int) -> list[int]:
        """The prompt of a turn; after the sections comes the answer, from the memory alone."""
        shared = self._sections.get((rollout // self._load.group_size, turn), [])
        return [*shared, *self._some(self._load.memory)]

    def _some(self, count: int) -> list[int]:
        return [self._rng.randrange(self._vocabulary) for _ in range(count)]


def sample_rollouts(
    generator: Generator, prompts: Prompts, load: ReaderLoad
) -> list[list[GenerationRequest]]:
    """The requests of each rollout; the next turn of a rollout starts when its last one has ended."""
    found: list[list[GenerationRequest]] = [[] for _ in range(load.num_rollouts)]
    owner: dict[int, int] = {}

    def submit(rollout: int) -> None:
        turn = len(found[rollout])
        length = load.reply if turn < load.sections else load.answer
        sampling = Sampling(max_tokens=length, temperature=1.0)
        request = generator.submit(prompts.prompt(rollout, turn), sampling, seed=rollout)
        owner[id(request)] = rollout
        found[rollout].append(request)

    for rollout in range(load.num_rollouts):
        submit(rollout)
    while generator.has_work:
        for request in generator.step():
            rollout = owner[id(request)]
            if len(found[rollout]) <= load.sections:
                submit(rollout)
    return found


def groups_of(
    requests: Sequence[Sequence[GenerationRequest]], load: ReaderLoad, signal: float
) -> list[Group]:
    """Groups to train on; the rewards of a share of them differ."""
    return [
        Group(task_id=str(number), rollouts=tuple(_rollouts(requests, load, number, signal)))
        for number in range(load.groups)
    ]


def _rollouts(
    requests: Sequence[Sequence[GenerationRequest]], load: ReaderLoad, group: int, signal: float
) -> Iterator[Rollout]:
    has_signal = group < round(signal * load.groups)
    for index in range(load.group_size):
        samples = tuple(map(_sample, requests[group * load.group_size + index]))
        reward = float(index % 2) if has_signal else 1.0
        yield Rollout(task_id=str(group), index=index, samples=samples, reward=reward)


def _sample(request: GenerationRequest) -> Sample:
    given, sampled = len(request.prompt_ids), len(request.completion_ids)
    return Sample(
        ids=(*request.prompt_ids, *request.completion_ids),
        is_sampled=(*[False] * given, *[True] * sampled),
        logprobs=(*[0.0] * given, *request.logprobs),
    )


def measure(
    model: ModelSettings, load: ReaderLoad, *, signals: Sequence[float], compiled: bool
) -> ReaderTimes:
    """Times of a step; `model` names an adapter, or the rank of a new one."""
    assert model.source is not None
    plain = open_model(ModelSettings(source=model.source), model.source, seed=0)
    base = Sampler(plain.model, load)
    base_s = min(base.timed()[0] for _ in range(load.repeats))
    del base, plain
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    trained = open_model(model, model.source, seed=0)
    merged = MergedCopy(trained.loaded)
    adapter = Sampler(merged.loaded.model, load)
    objective = ObjectiveSettings(clip_high=0.28)
    config: Any = StepSettings(objective, UpdateSettings(max_tokens=load.max_tokens))
    policy = Policy(trained.model, compiled=compiled, temperature=RolloutSettings().temperature)
    optimizer = Optimizer(trained.parameters, OptimSettings(lr=LR), num_steps=100)

    def learn(groups: list[Group], version: int) -> dict[str, float]:
        found = update(config, policy, trained, groups, optimizer, None, policy_version=version)
        merged.refresh()
        adapter.generator.weights_changed()
        return found

    adapter_s = list[float]()
    updates: list[list[UpdateTime]] = [[] for _ in signals]
    for version in range(load.repeats + 1):
        seconds, requests = adapter.timed()
        adapter_s.append(seconds)
        for found, signal in zip(updates, signals, strict=True):
            groups = groups_of(requests, load, signal)
            found.append(UpdateTime(signal, *timed(partial(learn, groups, version))))
    # the first ones compile
    best = [min(found[1:], key=lambda one: one.update) for found in updates]
    return ReaderTimes(base_s, min(adapter_s[1:]), best)


class Sampler:
    """Samples the rollouts of a step from a model, again and again."""

    def __init__(self, model: Any, load: ReaderLoad) -> None:
        self._load = load
        self._vocabulary = model.get_input_embeddings().num_embeddings
        self.generator = Generator(
            model,
            num_slots=load.num_slots,
            eos_ids=(),
            max_batch_tokens=131072,
            max_running=load.num_rollouts,
        )
        self.timed()

    def timed(self) -> tuple[float, list[list[GenerationRequest]]]:
        """Seconds of the rollouts of a step, from an empty cache."""
        prompts = Prompts(self._load, self._vocabulary)
        self.generator.forget()
        return timed(lambda: sample_rollouts(self.generator, prompts, self._load))


def timed(act: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds of a call, and its result."""
    wait = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    wait()
    started = time.perf_counter()
    result = act()
    wait()
    return time.perf_counter() - started, result


def report(times: ReaderTimes, load: ReaderLoad) -> dict[str, Any]:
    """Print the times; the same as a record."""
    print(
        f"{load.groups} x {load.group_size} rollouts of {load.sections} sections: "
        f"base {times.base:.2f} s, with the adapter {times.adapter:.2f} s ({times.speed:.0%} of the speed)"
    )
    for one in times.updates:
        print(
            f"{one.signal:.0%} of the groups with signal: update {one.update:.2f} s, step {times.step(one):.2f} s"
        )
    updates = [{**one._asdict(), "step": times.step(one)} for one in times.updates]
    record = {"load": load._asdict(), **times._asdict(), "speed": times.speed}
    return {**record, "updates": updates}
