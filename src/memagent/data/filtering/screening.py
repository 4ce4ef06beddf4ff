"""Screening: each question is asked without its text until a reply is right or all samples are there.

question ──▶ engine 1, sample 1, 2, ... ──▶ engine 2, ... ──▶ no reply is right: kept
                    │ a reply is right
                    └──▶ dropped; the remaining samples are not requested

verdicts = await screen(questions, engines, FilterSettings(), ReplyLog(), concurrency=16)
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from memagent.agent.prompts import closed_book_messages
from memagent.config import MOST, Settings
from memagent.data.example import Example
from memagent.data.formats.files import read_examples
from memagent.errors import EngineError, EngineRefused, MachineError, RunError
from memagent.rewards.verifiers import NEEDS_NO_ANSWERS, Match, grade
from memagent.runs import Run, stored_usage
from memagent.types import Completion, Engine, Message, Sampling, Usage

STOP_AFTER = 8
"""So many failed calls in a row mean that the engine fails, not the question."""
ScreeningRule = Literal["either", "boxed", "contains", "original"]
OnFailure = Literal["keep", "drop"]
Fate = Literal["kept", "dropped", "failed"]

_BOXED, _CONTAINS = {"boxed": "strict"}, {"contains": "contains"}
GRADERS_OF_RULE: dict[ScreeningRule, dict[str, str]] = {
    "either": _BOXED | _CONTAINS,
    "boxed": _BOXED,
    "contains": _CONTAINS,
    "original": {"boxed": "original_reward", "contains": "original_contains"},
}
"""The graders of each rule, under the name that reports use; a reply is right if one of them says so."""


class FilterSettings(Settings):
    """How questions are screened."""

    samples: int = Field(default=2, ge=1, le=MOST)
    """Replies requested from each engine for a question, at most."""
    rule: ScreeningRule = "either"
    """When a reply is right: its boxed answer is (boxed), it states the answer (contains), or either; original
    is the rule of the original project, for which an answer anywhere in the reply counts."""
    on_failure: OnFailure = "drop"
    """Whether a question whose calls failed is kept or dropped."""
    max_tokens: int = Field(default=512, ge=1)
    """Upper limit of tokens in a reply."""
    temperature: float = Field(default=1.0, ge=0)
    """Sampling temperature."""
    top_p: float = Field(default=0.7, gt=0, le=1)
    """Nucleus sampling."""
    seed: int | None = 0
    """The seed of every sample is derived from this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BareQuestion:
    """What screening needs to know of an example."""

    number: int
    """Position in the file, from 0."""
    id: str
    task: str
    question: str
    answers: tuple[str, ...]
    """Accepted answers; none where the text holds no answer, so that no model can know it."""
    match: Match


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Whether a question is kept, and why.

    Example: Verdict(number=3, fate="dropped", engine=0, rules=("boxed", "contains"))
    """

    number: int
    fate: Fate
    engine: int | None = None
    """The first engine that was right; None where none was."""
    rules: tuple[str, ...] = ()
    """The rules by which its reply was right."""
    failures: tuple[str, ...] = ()
    """Why calls failed."""

    def is_kept(self, on_failure: OnFailure) -> bool:
        """Whether the question stays in the dataset."""
        return self.fate == "kept" or (self.fate == "failed" and on_failure == "keep")


_Key = tuple[int, int, int]
"""Question, engine and sample, all from 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledReply:
    """One reply, as the log keeps it."""

    key: _Key
    text: str
    usage: Usage

    def to_json(self) -> bytes:
        """One JSON line without the newline."""
        question, engine, sample = self.key
        record = {"question": question, "engine": engine, "sample": sample, "reply": self.text}
        line = json.dumps({**record, "usage": asdict(self.usage)}, ensure_ascii=False)
        return line.encode("utf-8", "backslashreplace")

    @classmethod
    def from_record(cls, record: Mapping[str, Any], where: str) -> SampledReply:
        """A reply from a parsed line of the log."""
        try:
            key = (int(record["question"]), int(record["engine"]), int(record["sample"]))
            if min(key) < 0:
                raise ValueError("numbers are counted from 0")
            return cls(key=key, text=str(record["reply"]), usage=stored_usage(record["usage"]))
        except (KeyError, TypeError, ValueError):
            raise RunError(f"{where} is damaged; the run cannot be resumed") from None


class ReplyLog:
    """The replies of a screening, earlier ones and new ones. Without a run, nothing is on disk."""

    def __init__(self, run: Run | None = None) -> None:
        self._run = run
        self.replies: dict[_Key, SampledReply] = {}
        models = run.manifest.get("models") if run else None
        for number, record in enumerate(run.records if run else (), start=1):
            where = f"{run and run.path}: line {number} of its journal"
            reply = SampledReply.from_record(record, where)
            if models is not None and reply.key[1] >= len(models):
                raise RunError(f"{where} is damaged; the run cannot be resumed")
            self.replies[reply.key] = reply

    def append(self, reply: SampledReply) -> None:
        """Put a reply on disk; returns when it is safe."""
        if self._run:
            self._run.append(reply.to_json())
        self.replies[reply.key] = reply


def read_questions(path: Path) -> list[BareQuestion]:
    """The questions of a dataset, without their texts."""
    return [_bare(number, example) for number, example in enumerate(read_examples(path))]


def _bare(number: int, example: Example) -> BareQuestion:
    return BareQuestion(
        number=number,
        id=example.id,
        task=example.task,
        question=example.question,
        answers=() if example.grader in NEEDS_NO_ANSWERS else example.answers,
        match=example.match,
    )


async def screen(
    questions: Sequence[BareQuestion],
    engines: Sequence[Engine],
    settings: FilterSettings,
    log: ReplyLog,
    *,
    concurrency: int,
    num: int | None = None,
    on_verdict: Callable[[BareQuestion, Verdict], None] | None = None,
) -> list[Verdict]:
    """The verdicts on the questions, in their order; on no more than are needed to keep `num`.

    Raises the engine's error when calls fail one after the other, or when none succeeds at all.
    """
    screening = _Screening(engines, settings, log)
    remaining = iter(questions)
    verdicts: list[Verdict] = []
    num_kept = 0
    under_way: dict[asyncio.Task[Verdict], BareQuestion] = {}
    try:
        while True:
            # each question under way may be kept: more than could be needed are not started
            while len(under_way) < concurrency and (num is None or num_kept + len(under_way) < num):
                question = next(remaining, None)
                if question is None:
                    break
                under_way[asyncio.create_task(screening.verdict(question))] = question
            if not under_way:
                break
            done, _ = await asyncio.wait(under_way, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                verdict = task.result()
                num_kept += verdict.is_kept(settings.on_failure)
                verdicts.append(verdict)
                question = under_way.pop(task)
                if on_verdict:
                    on_verdict(question, verdict)
    finally:
        for task in under_way:
            task.cancel()
        await asyncio.gather(*under_way, return_exceptions=True)
    if screening.last_error is not None and not log.replies:
        raise screening.last_error
    return sorted(verdicts, key=lambda verdict: verdict.number)


def rules_met(question: BareQuestion, reply: str, rule: ScreeningRule) -> tuple[str, ...]:
    """The rules by which a reply is right, of those that were requested."""
    return tuple(
        name
        for name, grader in GRADERS_OF_RULE[rule].items()
        if grade(grader, reply, question.answers, question.match).value == 1.0
    )


class _Screening:
    """Asks questions, and stops when the engine fails."""

    def __init__(self, engines: Sequence[Engine], settings: FilterSettings, log: ReplyLog) -> None:
        self._engines = engines
        self._settings = settings
        self._log = log
        self._num_failed_in_a_row = 0
        self.last_error: EngineError | EngineRefused | None = None

    async def verdict(self, question: BareQuestion) -> Verdict:
        """Ask until a reply is right or all samples are there."""
        failures: list[str] = []
        if question.answers:
            for engine in range(len(self._engines)):
                for sample in range(self._settings.samples):
                    reply = await self._reply((question.number, engine, sample), question, failures)
                    if reply is None:
                        continue
                    rules = rules_met(question, reply.text, self._settings.rule)
                    if rules:
                        return Verdict(
                            number=question.number, fate="dropped", engine=engine, rules=rules
                        )
        fate: Fate = "failed" if failures else "kept"
        return Verdict(number=question.number, fate=fate, failures=tuple(failures))

    async def _reply(
        self, key: _Key, question: BareQuestion, failures: list[str]
    ) -> SampledReply | None:
        """A reply from the log or the engine; None, and one more reason, when the call fails."""
        if key in self._log.replies:
            return self._log.replies[key]
        messages = closed_book_messages(question.question)
        try:
            completion = await self._engines[key[1]].complete(messages, self._sampling(key))
        except (EngineError, EngineRefused) as error:
            self.last_error = error
            self._num_failed_in_a_row += 1
            if isinstance(error, MachineError) or self._num_failed_in_a_row >= STOP_AFTER:
                raise
            failures.append(str(error))
            return None
        self._num_failed_in_a_row = 0
        reply = SampledReply(key=key, text=completion.text, usage=_usage(messages, completion))
        self._log.append(reply)
        return reply

    def _sampling(self, key: _Key) -> Sampling:
        settings = self._settings
        seed = None
        if settings.seed is not None:
            digest = hashlib.sha256(f"{settings.seed}/{key[0]}/{key[2]}".encode()).digest()
            seed = int.from_bytes(digest[:4], "big") >> 1  # servers take 31 bits
        return Sampling(
            max_tokens=settings.max_tokens,
            temperature=settings.temperature,
            top_p=settings.top_p,
            seed=seed,
        )


def _usage(messages: Sequence[Message], completion: Completion) -> Usage:
    if completion.usage is not None:
        return completion.usage
    num_chars = sum(len(message["content"]) for message in messages)
    return Usage(
        calls=1,
        prompt_tokens=num_chars // 4,
        completion_tokens=len(completion.text) // 4,
        is_estimated=True,
    )
