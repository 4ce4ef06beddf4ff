"""A session is the engine of one rollout: it seeds, times and records every call.

    reader, client ── complete(messages, sampling) ──▶ turn of the driver ──▶ engine
          ▲                                                                     │
          └── Completion ◀── steps, usage, token ids and log-probabilities ◀────┘

    session = Session(engine, task_id="capital/0", index=3, seed=7)
    reader = Reader(session, config=settings)            # code that drives engines
    client = Client(session)                             # agents written against the openai API

The seed of a call is derived from the run's seed, the task, the number of the rollout, the messages, and
how often the rollout has sent these messages before: it does not depend on what other calls do meanwhile.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, replace

from memagent.agent.trace import Step, Trace
from memagent.engines.base import BaseEngine
from memagent.errors import ConfigError
from memagent.rl.agents.recorder import Recorder, Turn, call_of, continued_prompt, continues
from memagent.rl.types import AgentTask
from memagent.types import Completion, Engine, Message, Sampling, TokenEngine, Usage

SEED_BITS = 31
"""Bits of a seed that servers accept."""
CALLS = "agent"
"""`Trace.prompts` of a trace that was built from an agent's calls."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSampling:
    """How all calls of a run are sampled: the distribution that the policy is trained for."""

    temperature: float = 1.0
    top_p: float | None = None
    """None samples from all tokens. Training needs that: its log-probabilities are over all tokens."""
    max_tokens: int = 1024
    """Limit of a reply where the agent sets none."""
    is_forced: bool = False
    """True overrides what an agent asks for, as validation does; otherwise an agent that asks for another
    distribution fails with a ConfigError."""

    def applied(self, asked: Sampling) -> Sampling:
        """The sampling of a call: limit and stop texts as asked, the distribution of the run."""
        self._check("temperature", asked.temperature, self.temperature)
        self._check("top_p", asked.top_p, 1.0 if self.top_p is None else self.top_p)
        self._check("top_k", asked.top_k, 0)
        return replace(asked, temperature=self.temperature, top_p=self.top_p, top_k=None)

    def _check(self, name: str, asked: float | None, value: float) -> None:
        if asked is None or asked == value or self.is_forced:
            return
        raise ConfigError(
            f"the agent asks for {name}={asked:g} and the run samples with {value:g}; leave {name} "
            "out of the agent, or set it for the run"
        )


class Session(BaseEngine):
    """The engine of one rollout."""

    def __init__(
        self,
        engine: Engine,
        *,
        task_id: str,
        index: int,
        seed: int,
        sampling: RunSampling | None = None,
        turn: Callable[[], AbstractAsyncContextManager[None]] = nullcontext,
        needs_tokens: bool = True,
        policy_version: int = 0,
    ) -> None:
        """Without `needs_tokens` no token is recorded and any engine will do, as in validation; an engine
        that takes tokens continues the sampled ones all the same. `turn` is entered for each call. `policy_version` is used where the engine reports none."""
        self.engine = engine
        self.stand_for(engine)
        self.sampling = sampling or RunSampling()
        self.recorder = Recorder()
        self.usage = Usage()
        self.replies: list[tuple[int, int]] = []
        """Tokens of each reply, and the limit it had."""
        self.seconds = 0.0
        """Time spent in calls, without waiting for a turn; concurrent calls each count in full."""
        self._key = (seed, task_id, index)
        self._turn = turn
        self._needs_tokens = needs_tokens
        self._policy_version = policy_version
        self._num_asked: Counter[str] = Counter()
        self._turns: list[Turn] = []
        self._steps: dict[int, Step] = {}
        """Finished calls, by the number under which they started."""

    async def complete(self, messages: Sequence[Message], sampling: Sampling) -> Completion:
        """One reply of the policy, recorded. Distribution and seed are the run's."""
        sampling = self.sampling.applied(sampling)
        number = self.recorder.start()
        asked = fingerprint(messages)
        seed = call_seed(*self._key, asked, self._num_asked[asked])
        self._num_asked[asked] += 1
        async with self._turn():  # nothing is awaited between the start of a turn and the engine
            started, clock = time.time(), time.perf_counter()
            rendered, completion = await self._complete(messages, replace(sampling, seed=seed))
            seconds = time.perf_counter() - clock
        self.seconds += seconds
        self._count(number, completion, sampling, started, seconds)
        if self._needs_tokens or (
            isinstance(self.engine, TokenEngine) and completion.completion_ids is not None
        ):
            call = call_of(completion, model=self.model, policy_version=self._policy_version)
            if self._needs_tokens:
                self.recorder.finish(number, call)
            self._turns.append(
                Turn(
                    messages=tuple(messages),
                    reply=completion.text,
                    rendered_ids=call.prompt_ids if rendered is None else tuple(rendered),
                    call=call,
                )
            )
        return completion

    async def aclose(self) -> None:
        """Nothing to free: the engine belongs to the run."""

    @property
    def steps(self) -> tuple[Step, ...]:
        """The finished calls as steps, in the order in which they started."""
        calls = (step for _, step in sorted(self._steps.items()))
        return tuple(replace(step, index=index) for index, step in enumerate(calls))

    def trace(self, task: AgentTask, answer: str | None) -> Trace:
        """The calls as a Trace, for an agent that returns none. None where there is no answer yet."""
        steps = self.steps
        if answer is not None and steps:
            steps = (*steps[:-1], replace(steps[-1], kind="answer", reply=answer))
        return Trace(
            question=getattr(task, "question", ""),
            steps=steps,
            model=self.model,
            prompts=CALLS,
            source=task.id,
            document_sha256="",  # an agent may read anything
        )

    async def _complete(
        self, messages: Sequence[Message], sampling: Sampling
    ) -> tuple[Sequence[int] | None, Completion]:
        """The completion; also the prompt in the template's own tokens, where other tokens were sent."""
        earlier = [turn for turn in self._turns if continues(messages, turn)]
        if earlier and isinstance(self.engine, TokenEngine):
            turn = max(earlier, key=lambda turn: len(turn.messages))
            rendered = self.engine.prompt_ids(messages)
            prompt_ids = continued_prompt(turn, rendered, self.engine.decode)
            if prompt_ids is not None:
                return rendered, await self.engine.generate(prompt_ids, sampling)
        return None, await self.engine.complete(messages, sampling)

    def _count(
        self,
        number: int,
        completion: Completion,
        sampling: Sampling,
        started: float,
        seconds: float,
    ) -> None:
        usage = completion.usage or Usage(calls=1, is_estimated=True)
        self.usage += usage
        if completion.usage is not None:
            self.replies.append((usage.completion_tokens, sampling.max_tokens))
        self._steps[number] = Step(
            kind="read",
            index=number,
            reply=completion.text,
            memory="",
            reasoning=completion.reasoning,
            flags=("reply_cut",) if completion.finish_reason == "length" else (),
            usage=usage,
            num_attempts=completion.num_attempts,
            started=round(started, 6),
            seconds=round(seconds, 6),
        )


def call_seed(seed: int, task_id: str, index: int, asked: str, repetition: int) -> int:
    """The seed of a call, from the run's seed, the rollout, and the call's place in it."""
    key = json.dumps([seed, task_id, index, asked, repetition])
    digest = hashlib.sha256(key.encode()).digest()
    return int.from_bytes(digest[:4], "big") >> (32 - SEED_BITS)


def fingerprint(messages: Sequence[Message]) -> str:
    """A short fingerprint of the messages of a call."""
    return hashlib.sha256(json.dumps(list(messages)).encode()).hexdigest()
