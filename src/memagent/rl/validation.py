"""Validation: an agent on held-out examples, by the evaluation's runner.

    examples ──▶ agent ──▶ Outcome ──▶ reward of training ──▶ mean, 95 % interval
                              │   └──▶ further graders
                              └─ its trace is the trace of the item

    validation = Validation(settings, agent, reward, examples, seed=0, max_tokens=1024)
    result = await validation.run(engine)
    result.metrics["reward"], result.metrics["ruler/vt/reward_low"]

Items, records and failures are those of an evaluation: a failed item counts as 0 and stays in every mean
reward, and an engine that fails again and again ends the validation with its error. With the driver
`lockstep` examples are asked in waves, so that replies are as reproducible as those of rollouts. Conversations
continue the sampled tokens, as rollouts do.

    reward, reward_low, reward_high     mean over all attempts; its 95 % interval treats the attempts at one
                                        example as one observation
    best_reward, pass_at_K              with several attempts at each example, as in `update/metrics.py`
    GRADER                              mean of a further grader
    TASK/reward, TASK/reward_low, ...   the same per task, and per TASK/TOKENS where it has several lengths
    num_examples, num_attempts, num_failed
    agent/NAME                          numbers of the agent, calls and tokens: mean over successful items
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from statistics import fmean
from typing import Any

from memagent.agent.trace import Trace
from memagent.data.example import Example
from memagent.errors import ConfigError
from memagent.eval.runner import Context, ItemRecord, evaluate_examples, score_interval
from memagent.rl.agents.api import Agent
from memagent.rl.agents.rewards import Reward, open_reward
from memagent.rl.agents.session import RunSampling, Session
from memagent.rl.rollouts.collect import reward_of, run_agent
from memagent.rl.rollouts.drivers import Driver, DriverName, RolloutKey, open_driver
from memagent.rl.settings import ValidationSettings
from memagent.rl.update.metrics import passes
from memagent.types import Engine

TITLE = "agent"
"""`ItemRecord.method` of the records."""
GRADER = "reward"
"""`ItemRecord.grader` of the records."""


CONCURRENCY = 256
"""Attempts in progress at once, at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidationResult:
    """The numbers of a validation, and its records."""

    metrics: Mapping[str, float]
    """By name, as listed above."""
    records: tuple[dict[str, Any], ...]
    """One ItemRecord per attempt, trace included; ordered by task, length and number."""


class Validation:
    """An agent, its reward, and the examples that every validation asks."""

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
                "validation has no examples; raise `validation.num` or name other tasks"
            )
        self._settings = settings
        self._agent = agent
        self._reward = reward
        self._graders = {name: open_reward(name) for name in settings.graders}
        self.examples = examples
        self._seed = seed
        self._driver: DriverName = driver
        self._sampling = RunSampling(
            temperature=settings.temperature,
            top_p=settings.top_p,
            max_tokens=max_tokens,
            is_forced=True,
        )

    async def run(self, engine: Engine) -> ValidationResult:
        """Ask all examples."""
        driver = open_driver(self._driver, engine)
        numbers = count()
        finished: list[ItemRecord] = []
        asked = [
            (replace(example), sample)  # a copy for each attempt
            for example in self.examples
            for sample in range(self._settings.samples)
        ]
        sample_of = {id(example): sample for example, sample in asked}

        async def attempt(example: Example, context: Context) -> Trace:
            sample = sample_of[id(example)]
            return await self._attempt(example, context, driver, (next(numbers), 0), sample)

        records = await evaluate_examples(
            [example for example, _ in asked],
            attempt,
            engine,
            title=TITLE,
            seed=self._seed,
            grader=GRADER,
            concurrency=CONCURRENCY,
            in_waves=self._driver == "lockstep",
            on_record=finished.append,
        )
        with_traces = {record.key: record for record in finished}
        return ValidationResult(
            metrics=self._metrics(records),
            records=tuple(with_traces[record.key].to_dict() for record in records),
        )

    async def _attempt(
        self, example: Example, context: Context, driver: Driver, key: RolloutKey, sample: int
    ) -> Trace:
        """One attempt at an example, as a method of the evaluation."""
        session = Session(
            context.engine,
            task_id=example.id,
            index=sample,
            seed=self._seed,
            sampling=self._sampling,
            turn=partial(driver.turn, key),
            needs_tokens=False,
        )
        try:
            outcome = await run_agent(self._agent, example, session, driver, key)
        finally:
            context.steps += session.steps  # kept of an item that fails
        context.score = await reward_of(example, outcome, self._reward)
        context.notes["rewards"] = {
            name: await grader(example, outcome) for name, grader in self._graders.items()
        }
        context.notes["metrics"] = {
            **{name: float(value) for name, value in outcome.metrics.items()},
            "calls": float(session.usage.calls),
            "prompt_tokens": float(session.usage.prompt_tokens),
            "sampled_tokens": float(session.usage.completion_tokens),
        }
        context.notes["record"] = dict(outcome.record)
        assert outcome.trace is not None, "run_agent adds one"
        return outcome.trace

    def _metrics(self, records: Sequence[ItemRecord]) -> dict[str, float]:
        found = {
            "num_examples": float(len(self.examples)),
            "num_attempts": float(len(records)),
            "num_failed": float(sum(record.status == "failed" for record in records)),
            **self._rewards(records),
        }
        for name, some in _by_kind(records).items():
            found |= {f"{name}/{key}": value for key, value in self._rewards(some).items()}
        own: dict[str, list[float]] = defaultdict(list)
        for record in records:
            for name, value in _notes(record, "metrics").items():
                own[name].append(value)
        return found | {f"agent/{name}": fmean(values) for name, values in sorted(own.items())}

    def _rewards(self, records: Sequence[ItemRecord]) -> dict[str, float]:
        by_example: dict[tuple[str, int | None, int], list[float]] = defaultdict(list)
        for record in records:  # attempts at one example have consecutive numbers
            number = record.index // self._settings.samples
            by_example[record.task, record.target_tokens, number].append(record.score)
        scores_EG = list(by_example.values())
        best = {}
        if self._settings.samples > 1:
            best = {"best_reward": fmean(map(max, scores_EG)), **passes(scores_EG)}
        interval = score_interval([fmean(scores) for scores in scores_EG])
        return {
            "reward": interval.value,
            "reward_low": interval.low,
            "reward_high": interval.high,
            **best,
            **{
                name: fmean(_notes(record, "rewards").get(name, 0.0) for record in records)
                for name in self._graders
            },
        }


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
    """Numbers that an attempt noted; empty for a failed one."""
    noted: Mapping[str, float] = record.metadata.get("method", {}).get(name, {})
    return noted if record.status == "ok" else {}
