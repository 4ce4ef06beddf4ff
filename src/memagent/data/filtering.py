"""Closed-book filtering: drop the questions that a model answers without the text.

    question ──▶ engine 1, sample 1, 2, ... ──▶ engine 2, ... ──▶ no reply is right: kept
                        │ a reply is right
                        └──▶ dropped; what is left of the samples is not asked

    questions = read_questions(path)
    verdicts = await screen(questions, engines, settings, journal, concurrency=16)
    write_kept(path, out, [verdict.number for verdict in verdicts if verdict.outcome == "kept"])

A question that a model knows teaches no reading and measures none. Every reply is on disk before it
counts, so a run that is killed asks nothing twice. What is written is the input without the dropped
examples: same order, same content, whatever the concurrency.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import reduce
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from memagent.agent.prompts import CLOSED_BOOK, closed_book_messages
from memagent.config import Settings
from memagent.data.example import Example, Match
from memagent.data.formats.files import read_examples, replacing_dataset, write_examples
from memagent.errors import EngineError, EngineRefused, RunError
from memagent.rewards.verifiers import NEEDS_NO_ANSWERS, grade
from memagent.runs import Run
from memagent.types import Completion, Engine, Message, Prices, Sampling, Usage

KIND = "data filter"
STOP_AFTER = 8
"""So many failed calls without a reply between them mean that the engine, not the question, fails."""
GRADER_OF_RULE = {"boxed": "strict", "contains": "contains"}
"""What a rule asks of a reply."""

Rule = Literal["either", "boxed", "contains"]
OnFailure = Literal["keep", "drop"]
Outcome = Literal["kept", "dropped", "failed"]


class FilterSettings(Settings):
    """How questions are screened."""

    samples: int = Field(default=2, ge=1)
    """Replies asked of each engine for a question, at most."""
    rule: Rule = "either"
    """When a reply is right: its boxed answer is (boxed), it states the answer (contains), or either."""
    on_failure: OnFailure = "drop"
    """What becomes of a question that could not be asked in full."""
    max_tokens: int = Field(default=512, ge=1)
    """Upper limit of tokens in a reply."""
    temperature: float = Field(default=1.0, ge=0)
    """Sampling temperature."""
    top_p: float = Field(default=0.7, gt=0, le=1)
    """Nucleus sampling."""
    seed: int | None = 0
    """Every sample has its own seed, made from this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What screening needs to know of an example."""

    number: int
    """Position in the file, from 0."""
    id: str
    task: str
    question: str
    answers: tuple[str, ...]
    """What would be right; none where the question has no answer, so that nothing can be known."""
    match: Match


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What became of a question.

    Example: Verdict(number=3, outcome="dropped", engine=0, rules=("boxed", "contains"))
    """

    number: int
    outcome: Outcome
    engine: int | None = None
    """The first engine that was right; None where none was."""
    rules: tuple[str, ...] = ()
    """The rules that its reply met."""
    failures: tuple[str, ...] = ()
    """Why calls failed."""


Key = tuple[int, int, int]
"""Question, engine and sample, all from 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """One reply, as the journal keeps it."""

    key: Key
    text: str
    usage: Usage

    def to_json(self) -> bytes:
        """One JSON line without the newline."""
        question, engine, sample = self.key
        record = {"question": question, "engine": engine, "sample": sample, "reply": self.text}
        line = json.dumps({**record, "usage": asdict(self.usage)}, ensure_ascii=False)
        return line.encode("utf-8", "backslashreplace")

    @classmethod
    def from_record(cls, record: Mapping[str, Any], where: str) -> Reply:
        """A reply from a parsed line of the journal."""
        try:
            key = (int(record["question"]), int(record["engine"]), int(record["sample"]))
            return cls(key=key, text=str(record["reply"]), usage=Usage(**record["usage"]))
        except (KeyError, TypeError, ValueError):
            raise RunError(f"{where} is damaged; the run cannot go on") from None


# --- the questions --------------------------------------------------------------------------------


def read_questions(path: Path) -> list[Question]:
    """The questions of a dataset, without their texts."""
    return [_question(number, example) for number, example in enumerate(read_examples(path))]


def write_kept(path: Path, out: Path, kept: Iterable[int]) -> int:
    """Write the examples at these positions, in their order; how many."""
    wanted = frozenset(kept)
    examples = enumerate(read_examples(path))
    return write_examples(out, (example for number, example in examples if number in wanted))


def _question(number: int, example: Example) -> Question:
    return Question(
        number=number,
        id=example.id,
        task=example.task,
        question=example.question,
        answers=() if example.grader in NEEDS_NO_ANSWERS else example.answers,
        match=example.match,
    )


# --- a run ----------------------------------------------------------------------------------------


def identity(
    questions: Sequence[Question], models: Sequence[str], settings: FilterSettings
) -> dict[str, Any]:
    """All that decides what is asked. How many samples and what counts as right may change later."""
    asked = [[q.id, q.question, q.answers, q.match] for q in questions]
    return {
        "kind": KIND,
        "questions": {"num": len(questions), "sha256": _sha256(asked)},
        "models": list(models),
        "prompt": _sha256(CLOSED_BOOK),
        "sampling": settings.model_dump(include={"max_tokens", "temperature", "top_p", "seed"}),
    }


def check_same(stored: Mapping[str, Any], wanted: Mapping[str, Any], path: Path) -> None:
    """Raise RunError with the reason when a run asks other things than are wanted."""
    if stored.get("kind") != KIND:
        reason = f"it is a run of kind {stored.get('kind')!r}, not {KIND!r}"
    elif stored["questions"] != wanted["questions"]:
        then, now = stored["questions"]["num"], wanted["questions"]["num"]
        reason = f"the questions have changed since (then {then:,}, now {now:,})"
    elif stored["models"] != wanted["models"]:
        reason = f"models were {', '.join(stored['models'])}, now {', '.join(wanted['models'])}"
    elif stored["prompt"] != wanted["prompt"]:
        reason = "the wording of the prompt has changed"
    elif stored["sampling"] != wanted["sampling"]:
        name = next(n for n in stored["sampling"] if stored["sampling"][n] != wanted["sampling"][n])
        reason = f"{name} was {stored['sampling'][name]}, now {wanted['sampling'][name]}"
    else:
        return
    raise RunError(f"cannot go on with {path}: {reason}; start a new run for it")


class Journal:
    """The replies of a screening, finished ones and new ones. Without a run, nothing is on disk."""

    def __init__(self, run: Run | None = None) -> None:
        self._run = run
        self.replies: dict[Key, Reply] = {}
        for number, record in enumerate(run.records if run else (), start=1):
            reply = Reply.from_record(record, f"{run and run.path}: line {number} of its journal")
            self.replies[reply.key] = reply

    def append(self, reply: Reply) -> None:
        """Put a reply on disk; returns when it is safe."""
        if self._run:
            self._run.append(reply.to_json())
        self.replies[reply.key] = reply


# --- screening ------------------------------------------------------------------------------------

Watcher = Callable[[Question, Verdict], None]


async def screen(
    questions: Sequence[Question],
    engines: Sequence[Engine],
    settings: FilterSettings,
    journal: Journal,
    *,
    concurrency: int,
    num: int | None = None,
    watch: Watcher | None = None,
) -> list[Verdict]:
    """The verdicts on the questions, in their order; on no more than are needed to keep `num`.

    Raises the engine's error when calls fail one after the other, or when none succeeds at all.
    """
    screening = _Screening(engines, settings, journal)
    remaining = iter(questions)
    verdicts: list[Verdict] = []
    num_kept = 0
    under_way: dict[asyncio.Task[Verdict], Question] = {}
    try:
        while True:
            # no question is begun in vain: each of those under way may be kept
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
                num_kept += is_kept(verdict, settings.on_failure)
                verdicts.append(verdict)
                question = under_way.pop(task)
                if watch:
                    watch(question, verdict)
    finally:
        for task in under_way:
            task.cancel()
        await asyncio.gather(*under_way, return_exceptions=True)
    if screening.last_error is not None and not journal.replies:
        raise screening.last_error
    return sorted(verdicts, key=lambda verdict: verdict.number)


def is_kept(verdict: Verdict, on_failure: OnFailure) -> bool:
    """Whether the question stays in the dataset."""
    return verdict.outcome == "kept" or (verdict.outcome == "failed" and on_failure == "keep")


def rules_met(question: Question, reply: str, rule: Rule) -> tuple[str, ...]:
    """The rules by which a reply is right, of those that were asked for."""
    rules = GRADER_OF_RULE if rule == "either" else {rule: GRADER_OF_RULE[rule]}
    return tuple(
        name
        for name, grader in rules.items()
        if grade(grader, reply, question.answers, question.match).value == 1.0
    )


class _Screening:
    """Asks questions, and knows when to stop."""

    def __init__(
        self, engines: Sequence[Engine], settings: FilterSettings, journal: Journal
    ) -> None:
        self._engines = engines
        self._settings = settings
        self._journal = journal
        self._num_failed_in_a_row = 0
        self.last_error: EngineError | EngineRefused | None = None

    async def verdict(self, question: Question) -> Verdict:
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
                            number=question.number, outcome="dropped", engine=engine, rules=rules
                        )
        outcome: Outcome = "failed" if failures else "kept"
        return Verdict(number=question.number, outcome=outcome, failures=tuple(failures))

    async def _reply(self, key: Key, question: Question, failures: list[str]) -> Reply | None:
        """A reply from the journal or the engine; None, and a reason more, when the call fails."""
        if key in self._journal.replies:
            return self._journal.replies[key]
        messages = closed_book_messages(question.question)
        try:
            completion = await self._engines[key[1]].complete(messages, self._sampling(key))
        except (EngineError, EngineRefused) as error:
            self.last_error = error
            self._num_failed_in_a_row += 1
            if self._num_failed_in_a_row >= STOP_AFTER:
                raise
            failures.append(str(error))
            return None
        self._num_failed_in_a_row = 0
        reply = Reply(key=key, text=completion.text, usage=_usage(messages, completion))
        self._journal.append(reply)
        return reply

    def _sampling(self, key: Key) -> Sampling:
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


# --- the report -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineReport:
    """What one engine knew, and what it was asked."""

    model: str
    num_dropped: int
    """Questions that it was the first to answer."""
    usage: Usage


@dataclass(frozen=True, slots=True, kw_only=True)
class FilterReport:
    """What became of the questions of a file."""

    num_questions: int
    """Questions in the file."""
    num_screened: int
    """Questions with a verdict; fewer where enough were kept before the end."""
    num_kept: int
    """Examples that were written."""
    num_dropped: int
    """Questions that were answered without their text."""
    num_failed: int
    """Questions that could not be asked in full and were not answered."""
    on_failure: OnFailure
    """What became of the failed ones."""
    samples: int
    by_rule: dict[str, int]
    """Dropped questions by the rules that the right reply met: boxed, contains, or both."""
    by_engine: tuple[EngineReport, ...]
    by_task: dict[str, dict[str, int]]
    """For each task, how many questions were kept, dropped and failed."""
    failures: dict[str, str] = field(default_factory=dict)
    """For each failed question, by its id, the first reason."""
    cost: float | None = None
    """In the currency of the prices; None without prices."""

    @property
    def usage(self) -> Usage:
        """What all engines were asked, over all resumptions."""
        return reduce(lambda one, other: one + other, (e.usage for e in self.by_engine), Usage())

    def to_json(self) -> str:
        """The report as indented JSON."""
        return json.dumps(asdict(self), indent=2, ensure_ascii=False) + "\n"


def report_on(
    questions: Sequence[Question],
    verdicts: Sequence[Verdict],
    models: Sequence[str],
    settings: FilterSettings,
    journal: Journal,
    *,
    prices: Prices | None = None,
) -> FilterReport:
    """Count what became of the questions."""
    outcomes = Counter(verdict.outcome for verdict in verdicts)
    by_task: dict[str, dict[str, int]] = {}
    for verdict in verdicts:
        task = questions[verdict.number].task
        by_task.setdefault(task, dict.fromkeys(("kept", "dropped", "failed"), 0))
        by_task[task][verdict.outcome] += 1
    dropped = [verdict for verdict in verdicts if verdict.outcome == "dropped"]
    usages = [Usage() for _ in models]
    for (_, engine, _), reply in journal.replies.items():
        usages[engine] += reply.usage
    by_engine = tuple(
        EngineReport(
            model=model,
            num_dropped=sum(verdict.engine == number for verdict in dropped),
            usage=usages[number],
        )
        for number, model in enumerate(models)
    )
    report = FilterReport(
        num_questions=len(questions),
        num_screened=len(verdicts),
        num_kept=sum(is_kept(verdict, settings.on_failure) for verdict in verdicts),
        num_dropped=outcomes["dropped"],
        num_failed=outcomes["failed"],
        on_failure=settings.on_failure,
        samples=settings.samples,
        by_rule=dict(sorted(Counter(" and ".join(verdict.rules) for verdict in dropped).items())),
        by_engine=by_engine,
        by_task=by_task,
        failures={
            questions[verdict.number].id: verdict.failures[0]
            for verdict in verdicts
            if verdict.outcome == "failed"
        },
        cost=None if prices is None else _cost(usages, prices),
    )
    return report


def write_report(path: Path, report: FilterReport) -> None:
    """Put the report on disk."""
    with replacing_dataset(path) as part:
        part.write_text(report.to_json(), encoding="utf-8")


def report_path(out: Path) -> Path:
    """Where the report on a filtered dataset is."""
    return out.with_name(f"{out.name}.filter.json")


def _cost(usages: Iterable[Usage], prices: Prices) -> float:
    return sum(
        prices.cost(prompt_tokens=usage.prompt_tokens, completion_tokens=usage.completion_tokens)
        for usage in usages
    )


def _sha256(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, ensure_ascii=False).encode()).hexdigest()
