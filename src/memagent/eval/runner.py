"""The runner: items in, records out, each on disk when it is finished.

    EvalPlan ──▶ ExamplePool (worker processes) ──▶ examples, a few ahead
                                                       │
             ┌─────────────────────────────────────────┘
             ▼
    item: method(example, context) ──▶ Trace ──▶ grade ──▶ ItemRecord ──▶ RUN/steps.jsonl
             │
             └── calls, through one gate per engine ──▶ engine

More items are in flight than calls are allowed at once, so that a free slot is taken at once. A failed
item is a record with a score of 0. A run stops at a limit, on Ctrl-C, or when the engine fails again and
again; finished items are kept then, and so are the replies of unfinished ones. Items that failed with the
machine, as for lack of memory, have no record: a resumed run asks them again.

Runs of a suite are opened by `memagent.eval.setup`. Examples that are in memory already, such as those
that training validates with, need no suite:

    records = await evaluate_examples(examples, method, engine, title="agent", seed=1)
    score_interval([record.score for record in records])
"""

from __future__ import annotations

import asyncio
import json
import math
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import astuple, dataclass, replace
from numbers import Real
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from memagent.agent.model_call import Limits
from memagent.agent.trace import Trace
from memagent.data.example import Example
from memagent.data.inspection import depths
from memagent.data.tasks.registry import MAX_ANSWER_TOKENS
from memagent.documents.document import Document
from memagent.engines.base import facts_of
from memagent.engines.limit import RetryListener
from memagent.engines.local.embedding import Embedder
from memagent.errors import (
    EngineError,
    EngineRefused,
    LimitReached,
    MachineError,
    MemagentError,
    PromptCut,
    RunNotWritable,
    plain,
)
from memagent.eval.calls import EngineGate, OnCall, item_engine
from memagent.eval.items import EvalPlan, Item, ItemSource, item_seed
from memagent.eval.methods import Context as Context  # these two by name for training
from memagent.eval.methods import Method, MethodSettings
from memagent.eval.records import ItemKey, parse_item
from memagent.eval.records import ItemRecord as ItemRecord
from memagent.eval.records import evidence_scores as evidence_scores  # by name for training
from memagent.eval.stats import Interval, mean_interval
from memagent.plugins import is_failure
from memagent.processes import WorkerDied
from memagent.replies import REPLIES, Replies
from memagent.rewards.verifiers import further_scores, grade, limit_answer
from memagent.runs import Run
from memagent.tokens.tokenizers import Tokenizer, tokenizer_for_model
from memagent.types import Engine, Prices

if TYPE_CHECKING:
    from memagent.eval.forecast import EvalForecast

LEAST_FAILURES = 16
"""This many failed calls in a row, or two per concurrent call if that is more, are an outage."""
TAIL_FAILURES = 4
"""This many items that fail at the very end, with no answer after them, are an outage too."""
MACHINE_FAILURES = 4
"""This many failed calls in a row are an outage if the last one failed with the machine."""
TRACEBACK_LINES = 6
MAX_TEXT_TOKENS = 256_000_000
"""Tokens of all texts in flight, for the sake of memory: a token takes about ten bytes."""
LEAST_IN_FLIGHT = 25
"""Items that are in flight however long they are, if so many calls are allowed."""

OnRecord = Callable[[ItemRecord], None]
"""Called with each finished item, trace included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenMethod:
    """A method with its settings and its engine."""

    title: str
    """Name in records."""
    kind: str = ""
    """Name of the method itself, such as `reader:paper`."""
    function: Method
    settings: MethodSettings
    gate: EngineGate
    tokenizer: Tokenizer
    embedder: Embedder | None = None
    """The embedding model of the method dense."""


class _Attempt(NamedTuple):
    """One answer to an item."""

    method: OpenMethod
    sample: int


class _Suspect(NamedTuple):
    """An item that failed, perhaps with the engine."""

    record: ItemRecord
    error: BaseException | None
    gate: EngineGate
    num_answered: int
    """Calls that the engine had answered when it failed."""

    @property
    def is_unanswered(self) -> bool:
        """Whether it cannot be the item's own fault."""
        return isinstance(self.error, MachineError)


class ExampleFeed(Protocol):
    """Supplies the examples of items."""

    num_ahead: int
    """How many examples may wait for their turn."""

    def example(self, item: Item) -> asyncio.Future[Example]:
        """The example of an item, with its text."""
        ...


class Evaluation:
    """One evaluation: its items, its methods, and the records so far."""

    def __init__(
        self,
        plan: EvalPlan,
        examples: ExampleFeed,
        methods: Sequence[OpenMethod],
        *,
        seed: int,
        run: Run | None = None,
        limits: Limits | None = None,
        prices: Prices | None = None,
        concurrency: int = 16,
        graders: Sequence[str] = (),
        samples: int = 1,
    ) -> None:
        """Without a run nothing is written. Finished items of the run are not asked again.

        Each item is answered `samples` times by each method. `graders` grade every answer too, beside the
        grader of its item.
        """
        self.plan = plan
        self.methods = tuple(methods)
        self.run = run
        self.records: dict[ItemKey, ItemRecord] = {}
        """Finished items, without their traces."""
        self.limits = limits or Limits()
        self.forecast: EvalForecast | None = None
        """What the evaluation will take; None where it is not known."""
        self._examples = examples
        self._seed = seed
        self._prices = prices
        self._graders = tuple(graders)
        self._samples = samples
        longest = max((item.num_tokens for item in plan.items), default=0)
        self._max_in_flight = min(
            concurrency + concurrency // 2 + 1,
            max(LEAST_IN_FLIGHT, MAX_TEXT_TOKENS // max(1, longest)),
        )
        self._max_failures = max(LEAST_FAILURES, 2 * concurrency)
        self._on_record: OnRecord | None = None
        self._on_call: OnCall | None = None
        self._replies = Replies()
        self._disk = ThreadPoolExecutor(1)  # one: records are written one after the other
        self._suspects: list[_Suspect] = []
        """Items that failed since the last reply, their own fault only if a later call succeeds, and all that
        failed with the machine."""
        self._stopped: MemagentError | None = None
        for number, record in enumerate(run.records if run else (), start=1):
            found = parse_item(record, f"{run and run.path}: line {number} of its journal")
            self.records[found.key] = found
            self.limits.count(found.usage)

    @property
    def num_items(self) -> int:
        """How many records a finished evaluation has."""
        return len(self.plan.items) * len(self.methods) * self._samples

    async def evaluate(
        self,
        *,
        on_record: OnRecord | None = None,
        on_retry: RetryListener | None = None,
        on_call: OnCall | None = None,
    ) -> list[ItemRecord]:
        """All records without traces, including those from before the run was resumed.

        `on_retry` is called with each failed attempt that an engine repeats, and the delay before it; `on_call`
        with each call that was answered.
        Raises LimitReached at a limit, and the engine's error when it fails again and again.
        """
        self._on_record = on_record
        self._on_call = on_call
        for method in self.methods:
            if on_retry is not None:
                facts_of(method.gate.engine).on_retry = on_retry
        pending = [(item, open) for item in self.plan.items if (open := self._unfinished(item))]
        names = [_name(_key(item, one)) for item, attempts in pending for one in attempts]
        if self.run is not None:
            self._replies = Replies(self.run.path / REPLIES, scopes=frozenset(names))
        in_flight: set[asyncio.Task[None]] = set()
        try:
            await self._start_all(pending, in_flight)
            await self._finish(in_flight)
        finally:
            for task in in_flight:
                task.cancel()
            await asyncio.gather(*in_flight, return_exceptions=True)
            self._replies.close(delete=len(self.records) == self.num_items)
            self._disk.shutdown()
        return sorted(self.records.values(), key=_order)

    def _is_stopped(self) -> bool:
        return self._stopped is not None

    def _unfinished(self, item: Item) -> list[_Attempt]:
        attempts = [
            _Attempt(method, sample) for sample in range(self._samples) for method in self.methods
        ]
        return [attempt for attempt in attempts if _key(item, attempt) not in self.records]

    async def _start_all(
        self, pending: Iterable[tuple[Item, list[_Attempt]]], in_flight: set[asyncio.Task[None]]
    ) -> None:
        """Start the items one after the other, whenever there is a free slot."""
        ahead: deque[tuple[Item, list[_Attempt], asyncio.Future[Example]]] = deque()
        remaining = iter(pending)
        try:
            while not self._is_stopped():
                while len(ahead) < self._examples.num_ahead and (
                    following := next(remaining, None)
                ):
                    item, attempts = following
                    ahead.append((item, attempts, self._examples.example(item)))
                if not ahead:
                    return
                item, attempts, future = ahead.popleft()
                example = await self._example(future)
                for attempt in attempts:
                    while len(in_flight) >= self._max_in_flight:
                        await asyncio.wait(in_flight, return_when=asyncio.FIRST_COMPLETED)
                        _collect(in_flight)
                    if self._is_stopped():
                        return
                    in_flight.add(asyncio.create_task(self._ask(item, example, attempt)))
        finally:
            for _, _, future in ahead:
                future.cancel()

    async def _example(self, future: asyncio.Future[Example]) -> Example | Exception:
        """The example, or why it could not be generated."""
        try:
            return await future
        except (asyncio.CancelledError, WorkerDied):
            raise
        except Exception as error:  # one bad example does not stop a run
            return error

    async def _finish(self, in_flight: set[asyncio.Task[None]]) -> None:
        """Wait for the items in flight, then decide about those that failed last."""
        while in_flight:
            await asyncio.wait(in_flight, return_when=asyncio.FIRST_COMPLETED)
            _collect(in_flight)
            if self._stopped is not None and not isinstance(self._stopped, LimitReached):
                break
        if self._stopped is not None:
            raise self._stopped
        if self._suspects and self._is_outage():
            raise self._last_error()
        await self._write_suspects()

    # --- one item ------------------------------------------------------------------------------

    async def _ask(self, item: Item, example: Example | Exception, attempt: _Attempt) -> None:
        """Ask one item by one method, and write its record."""
        if self._stopped is not None:
            return
        method = attempt.method
        name = _name(_key(item, attempt))
        seed = item_seed(self._seed, item, attempt.sample)
        if isinstance(example, Exception):
            await self._write(_without_example(item, attempt, seed, example))
            return
        try:
            record, error = await self._answered(item, example, attempt, name, seed)
        except LimitReached as reached:
            self._stopped = self._stopped or reached
            return
        is_call = isinstance(error, EngineError | EngineRefused)
        if isinstance(error, MachineError) or (is_call and method.gate.num_failed_in_a_row):
            suspect = _Suspect(record, error, method.gate, method.gate.num_answered)
            self._suspects.append(suspect)
            most = MACHINE_FAILURES if suspect.is_unanswered else self._max_failures
            if method.gate.num_failed_in_a_row >= most or isinstance(error, PromptCut):
                self._stopped = self._last_error()
            return
        if record.status == "ok":
            await self._write_suspects(later=True)
        await self._write(record)

    async def _answered(
        self, item: Item, example: Example, attempt: _Attempt, name: str, seed: int
    ) -> tuple[ItemRecord, BaseException | None]:
        """The record of an item, and the error if it failed."""
        method = attempt.method
        known = self._replies.scope(name)
        engine = item_engine(method.gate, known, method=method.title, on_call=self._on_call)
        source, settings = item.source, method.settings
        limit = min(settings.answer_tokens, source.generated_tokens or settings.answer_tokens)
        context = Context(
            engine=engine,
            tokenizer=method.tokenizer,
            settings=settings.model_copy(update={"seed": seed, "answer_tokens": limit}),
            limits=self.limits,
            method=method.title,
            document=Document.from_text(example.text(), source=example.id),
            question=example.question,
            embedder=method.embedder,
        )
        grader = source.grader or example.grader
        values: dict[str, Any] = {"status": "ok", "score": 0.0}
        failure: BaseException | None = None
        clock = time.perf_counter()
        try:
            trace = await method.function(example, context)
            _check_notes(context)
            answer = _answer_of(trace, context)
            values |= {
                "answer": answer,
                **_graded(answer, example, grader, context, source.graded_tokens),
            }
            values["scores"] = further_scores(
                answer,
                example.answers,
                example.match,
                self._graders,
                max_tokens=source.graded_tokens,
            )
        except (LimitReached, RunNotWritable):
            raise
        except (Exception, asyncio.CancelledError) as error:
            if not is_failure(error):
                raise
            failure = error  # whatever a method raises, other items continue
            if isinstance(error, PromptCut):
                await engine.forget()
            with suppress(ValueError):
                _check_notes(context)
            trace = context.trace()
            values |= {"status": "failed", "error": _one_line(error), "answer": trace.answer or ""}
        if failure is not None and not isinstance(failure, MemagentError):
            lines = "".join(traceback.format_exception(failure)).splitlines()
            context.notes["traceback"] = lines[-TRACEBACK_LINES:]
        seconds = time.perf_counter() - clock - engine.queue.seconds + engine.seconds_before
        if context.keeps_memory:
            values |= evidence_scores(example, trace).known()
        usage = trace.usage
        places = tuple(min(1.0, depth) for depth in depths(example))
        record = ItemRecord(
            id=example.id,
            task=item.task,
            method=method.title,
            target_tokens=item.target_tokens,
            num_tokens=example.num_tokens,
            index=item.index,
            sample=attempt.sample,
            seed=seed,
            depth=fmean(places) if places else None,
            depths=places,
            answers=example.answers,
            match=example.match,
            grader=grader,
            graded_tokens=source.graded_tokens,
            generated_tokens=source.generated_tokens,
            num_calls=usage.calls,
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
            cached_tokens=usage.cached_tokens,
            seconds=round(seconds, 6),
            cost=self._prices.cost_of(usage) if self._prices else None,
            num_sections=sum(step.section is not None for step in trace.steps),
            is_cut=context.is_cut,
            num_withheld=trace.num_withheld,
            served=trace.served,
            trace=trace.to_dict(),
            metadata=example.metadata | ({"method": context.notes} if context.notes else {}),
            **values,
        )
        return record, failure

    # --- writing -------------------------------------------------------------------------------

    async def _write_suspects(self, *, later: bool = False) -> None:
        """Write the items that failed through their own fault; `later`: because calls were answered after them."""
        own = [
            one
            for one in self._suspects
            if not one.is_unanswered and (not later or one.gate.num_answered > one.num_answered)
        ]
        self._suspects = [one for one in self._suspects if one not in own]
        for one in own:
            await self._write(one.record)

    async def _write(self, record: ItemRecord) -> None:
        if self.run is not None:
            loop = asyncio.get_running_loop()
            append = self.run.append
            writing = loop.run_in_executor(self._disk, lambda: append(record.to_json()))
            await asyncio.shield(writing)
        self.records[record.key] = replace(record, trace={})
        if self._on_record:
            self._on_record(record)

    def _is_outage(self) -> bool:
        """Whether items failed because the engine did, and not through their own fault."""
        if any(one.is_unanswered for one in self._suspects):
            return True
        is_refused = isinstance(self._last_error(), EngineRefused)  # a refusal is no outage
        if any(method.gate.num_answered for method in self.methods):
            return not is_refused and len(self._suspects) >= TAIL_FAILURES
        return not (is_refused and any(one.status == "ok" for one in self.records.values()))

    def _last_error(self) -> MemagentError:
        errors = [method.gate.last_error for method in self.methods if method.gate.last_error]
        errors += [one.error for one in self._suspects if isinstance(one.error, MachineError)]
        return errors[-1]


# --- examples in memory ---------------------------------------------------------------------------


async def evaluate_examples(
    examples: Sequence[Example],
    method: Method,
    engine: Engine,
    *,
    title: str,
    seed: int,
    grader: str | None = None,
    run: Run | None = None,
    concurrency: int = 16,
    in_waves: bool = False,
    on_record: OnRecord | None = None,
) -> list[ItemRecord]:
    """The records of examples in memory, answered by one method; the longest are asked first.

    A record has the Trace that the method returns; `on_record` receives it, the result leaves it out.
    `grader` overrides the examples' own, and names the score where the method sets `context.score`.
    `in_waves` asks `concurrency` examples at once, and the next ones when all of them are done: which
    examples are in flight together then does not depend on timing.
    """
    tokenizer, _ = tokenizer_for_model(engine.tokenizer)
    opened = OpenMethod(
        title=title,
        function=method,
        settings=MethodSettings(),
        gate=EngineGate(engine, concurrency=concurrency),
        tokenizer=tokenizer,
    )
    given = _InMemory(examples, grader)
    size = concurrency if in_waves else max(1, len(examples))
    records: dict[ItemKey, ItemRecord] = {}
    for start in range(0, len(examples), size):
        wave = replace(given.plan, items=given.plan.items[start : start + size])
        evaluation = Evaluation(wave, given, [opened], seed=seed, run=run, concurrency=concurrency)
        for record in await evaluation.evaluate(on_record=on_record):
            records[record.key] = record
    return sorted(records.values(), key=_order)


def score_interval(scores: Sequence[float]) -> Interval:
    """The mean of scores with its 95 % interval."""
    return mean_interval(scores)


class _InMemory:
    """Examples in memory, as a plan and its examples."""

    def __init__(self, examples: Sequence[Example], grader: str | None) -> None:
        self.num_ahead = 1
        self._examples = examples
        numbers: Counter[tuple[str, int | None]] = Counter()
        items: list[Item] = []
        for position, example in enumerate(examples):
            kind = (example.task, example.target_tokens)
            items.append(
                Item(
                    source=ItemSource(
                        task=example.task,
                        grader=grader,
                        graded_tokens=MAX_ANSWER_TOKENS.get(example.task),
                    ),
                    position=position,
                    task=example.task,
                    target_tokens=example.target_tokens,
                    index=numbers[kind],
                    num_tokens=example.num_tokens or 0,
                )
            )
            numbers[kind] += 1
        items.sort(key=lambda item: -item.num_tokens)
        self.plan = EvalPlan(items=tuple(items), files={}, tokenizers=())

    def example(self, item: Item) -> asyncio.Future[Example]:
        """The example, at once."""
        future: asyncio.Future[Example] = asyncio.get_running_loop().create_future()
        future.set_result(self._examples[item.position])
        return future


# --- underneath -----------------------------------------------------------------------------------


def _key(item: Item, attempt: _Attempt) -> ItemKey:
    return ItemKey(item.task, attempt.method.title, item.target_tokens, item.index, attempt.sample)


def _name(key: ItemKey) -> str:
    """A key as one string, for the call log; that of a first sample has no number."""
    parts = astuple(key)
    return json.dumps(parts if key.sample else parts[:-1])


def _order(record: ItemRecord) -> tuple[str, int, str, int, int]:
    return (record.task, record.target_tokens or 0, record.method, record.index, record.sample)


def _collect(in_flight: set[asyncio.Task[None]]) -> None:
    """Remove finished tasks; an error that they raise is a bug or a full disk, and stops the run."""
    for task in [task for task in in_flight if task.done()]:
        in_flight.remove(task)
        task.result()


def _answer_of(trace: object, context: Context) -> str:
    if not isinstance(trace, Trace):
        raise TypeError(
            f"the method {context.method} returned {type(trace).__name__} instead of a Trace"
        )
    if trace.answer is None:
        raise ValueError(f"the method {context.method} ended without a step of kind answer")
    return trace.answer


def _graded(
    answer: str, example: Example, grader: str, context: Context, max_tokens: int | None
) -> dict[str, Any]:
    """The score of an answer, by the method itself or by the grader."""
    if context.score is not None:
        own: object = context.score  # the code may be a user's
        if not isinstance(own, Real) or not math.isfinite(own):
            raise ValueError(
                f"the method {context.method} has the score {own!r}; it must be a finite number"
            )
        return {"score": float(own)}
    score = grade(grader, answer, example.answers, example.match, max_tokens=max_tokens)
    values: dict[str, Any] = {"score": score.value, "extracted": score.extracted}
    if max_tokens is not None:
        values["answer_tokens"] = limit_answer(answer, max_tokens).num_tokens
    return values


def _check_notes(context: Context) -> None:
    """Raise ValueError for notes that a file cannot hold, without which the item can be written."""
    try:
        json.dumps(context.notes)
    except (TypeError, ValueError) as error:
        context.notes = {}
        raise ValueError(
            f"the notes of the method {context.method} must be plain JSON: {error}"
        ) from None


def _without_example(item: Item, attempt: _Attempt, seed: int, error: Exception) -> ItemRecord:
    """The record of an item whose example could not be generated."""
    return ItemRecord(
        id="",
        task=item.task,
        method=attempt.method.title,
        target_tokens=item.target_tokens,
        num_tokens=None,
        index=item.index,
        sample=attempt.sample,
        seed=seed,
        status="failed",
        error=f"the example could not be generated: {_one_line(error)}",
        grader=item.source.grader or "",
        graded_tokens=item.source.graded_tokens,
        generated_tokens=item.source.generated_tokens,
        score=0.0,
    )


def _one_line(error: BaseException) -> str:
    """An error on one line; with its type, unless it is one of ours."""
    text = plain(str(error), 500)
    return text if isinstance(error, MemagentError) else f"{type(error).__name__}: {text}"
