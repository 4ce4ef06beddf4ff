"""The schedule of training, event by event: engines that generate, a trainer that updates, a driver between them.

    batch         0        1        2        3
    engines    ━━━━━━━━╌╌━━━━━━━╌╌━━━━━━━╌╌━━━━        a batch may start when its weights are at most
    trainer          ████     ████     ████            `max_staleness` steps older than the newest
    version    0        1        2        3

Replies have skewed lengths, so a synchronous step waits for its longest rollout. A replica decodes all of its
rows at once, one token each per step; a step takes longer with more rows, and prompts interrupt it. All
calls pass through the driver, one after the other. Same seed, same result.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from statistics import NormalDist

NORMAL = NormalDist()
BISECTIONS = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedCall:
    """One call of a rollout."""

    shared_seconds: float
    """Prompt tokens that the group shares: once for each replica."""
    own_seconds: float
    """The others."""
    reply_tokens: float
    """Mean length of the reply."""
    max_reply: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """What is simulated."""

    calls: tuple[SimulatedCall, ...]
    prompts: int
    """Groups that a step trains on."""
    group_size: int
    num_replicas: int
    max_rows: int
    """Rollouts that a replica decodes at once."""
    step_seconds: float
    """A decoding step without rows."""
    row_seconds: float
    """What each row adds."""
    train_seconds: float
    publish_seconds: float
    host_seconds: float
    """The driver's time for a call."""
    max_staleness: int = 0
    sigma: float = 1.15
    correlation: float = 0.3
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    """What came out, per training step."""

    step_seconds: float
    rollout_seconds: float
    """From the first call of a batch to its last, on average."""
    trainer_busy: float
    """Share of the time that the trainer computes."""
    engines_busy: float
    """Share of the time that a replica has something to compute, averaged over replicas."""
    driver_busy: float
    mean_rows: float
    """Rows of a decoding step of a busy replica."""
    max_age: int
    """Steps between the weights that a rollout began with and those that were trained on it, at most."""


def clipped_mean(mu: float, sigma: float, limit: float) -> float:
    """Mean of a log-normal length that is cut at a limit."""
    if sigma == 0:
        return min(math.exp(mu), limit)
    top = math.log(limit)
    below = math.exp(mu + sigma**2 / 2) * NORMAL.cdf((top - mu - sigma**2) / sigma)
    return below + limit * (1 - NORMAL.cdf((top - mu) / sigma))


def log_median(mean: float, sigma: float, limit: float) -> float:
    """The logarithm of the median whose cut length has this mean."""
    low, high = math.log(1e-3), math.log(limit) + 8 * sigma + 1
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        if clipped_mean(middle, sigma, limit) < mean:
            low = middle
        else:
            high = middle
    return (low + high) / 2


class ReplyLengths:
    """Draws the lengths of a rollout's replies: skewed, cut at their limits, partly common to the rollout."""

    def __init__(self, calls: Sequence[SimulatedCall], *, sigma: float, correlation: float) -> None:
        self._limits = [call.max_reply for call in calls]
        self._medians = [
            log_median(min(call.reply_tokens, 0.99 * call.max_reply), sigma, call.max_reply)
            for call in calls
        ]
        self._common = sigma * math.sqrt(correlation)
        self._single = sigma * math.sqrt(1 - correlation)

    def draw(self, rng: random.Random) -> list[int]:
        """Tokens of each reply of one rollout."""
        common = self._common * rng.gauss(0, 1)
        return [
            max(1, min(limit, round(math.exp(median + common + self._single * rng.gauss(0, 1)))))
            for median, limit in zip(self._medians, self._limits, strict=True)
        ]


@dataclass(slots=True)
class _Rollout:
    group: int
    lengths: list[int]
    version: int
    at_call: int = 0


@dataclass(slots=True)
class _Replica:
    """Rows that are decoded together. `clock` counts the tokens that each of them has got."""

    schedule: Schedule
    rows: list[tuple[float, int, _Rollout]] = field(default_factory=list)
    waiting: deque[_Rollout] = field(default_factory=deque)
    prefixes: set[tuple[int, int]] = field(default_factory=set)
    num_rollouts: int = 0
    clock: float = 0.0
    now: float = 0.0
    stall: float = 0.0
    """Seconds of prompts that come before the next decoding step."""
    busy: float = 0.0
    row_time: float = 0.0
    stamp: int = 0

    def advance(self, time: float) -> None:
        """Compute until a time."""
        elapsed = time - self.now
        self.now = time
        stalled = min(self.stall, elapsed)
        self.stall -= stalled
        decoding = elapsed - stalled
        if self.rows:
            self.clock += decoding / self._token_seconds()
            self.busy += decoding
            self.row_time += decoding * len(self.rows)
        self.busy += stalled

    def next_end(self) -> float | None:
        """When the next reply ends; None if there is none."""
        if not self.rows:
            return None
        left = max(0.0, self.rows[0][0] - self.clock)
        return self.now + self.stall + left * self._token_seconds()

    def start(self, rollout: _Rollout, order: int) -> None:
        """Begin the next call of a rollout."""
        if len(self.rows) >= self.schedule.max_rows:
            self.waiting.append(rollout)
            return
        call = self.schedule.calls[rollout.at_call]
        self.stall += call.own_seconds
        prefix = (rollout.group, rollout.at_call)
        if prefix not in self.prefixes:
            self.prefixes.add(prefix)
            self.stall += call.shared_seconds
        end = self.clock + rollout.lengths[rollout.at_call]
        heapq.heappush(self.rows, (end, order, rollout))

    def _token_seconds(self) -> float:
        return self.schedule.step_seconds + self.schedule.row_seconds * len(self.rows)


class _Simulation:
    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self._rng = random.Random(schedule.seed)
        self._lengths = ReplyLengths(
            schedule.calls, sigma=schedule.sigma, correlation=schedule.correlation
        )
        self._replicas = [_Replica(schedule) for _ in range(schedule.num_replicas)]
        self._events: list[tuple[float, int, int, int, _Rollout | None]] = []
        self._order = count()
        self._now = 0.0
        self._driver_free = self._driver_busy = 0.0
        self._started = 0
        self._left: dict[int, int] = {}
        self._begun: dict[int, tuple[float, int]] = {}
        self._ready: list[int] = []
        self._version = 0
        self._training: float | None = None
        self._ends: list[float] = []
        self._spans: list[float] = []
        self._train_busy = 0.0
        self._max_age = 0

    def run(self, num_steps: int) -> Simulated:
        self._admit()
        while self._version < num_steps:
            time, _, replica, stamp, rollout = heapq.heappop(self._events)
            self._now = time
            if rollout is not None:
                self._begin_call(replica, rollout)
            elif replica < 0:
                self._end_training()
            elif stamp == self._replicas[replica].stamp:
                self._end_call(replica)
        return self._result()

    # --- generation

    def _admit(self) -> None:
        """Start groups as far as the bound on staleness allows, spread over the replicas."""
        schedule = self._schedule
        allowed = (self._version + 1 + schedule.max_staleness) * schedule.prompts
        while self._started < allowed:
            group = self._started
            self._started += 1
            self._left[group] = schedule.group_size
            self._begun[group] = (self._now, self._version)
            for replica in self._places(group):
                lengths = self._lengths.draw(self._rng)
                self._replicas[replica].num_rollouts += 1
                self._send(replica, _Rollout(group, lengths, self._version))

    def _places(self, group: int) -> list[int]:
        """A replica for each rollout: one for the whole group, or several where there are more than groups."""
        schedule = self._schedule
        num = max(1, min(schedule.group_size, schedule.num_replicas // schedule.prompts))
        if num == 1:
            least = min(
                range(schedule.num_replicas), key=lambda one: self._replicas[one].num_rollouts
            )
            return [least] * schedule.group_size
        first = group * num % schedule.num_replicas
        return [
            (first + rollout % num) % schedule.num_replicas
            for rollout in range(schedule.group_size)
        ]

    def _send(self, replica: int, rollout: _Rollout) -> None:
        """A call on its way through the driver."""
        self._driver_free = max(self._driver_free, self._now) + self._schedule.host_seconds
        self._driver_busy += self._schedule.host_seconds
        event = (self._driver_free, next(self._order), replica, 0, rollout)
        heapq.heappush(self._events, event)

    def _begin_call(self, replica: int, rollout: _Rollout) -> None:
        place = self._replicas[replica]
        place.advance(self._now)
        place.start(rollout, next(self._order))
        self._expect(replica)

    def _end_call(self, replica: int) -> None:
        place = self._replicas[replica]
        place.advance(self._now)
        _, _, rollout = heapq.heappop(place.rows)
        if place.waiting:
            place.start(place.waiting.popleft(), next(self._order))
        rollout.at_call += 1
        if rollout.at_call < len(self._schedule.calls):
            self._send(replica, rollout)
        else:
            place.num_rollouts -= 1
            self._end_rollout(rollout.group)
        self._expect(replica)

    def _expect(self, replica: int) -> None:
        """Note when the next reply of a replica ends; what was noted before is void."""
        place = self._replicas[replica]
        place.stamp += 1
        end = place.next_end()
        if end is not None:
            heapq.heappush(self._events, (end, next(self._order), replica, place.stamp, None))

    # --- training

    def _end_rollout(self, group: int) -> None:
        self._left[group] -= 1
        if self._left[group] == 0:
            del self._left[group]
            heapq.heappush(self._ready, group)
            self._train()

    def _train(self) -> None:
        """Start an update on the oldest groups when a batch is complete and the trainer is free.

        Groups that would be too old for the next batch are waited for.
        """
        schedule = self._schedule
        if self._training is not None or len(self._ready) < schedule.prompts:
            return
        oldest = next(iter(self._left), None)
        if oldest is not None and self._begun[oldest][1] <= self._version - schedule.max_staleness:
            return
        taken = [self._begun.pop(heapq.heappop(self._ready)) for _ in range(schedule.prompts)]
        self._spans.append(self._now - min(begun for begun, _ in taken))
        self._max_age = max(self._max_age, *(self._version - version for _, version in taken))
        self._training = self._now
        end = self._now + schedule.train_seconds
        heapq.heappush(self._events, (end, next(self._order), -1, 0, None))

    def _end_training(self) -> None:
        """New weights: engines pause for them, and further batches may start."""
        assert self._training is not None
        self._train_busy += self._now - self._training
        self._training = None
        self._version += 1
        self._ends.append(self._now)
        for number, place in enumerate(self._replicas):
            place.advance(self._now)
            place.stall += self._schedule.publish_seconds
            place.prefixes.clear()
            self._expect(number)
        self._admit()
        self._train()

    def _result(self) -> Simulated:
        num, total = len(self._ends), self._now
        half = num // 2
        begin = self._ends[half - 1] if half else 0.0
        busy = sum(place.busy for place in self._replicas)
        rows = sum(place.row_time for place in self._replicas)
        return Simulated(
            step_seconds=(self._ends[-1] - begin) / (num - half),
            rollout_seconds=sum(self._spans) / len(self._spans),
            trainer_busy=self._train_busy / total,
            engines_busy=busy / total / len(self._replicas),
            driver_busy=self._driver_busy / total,
            mean_rows=rows / busy if busy else 0.0,
            max_age=self._max_age,
        )


def simulate(schedule: Schedule, *, num_steps: int = 2) -> Simulated:
    """Run the schedule for some steps; the first half of them does not count for the time of a step."""
    return _Simulation(schedule).run(num_steps)
