"""Validation: an agent on examples that are never learnt from, by the evaluation's runner.

    examples ──▶ agent, through a client ──▶ answer ──▶ reward of training ──▶ mean, 95 % interval
                       │                        └────▶ further graders
                       └─ each call a step of the item's trace

    validation = Validation(settings, agent, reward, examples, seed=0, max_tokens=1024)
    result = await validation.run(engine)
    result.metrics["reward"], result.metrics["ruler/vt/reward_low"]

Items, records and failures are those of an evaluation: a failed item counts as 0 and stays in every mean
of rewards, and an engine that fails again and again ends the validation with its error. With the
driver `lockstep` examples are asked in waves, so that replies repeat as those of rollouts do.

    reward, reward_low, reward_high     over all examples, with its 95 % interval
    GRADER                              mean of a further grader
    TASK/reward, TASK/reward_low, ...   the same per task, and as TASK/TOKENS/... where it has several lengths
    num_examples, num_failed
    agent/NAME                          what the agent reports, and calls and tokens, mean over the others
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from statistics import fmean
from typing import Any

from memagent.agent.trace import Step, Trace
from memagent.data.example import Example
from memagent.engines.base import BaseEngine
from memagent.errors import ConfigError
from memagent.eval.runner import Context, ItemRecord, Watcher, evaluate_examples, score_interval
from memagent.rl.agents.api import Agent
from memagent.rl.agents.client import Client, RunSampling, Session
from memagent.rl.agents.rewards import Reward, open_reward
from memagent.rl.rollouts.collect import checked_outcome, reward_of
from memagent.rl.rollouts.drivers import Driver, DriverName, Place, open_driver
from memagent.rl.settings import ValidationSettings
from memagent.runs import Run
from memagent.types import Completion, Engine, Message, Sampling, Usage

TITLE = "agent"
"""The method of the records."""
GRADER = "reward"
"""What graded them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationResult:
    """What a validation came to."""

    metrics: Mapping[str, float]
    """By name, as the page above lists them."""
    records: tuple[dict[str, Any], ...]
    """One per example, as an evaluation writes them but without traces; by task, length and number."""


class Validation:
    """An agent, its reward, and the examples that it is asked again and again."""

    def __init__(
        self,
        settings: ValidationSettings,
        agent: Agent,
        reward: Reward,
        examples: Sequence[Example],
        *,
        seed: int,
        max_tokens: int,
        driver: DriverName = "free",
    ) -> None:
        """`max_tokens` limits a reply where the agent sets no limit."""
        if not examples:
            raise ConfigError(
                "validation has no examples; raise validation.num or name other tasks"
            )
        self._settings = settings
        self._agent = agent
        self._reward = reward
        self._graders = {name: open_reward(name) for name in settings.graders}
        self.examples = examples
        self._seed = seed
        self._driver: DriverName = driver
        self._sampling = RunSampling(
            temperature=settings.temperature, max_tokens=max_tokens, is_forced=True
        )

    async def run(
        self, engine: Engine, *, run: Run | None = None, watch: Watcher | None = None
    ) -> ValidationResult:
        """Ask all examples. With a run, each record is on disk when it is finished."""

        driver = open_driver(self._driver, engine)
        numbers = count()

        async def attempt(example: Example, context: Context) -> Trace:
            return await self._attempt(example, context, engine, driver, (next(numbers), 0))

        records = await evaluate_examples(
            self.examples,
            attempt,
            engine,
            title=TITLE,
            seed=self._seed,
            grader=GRADER,
            run=run,
            concurrency=self._settings.concurrency,
            in_waves=self._driver == "lockstep",
            watch=watch,
        )
        return ValidationResult(
            metrics=self._metrics(records), records=tuple(record.to_dict() for record in records)
        )

    async def _attempt(
        self, example: Example, context: Context, engine: Engine, driver: Driver, place: Place
    ) -> Trace:
        """One example, as a method of the evaluation: the agent's calls are its steps."""
        session = Session(
            _StepEngine(context, engine),
            task_id=example.id,
            index=0,
            seed=self._seed,
            sampling=self._sampling,
            turn=partial(driver.turn, place),
            needs_tokens=False,
        )
        driver.enter(place)
        try:
            outcome = checked_outcome(await self._agent(example, Client(session)), session)
        finally:
            driver.leave(place)
        context.score = await reward_of(example, outcome, self._reward)
        context.notes["scores"] = {
            name: await grader(example, outcome) for name, grader in self._graders.items()
        }
        context.notes["metrics"] = {
            **{name: float(value) for name, value in outcome.metrics.items()},
            "calls": float(session.usage.calls),
            "prompt_tokens": float(session.usage.prompt_tokens),
            "sampled_tokens": float(session.usage.completion_tokens),
        }
        context.notes["record"] = dict(outcome.record)
        context.steps[-1] = replace(context.steps[-1], kind="answer", reply=outcome.answer)
        return context.trace()

    def _metrics(self, records: Sequence[ItemRecord]) -> dict[str, float]:
        found = {
            "num_examples": float(len(records)),
            "num_failed": float(sum(record.status == "failed" for record in records)),
            **self._scores(records),
        }
        for name, some in _by_kind(records).items():
            found |= {f"{name}/{key}": value for key, value in self._scores(some).items()}
        own: dict[str, list[float]] = defaultdict(list)
        for record in records:
            for name, value in _notes(record, "metrics").items():
                own[name].append(value)
        return found | {f"agent/{name}": fmean(values) for name, values in sorted(own.items())}

    def _scores(self, records: Sequence[ItemRecord]) -> dict[str, float]:
        interval = score_interval([record.score for record in records])
        return {
            "reward": interval.value,
            "reward_low": interval.low,
            "reward_high": interval.high,
            **{
                name: fmean(_notes(record, "scores").get(name, 0.0) for record in records)
                for name in self._graders
            },
        }


class _StepEngine(BaseEngine):
    """The engine as an agent calls it in an evaluation: each call becomes a step of the item."""

    def __init__(self, context: Context, engine: Engine) -> None:
        """The item's own engine answers; what else is known of it, `engine` tells."""
        self.model = engine.model
        self.tokenizer = engine.tokenizer
        if isinstance(engine, BaseEngine):
            self.served_window = engine.served_window
            self.reading_defaults = engine.reading_defaults
        self._context = context

    async def complete(self, messages: Sequence[Message], sampling: Sampling) -> Completion:
        """One reply, noted."""
        started, clock = time.time(), time.perf_counter()
        completion = await self._context.engine.complete(messages, sampling)
        steps = self._context.steps
        steps.append(
            Step(
                kind="read",
                index=len(steps),
                reply=completion.text,
                memory="",
                reasoning=completion.reasoning,
                flags=("reply_cut",) if completion.finish_reason == "length" else (),
                usage=completion.usage or Usage(calls=1, is_estimated=True),
                num_attempts=completion.num_attempts,
                started=round(started, 6),
                seconds=round(time.perf_counter() - clock, 6),
            )
        )
        return completion

    async def aclose(self) -> None:
        """The engine belongs to others."""


def _by_kind(records: Sequence[ItemRecord]) -> dict[str, list[ItemRecord]]:
    """The records of each task and, where a task has several lengths, of each of those."""
    lengths: dict[str, set[int | None]] = defaultdict(set)
    for record in records:
        lengths[record.task].add(record.target_tokens)
    found: dict[str, list[ItemRecord]] = defaultdict(list)
    for record in records:
        found[record.task].append(record)
        if len(lengths[record.task]) > 1:
            found[f"{record.task}/{record.target_tokens or 'any'}"].append(record)
    return found


def _notes(record: ItemRecord, name: str) -> Mapping[str, float]:
    """Numbers that an attempt noted; none of one that failed before."""
    noted: Mapping[str, float] = record.metadata.get("method", {}).get(name, {})
    return noted if record.status == "ok" else {}
