"""The runner: items in, records out, each on disk when it is finished.

    plan ──▶ Maker (other processes) ──▶ examples, a few ahead
                                            │
             ┌──────────────────────────────┘
             ▼
    item: method(example, context) ──▶ Trace ──▶ grade ──▶ ItemRecord ──▶ RUN/steps.jsonl
             │
             └── calls, through one gate for all items ──▶ engine

More items are begun than calls are allowed at once, so that a place that becomes free is taken at once.
A failed item is a record with a score of 0. What stops a run is a limit, Ctrl-C, or an engine that fails
again and again; everything finished is kept then, and so are the replies of items that were under way.

    suite = parse_suite({"tasks": [{"tasks": ["ruler/vt"], "tokens": ["8k"]}], "num": 16})
    records = await evaluate(suite, engine)          # from Python

    records = await evaluate_examples(examples, method, engine, title="agent", seed=1)
    score_interval([record.score for record in records])      # training validates with these
"""

from __future__ import annotations

import asyncio
import json
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from memagent.agent.limits import Limits
from memagent.agent.trace import Trace
from memagent.data.example import Example
from memagent.data.inspection import depths
from memagent.documents.document import Document
from memagent.documents.tokenizers import Tokenizer, open_tokenizer, tokenizer_for_model
from memagent.errors import (
    DataError,
    EngineError,
    EngineRefused,
    LimitReached,
    MemagentError,
    RunError,
)
from memagent.eval.calls import CALLS, CallLog, Gate, ItemEngine
from memagent.eval.items import Item, Maker, Plan, Source, is_lost, item_seed, make_plan
from memagent.eval.methods import Context as Context  # these two by name for training
from memagent.eval.methods import Method, MethodSettings, open_method, settings_for
from memagent.eval.records import KIND, Key, parse_item
from memagent.eval.records import ItemRecord as ItemRecord
from memagent.eval.stats import Interval, mean_interval
from memagent.eval.suites import Suite
from memagent.rewards.verifiers import grade
from memagent.runs import Run
from memagent.types import Engine, Prices, Usage

LEAST_FAILURES = 16
"""So many failed calls in a row, or two for each that is allowed at once, mean an outage."""
TAIL_FAILURES = 4
"""So many items that fail at the very end, with no answer after them, mean an outage too."""
TRACEBACK_LINES = 6

Watcher = Callable[[ItemRecord], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenMethod:
    """A method with all it needs."""

    title: str
    """Name in records."""
    function: Method
    settings: MethodSettings
    gate: Gate
    """The engine that answers it."""
    tokenizer: Tokenizer


class ExampleMaker(Protocol):
    """Gives the examples of items, some of them ahead of need."""

    num_ahead: int
    """How many examples may wait for their turn."""

    def make(self, item: Item) -> asyncio.Future[Example]:
        """The example of an item, with its text."""
        ...


class Evaluation:
    """One evaluation: what it needs, and how far it has come."""

    def __init__(
        self,
        *,
        methods: Sequence[OpenMethod],
        seed: int,
        run: Run | None = None,
        limits: Limits | None = None,
        prices: Prices | None = None,
        concurrency: int = 16,
        watch: Watcher | None = None,
    ) -> None:
        """Without a run, nothing is on disk. Finished items of the run are not asked again."""
        self.records: dict[Key, ItemRecord] = {}
        """Finished items, without their traces."""
        self.limits = limits or Limits()
        self._methods = methods
        self._seed = seed
        self._run = run
        self._prices = prices
        self._num_items = concurrency + concurrency // 2 + 1
        self._max_failures = max(LEAST_FAILURES, 2 * concurrency)
        self._watch = watch
        self._calls = CallLog(None)
        self._disk = ThreadPoolExecutor(1)  # one: records are written one after the other
        self._suspects: list[tuple[str, ItemRecord]] = []
        """Items that failed since the last reply: theirs is the blame only if another one succeeds."""
        self._stopped: MemagentError | None = None
        for number, record in enumerate(run.records if run else (), start=1):
            found = parse_item(record, f"{run and run.path}: line {number} of its journal")
            self.records[found.key] = found
            self.limits.count(_usage(found))

    def num_items(self, plan: Plan) -> int:
        """Records that there will be."""
        return len(plan.items) * len(self._methods)

    async def evaluate(self, plan: Plan, maker: ExampleMaker) -> list[ItemRecord]:
        """All records, those from before it was resumed included, without traces.

        Raises LimitReached at a limit, and the engine's error when it fails again and again.
        """
        pending = [(item, methods) for item in plan.items if (methods := self._unfinished(item))]
        names = [_name(_key(item, method)) for item, methods in pending for method in methods]
        if self._run is not None:
            self._calls = CallLog(self._run.path / CALLS, names)
        under_way: set[asyncio.Task[None]] = set()
        try:
            await self._ask_all(pending, maker, under_way)
            await self._finish(under_way)
        finally:
            for task in under_way:
                task.cancel()
            await asyncio.gather(*under_way, return_exceptions=True)
            self._calls.close()
            self._disk.shutdown()
        return sorted(self.records.values(), key=_order)

    def _is_stopped(self) -> bool:
        return self._stopped is not None

    def _unfinished(self, item: Item) -> list[OpenMethod]:
        return [method for method in self._methods if _key(item, method) not in self.records]

    async def _ask_all(
        self,
        pending: Iterable[tuple[Item, list[OpenMethod]]],
        maker: ExampleMaker,
        under_way: set[asyncio.Task[None]],
    ) -> None:
        """Begin the items one after the other, whenever there is a place."""
        ahead: deque[tuple[Item, list[OpenMethod], asyncio.Future[Example]]] = deque()
        remaining = iter(pending)
        try:
            while not self._is_stopped():
                while len(ahead) < maker.num_ahead and (following := next(remaining, None)):
                    item, methods = following
                    ahead.append((item, methods, maker.make(item)))
                if not ahead:
                    return
                item, methods, making = ahead.popleft()
                example = await self._made(making)
                for method in methods:
                    while len(under_way) >= self._num_items:
                        await asyncio.wait(under_way, return_when=asyncio.FIRST_COMPLETED)
                        _collect(under_way)
                    if self._is_stopped():
                        return
                    under_way.add(asyncio.create_task(self._ask(item, example, method)))
        finally:
            for _, _, making in ahead:
                making.cancel()

    async def _made(self, making: asyncio.Future[Example]) -> Example | Exception:
        """The example, or why there is none."""
        try:
            return await making
        except asyncio.CancelledError:
            raise
        except Exception as error:  # one bad example does not stop a run
            if is_lost(error):
                raise DataError(
                    "a process that made examples was ended from outside, perhaps for want of memory; "
                    "go on with --resume"
                ) from None
            return error

    async def _finish(self, under_way: set[asyncio.Task[None]]) -> None:
        """Wait for what is under way, then settle what is left to settle."""
        while under_way:
            await asyncio.wait(under_way, return_when=asyncio.FIRST_COMPLETED)
            _collect(under_way)
            if self._stopped is not None and not isinstance(self._stopped, LimitReached):
                break
        if self._stopped is not None:
            raise self._stopped
        if self._suspects and self._is_outage():
            raise self._last_error()
        await self._write_suspects()

    # --- one item ------------------------------------------------------------------------------

    async def _ask(self, item: Item, example: Example | Exception, method: OpenMethod) -> None:
        """Ask one item by one method, and keep its record."""
        if self._stopped is not None:
            return
        name = _name(_key(item, method))
        seed = item_seed(self._seed, item)
        if isinstance(example, Exception):
            await self._write(name, _unmade(item, method, seed, example))
            return
        try:
            record, error = await self._answered(item, example, method, name, seed)
        except LimitReached as reached:
            self._stopped = self._stopped or reached
            return
        if isinstance(error, EngineError | EngineRefused) and method.gate.num_failed_in_a_row:
            self._suspects.append((name, record))
            if method.gate.num_failed_in_a_row >= self._max_failures:
                self._stopped = self._last_error()
            return
        if record.status == "ok":
            await self._write_suspects()  # the engine answers: what failed before failed on its own
        await self._write(name, record)

    async def _answered(
        self, item: Item, example: Example, method: OpenMethod, name: str, seed: int
    ) -> tuple[ItemRecord, BaseException | None]:
        """The record of an item, and the error if it failed."""
        engine = ItemEngine(method.gate, self._calls, name)
        context = Context(
            engine=engine,
            tokenizer=method.tokenizer,
            settings=method.settings.model_copy(update={"seed": seed}),
            limits=self.limits,
            method=method.title,
            document=Document.from_text(example.text(), source=example.id),
            question=example.question,
        )
        grader = item.source.grader or example.grader
        values: dict[str, Any] = {"status": "ok", "score": 0.0}
        failure: BaseException | None = None
        clock = time.perf_counter()
        try:
            trace = await method.function(example, context)
            answer = _answer_of(trace, method.title)
            values |= {"answer": answer, **_graded(answer, example, grader, context)}
        except LimitReached:
            raise
        except Exception as error:  # whatever a method may raise, the other items go on
            failure = error
            trace = context.trace()
            values |= {"status": "failed", "error": _told(error), "answer": trace.answer or ""}
        if failure is not None and not isinstance(failure, MemagentError):
            context.notes["traceback"] = _frames(failure)
        seconds = time.perf_counter() - clock + engine.seconds_before
        usage = trace.usage
        record = ItemRecord(
            id=example.id,
            task=item.task,
            method=method.title,
            target_tokens=item.target_tokens,
            num_tokens=example.num_tokens,
            index=item.index,
            seed=seed,
            depth=_depth(example),
            answers=example.answers,
            grader=grader,
            num_calls=usage.calls,
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
            cached_tokens=usage.cached_tokens,
            seconds=round(seconds, 6),
            cost=self._cost(usage),
            num_sections=sum(step.section is not None for step in trace.steps),
            is_cut=context.is_cut,
            trace=trace.to_dict(),
            metadata=example.metadata | ({"method": context.notes} if context.notes else {}),
            **values,
        )
        return record, failure

    # --- keeping -------------------------------------------------------------------------------

    async def _write_suspects(self) -> None:
        suspects, self._suspects = self._suspects, []
        for name, record in suspects:
            await self._write(name, record)

    async def _write(self, name: str, record: ItemRecord) -> None:
        if self._run is not None:
            loop = asyncio.get_running_loop()
            writing = loop.run_in_executor(self._disk, self._append, record)
            await asyncio.shield(writing)
        self._calls.forget(name)
        self.records[record.key] = replace(record, trace={})
        if self._watch:
            self._watch(record)

    def _append(self, record: ItemRecord) -> None:
        assert self._run is not None
        self._run.append(record.to_json())

    def _cost(self, usage: Usage) -> float | None:
        if self._prices is None:
            return None
        return self._prices.cost(
            prompt_tokens=usage.prompt_tokens, completion_tokens=usage.completion_tokens
        )

    def _is_outage(self) -> bool:
        """Whether the last items failed because the engine did, and not each by its own fault."""
        is_refused = isinstance(self._last_error(), EngineRefused)  # for what it is: no outage
        if any(method.gate.num_answered for method in self._methods):
            return not is_refused and len(self._suspects) >= TAIL_FAILURES
        return not (is_refused and any(one.status == "ok" for one in self.records.values()))

    def _last_error(self) -> MemagentError:
        errors = [method.gate.last_error for method in self._methods if method.gate.last_error]
        return errors[-1]


# --- from Python ----------------------------------------------------------------------------------


async def evaluate(
    suite: Suite,
    engine: Engine,
    *,
    run: Run | None = None,
    sources: Sequence[str] = (),
    concurrency: int = 16,
    limits: Limits | None = None,
    prices: Prices | None = None,
    watch: Watcher | None = None,
) -> list[ItemRecord]:
    """The records of a suite asked of an engine that is open already; its own engine is not used.

    Without a run nothing is on disk. `watch` is told each record when it is finished.
    """
    if suite.tokenizer is not None:
        tokenizer = open_tokenizer(suite.tokenizer)
    else:
        tokenizer, _ = tokenizer_for_model(engine.tokenizer)
    own = suite.tokenizer or engine.tokenizer if tokenizer.is_exact else None
    plan = make_plan(suite, sources=sources, length_tokenizer=suite.length_tokenizer or own)
    gate = Gate(engine, concurrency=concurrency)
    methods = [
        OpenMethod(
            title=choice.title,
            function=open_method(choice.name),
            settings=settings_for(choice.name, engine, suite.agent, choice.settings),
            gate=gate,
            tokenizer=tokenizer,
        )
        for choice in suite.methods
    ]
    evaluation = Evaluation(
        methods=methods,
        seed=suite.seed,
        run=run,
        limits=limits,
        prices=prices,
        concurrency=concurrency,
        watch=watch,
    )
    with Maker(plan) as maker:
        await maker.check(plan)
        return await evaluation.evaluate(plan, maker)


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
    watch: Watcher | None = None,
) -> list[ItemRecord]:
    """The records of examples that are at hand, answered by one method; the longest are asked first.

    `grader` takes the place of the examples' own, and names the score where the method grades itself.
    `in_waves` asks `concurrency` of them at once, and more when all are done: which are under way together
    does not depend on time then.
    """
    tokenizer, _ = tokenizer_for_model(engine.tokenizer)
    opened = OpenMethod(
        title=title,
        function=method,
        settings=MethodSettings(),
        gate=Gate(engine, concurrency=concurrency),
        tokenizer=tokenizer,
    )
    given = _Given(examples, grader)
    size = concurrency if in_waves else max(1, len(examples))
    records: dict[Key, ItemRecord] = {}
    for start in range(0, len(examples), size):
        evaluation = Evaluation(
            methods=[opened], seed=seed, run=run, concurrency=concurrency, watch=watch
        )
        wave = replace(given.plan, items=given.plan.items[start : start + size])
        for record in await evaluation.evaluate(wave, given):
            records[record.key] = record
    return sorted(records.values(), key=_order)


def score_interval(scores: Sequence[float]) -> Interval:
    """The mean of scores with its 95 % interval."""
    return mean_interval(scores)


class _Given:
    """Examples that are there already, as a plan and its maker."""

    def __init__(self, examples: Sequence[Example], grader: str | None) -> None:
        self.num_ahead = 1
        self._examples = examples
        numbers: Counter[tuple[str, int | None]] = Counter()
        items: list[Item] = []
        for position, example in enumerate(examples):
            kind = (example.task, example.target_tokens)
            items.append(
                Item(
                    source=Source(task=example.task, grader=grader),
                    position=position,
                    task=example.task,
                    target_tokens=example.target_tokens,
                    index=numbers[kind],
                    num_tokens=example.num_tokens or 0,
                )
            )
            numbers[kind] += 1
        items.sort(key=lambda item: -item.num_tokens)
        self.plan = Plan(items=tuple(items), files={}, tokenizers=())

    def make(self, item: Item) -> asyncio.Future[Example]:
        """It is there."""
        made: asyncio.Future[Example] = asyncio.get_running_loop().create_future()
        made.set_result(self._examples[item.position])
        return made


# --- the run --------------------------------------------------------------------------------------


def open_run(path: Path, wanted: Mapping[str, Any]) -> Run:
    """A run to go on with. Raises RunError when it asks other things than are wanted."""
    run = Run.open(path, shrink=lambda record: {**record, "trace": {}})
    try:
        check_same(run.manifest, wanted, path)
    except RunError:
        run.close()
        raise
    return run


def check_same(stored: Mapping[str, Any], wanted: Mapping[str, Any], path: Path) -> None:
    """Raise RunError with the first difference between a run and what is wanted."""
    if stored.get("kind") != KIND:
        raise RunError(f"{path} is a run of kind {stored.get('kind')!r}, not an evaluation")
    then, now = stored.get("identity", {}), json.loads(json.dumps(wanted))
    for name in dict.fromkeys([*then, *now]):
        if then.get(name) != now.get(name):
            raise RunError(
                f"cannot go on with {path}: {name} was {_short(then.get(name))}, now "
                f"{_short(now.get(name))}; start a new run for it"
            )


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 120 else f"{text[:117]}..."


# --- underneath -----------------------------------------------------------------------------------


def _key(item: Item, method: OpenMethod) -> Key:
    return Key(item.task, method.title, item.target_tokens, item.index)


def _name(key: Key) -> str:
    """A key as one text, as the log of calls has it."""
    return json.dumps(astuple(key))


def _order(record: ItemRecord) -> tuple[str, int, str, int]:
    return (record.task, record.target_tokens or 0, record.method, record.index)


def _collect(under_way: set[asyncio.Task[None]]) -> None:
    """Let go of finished tasks; what they raise is a bug or a full disk, and stops the run."""
    for task in [task for task in under_way if task.done()]:
        under_way.remove(task)
        task.result()


def _answer_of(trace: object, title: str) -> str:
    if not isinstance(trace, Trace):
        raise TypeError(
            f"the method {title} gave {type(trace).__name__} where a Trace is asked for"
        )
    if trace.answer is None:
        raise ValueError(f"the method {title} ended without a step of kind answer")
    return trace.answer


def _graded(answer: str, example: Example, grader: str, context: Context) -> dict[str, Any]:
    """The score of an answer, by the method itself or by the grader."""
    if context.score is not None:
        return {"score": context.score}
    score = grade(grader, answer, example.answers, example.match)
    return {"score": score.value, "extracted": score.extracted}


def _unmade(item: Item, method: OpenMethod, seed: int, error: Exception) -> ItemRecord:
    """The record of an item whose example could not be made."""
    return ItemRecord(
        id="",
        task=item.task,
        method=method.title,
        target_tokens=item.target_tokens,
        num_tokens=None,
        index=item.index,
        seed=seed,
        status="failed",
        error=f"the example could not be made: {_told(error)}",
        grader=item.source.grader or "",
        score=0.0,
    )


def _told(error: BaseException) -> str:
    """An error on one line; of those that are no user's mistake, with their kind."""
    text = " ".join(str(error).split())[:500]
    return text if isinstance(error, MemagentError) else f"{type(error).__name__}: {text}"


def _frames(error: BaseException) -> list[str]:
    lines = "".join(traceback.format_exception(error)).splitlines()
    return lines[-TRACEBACK_LINES:]


def _depth(example: Example) -> float | None:
    found = depths(example)
    return min(1.0, sum(found) / len(found)) if found else None


def _usage(record: ItemRecord) -> Usage:
    return Usage(
        calls=record.num_calls,
        prompt_tokens=record.prompt_tokens,
        completion_tokens=record.completion_tokens,
        cached_tokens=record.cached_tokens,
    )
