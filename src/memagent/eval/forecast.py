"""What an evaluation will take, before its first call and while it runs: calls, tokens, cost, time.

    sample of each task ──▶ tokens per section, size of prompts ──┐
    EvalPlan ── length of each item ──────────────────────────────┴─▶ Work of each item and method

    forecast = make_forecast(plan, methods, pool.samples, samples=1)
    forecast.of_method("reader").num_calls

One short example of each task is generated and its prompts are counted; other items are scaled to it by their
length.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from memagent.agent.budget import JOINT_TOKENS, measure_budget
from memagent.agent.plan import max_merges
from memagent.agent.prompts import prompts_for
from memagent.agent.rates import CallRate, CallTimes, Work
from memagent.documents.chunking import Chunks
from memagent.documents.document import Document
from memagent.eval import prompts
from memagent.eval.calls import CallDone
from memagent.eval.items import EvalPlan, TaskSample
from memagent.eval.methods import LEAST_TEXT_TOKENS
from memagent.eval.records import ItemRecord
from memagent.plugins import is_file_spec

if TYPE_CHECKING:
    from memagent.eval.runner import OpenMethod

SAMPLE_CHARS = 100_000
"""At most so much of a sample is counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalForecast:
    """The work of an evaluation, by method."""

    plan: EvalPlan
    samples: int
    """Answers to each question by each method."""
    works: Mapping[str, Mapping[tuple[str, int], Work]]
    """Method to task and length to the work of one answer."""

    @property
    def cells(self) -> Counter[tuple[str, int | None]]:
        """How many items each task and requested length has."""
        return Counter((item.task, item.target_tokens) for item in self.plan.items)

    def of_item(self, method: str, task: str, num_tokens: int) -> Work:
        """The work of one answer."""
        return self.works[method][task, num_tokens]

    def of_method(self, method: str) -> Work:
        """The work of all answers of a method."""
        numbers = Counter((item.task, item.num_tokens) for item in self.plan.items)
        total = Work()
        for place, num in numbers.items():
            one = self.works[method][place]
            times = num * self.samples
            total += Work(**{f.name: getattr(one, f.name) * times for f in fields(Work)})
        return total

    @property
    def total(self) -> Work:
        """The work of all methods."""
        return sum((self.of_method(method) for method in self.works), Work())


def make_forecast(
    plan: EvalPlan,
    methods: Sequence[OpenMethod],
    examples: Mapping[str, TaskSample],
    *,
    samples: int,
) -> EvalForecast:
    """The work of every item by every method; `examples` has a sample of each task."""
    places = {(item.task, item.num_tokens) for item in plan.items}
    works: dict[str, dict[tuple[str, int], Work]] = {}
    for method in methods:
        sizes = {task: _Sizes(method, sample) for task, sample in examples.items()}
        works[method.title] = {
            (task, num_tokens): sizes[task].work(num_tokens) for task, num_tokens in places
        }
    return EvalForecast(plan=plan, samples=samples, works=works)


class _Sizes:
    """What a sample shows of the prompts of a method on a task."""

    def __init__(self, method: OpenMethod, sample: TaskSample) -> None:
        settings, tokenizer = method.settings, method.tokenizer
        text = sample.example.text()
        head = text[:SAMPLE_CHARS]
        chunks = list(
            Chunks(
                Document.from_text(head, source="sample"),
                tokenizer,
                settings.chunk_tokens,
                ends=settings.section_ends,
            )
        )
        counted = sum(chunk.num_tokens for chunk in chunks)
        whole = counted * len(text) / max(1, len(head))
        self._sample_tokens = whole
        self._scale = whole / sample.item.num_tokens if sample.item.num_tokens else None
        full = [chunk.num_tokens for chunk in chunks[:-1]]
        self._section = sum(full) / len(full) if full else float(settings.chunk_tokens)
        self._method = method
        self._question = sample.example.question

    def work(self, num_tokens: int) -> Work:
        """The work of one answer about a text of about this length."""
        tokens = num_tokens * self._scale if self._scale and num_tokens else self._sample_tokens
        kind = self._method.kind.partition(":")[0]
        if kind == "reader":
            return self._reader(tokens)
        if kind == "refine":
            return self._refine(tokens)
        if kind == "map_reduce":
            return self._map_reduce(tokens)
        return self._once(tokens, kind)

    def _sections(self, tokens: float) -> int:
        return max(1, math.ceil(tokens / self._section - 0.01))

    def _reader(self, tokens: float) -> Work:
        settings = self._method.settings
        budget = measure_budget(
            self._question, settings, prompts_for(settings), self._method.tokenizer
        )
        sections = self._sections(tokens)
        rounds = settings.rounds if settings.mode == "parallel" else 1
        merges = rounds * max_merges(settings, sections, budget)
        read = tokens + sections * (budget.read_template + budget.question)
        return Work(
            num_calls=sections + 1,
            prompt_tokens=read + budget.answer_template + budget.question,
            max_memory_tokens=sections * rounds * budget.memory
            + (rounds - 1) * read
            + merges * (budget.window - budget.merge_reply)
            + budget.ledger,
            max_completion_tokens=sections * rounds * budget.read_reply
            + merges * budget.merge_reply
            + budget.answer_reply,
        )

    def _refine(self, tokens: float) -> Work:
        settings = self._method.settings
        sections = self._sections(tokens)
        empty = self._count(prompts.REFINE, draft="", number="100", words="100")
        return Work(
            num_calls=sections,
            prompt_tokens=tokens + sections * empty,
            max_memory_tokens=(sections - 1) * settings.memory_tokens,
            max_completion_tokens=sections * (settings.memory_tokens + settings.reasoning_tokens),
        )

    def _map_reduce(self, tokens: float) -> Work:
        """Notes that do not fit one prompt are merged; that is counted with all notes at their limit."""
        settings = self._method.settings
        sections = self._sections(tokens)
        room = max(LEAST_TEXT_TOKENS, settings.window - settings.answer_tokens - 200)
        merges, notes = 0, sections
        while notes * settings.memory_tokens > room and notes > 1:
            notes = max(1, min(notes - 1, math.ceil(notes * settings.memory_tokens / room)))
            merges += notes
        empty = self._count(prompts.MAP, number="100", words="100")
        reply = settings.memory_tokens + settings.reasoning_tokens
        return Work(
            num_calls=sections + 1,
            prompt_tokens=tokens + sections * empty + self._count(prompts.REDUCE),
            max_memory_tokens=(sections + merges) * settings.memory_tokens,
            max_completion_tokens=(sections + merges) * reply
            + settings.answer_tokens
            + settings.reasoning_tokens,
        )

    def _once(self, tokens: float, kind: str) -> Work:
        settings = self._method.settings
        is_retrieved = kind in ("bm25", "dense")
        empty = self._count(prompts.RETRIEVED if is_retrieved else prompts.DIRECT)
        reply = settings.answer_tokens + settings.reasoning_tokens
        room = settings.window - empty - reply - JOINT_TOKENS
        if is_retrieved and settings.retrieved_tokens:
            room = min(room, settings.retrieved_tokens)
        own = is_file_spec(self._method.kind)
        return Work(
            num_calls=1,
            prompt_tokens=empty + (tokens if own else min(tokens, max(0, room))),
            max_completion_tokens=reply,
        )

    def _count(self, template: str, **values: str) -> int:
        asked = prompts.messages(template, text="", question=self._question, **values)
        return self._method.tokenizer.count_messages(asked)


# --- while it runs --------------------------------------------------------------------------------


class Remaining:
    """Time that is left of an evaluation, from the calls that are finished.

    Work is counted in prompt tokens, by method: how many the forecast expects, corrected by what finished items
    used, and how long a token took. Calls of unfinished items count as soon as they are answered, and calls in
    flight share the time that is left.
    """

    def __init__(self, forecast: EvalForecast | None) -> None:
        self._forecast = forecast
        self._planned: dict[str, float] = {}
        """Expected tokens of all answers that are to be asked."""
        self._done: dict[str, CallTimes] = {}
        self._tokens: Counter[str] = Counter()
        self._in_flight = 1
        self._expected: dict[str, float] = {}
        self._used: Counter[str] = Counter()
        if forecast is not None:
            self._planned = {
                name: forecast.of_method(name).prompt_tokens for name in forecast.works
            }
        self._lengths = (
            {
                (item.task, item.target_tokens, item.index): item.num_tokens
                for item in forecast.plan.items
            }
            if forecast
            else {}
        )

    @property
    def num_calls(self) -> int:
        """Calls that were answered."""
        return sum(times.num_calls for times in self._done.values())

    def skip(self, record: ItemRecord) -> None:
        """Leave out an item that was finished before; one of a method that is not asked now is none of them."""
        if self._forecast is not None and record.method in self._planned:
            self._planned[record.method] -= self._work(record)

    def call(self, call: CallDone) -> None:
        """Take in a call that was answered."""
        self._done.setdefault(call.method, CallTimes()).add(
            prompt_tokens=call.prompt_tokens,
            completion_tokens=call.completion_tokens,
            limit=call.limit,
            seconds=call.seconds,
        )
        self._tokens[call.method] += call.prompt_tokens
        self._in_flight = call.in_flight

    def finish(self, record: ItemRecord) -> None:
        """Take in a finished item."""
        if self._forecast is not None and record.status == "ok":
            expected = self._expected.get(record.method, 0.0)
            self._expected[record.method] = expected + self._work(record)
            self._used[record.method] += record.prompt_tokens

    def seconds(self, elapsed: float) -> float | None:
        """Seconds that are left after `elapsed`; None before the first call was answered."""
        busy = sum(times.seconds for times in self._done.values())
        tokens = sum(self._tokens.values())
        if self._forecast is None or not tokens or busy <= 0 or elapsed <= 0:
            return None
        left = 0.0
        for method, planned in self._planned.items():
            expected = self._expected.get(method)
            ratio = self._used[method] / expected if expected else 1.0
            per_token = busy / tokens
            if self._tokens[method]:
                per_token = self._done[method].seconds / self._tokens[method]
            left += max(0.0, ratio * planned - self._tokens[method]) * per_token
        return left / max(1.0, busy / elapsed, float(self._in_flight))

    def rate(self, elapsed: float) -> CallRate | None:
        """What the calls so far show of the engine."""
        total = CallTimes()
        for times in self._done.values():
            total.merge(times)
        return total.rate(wall_seconds=elapsed)

    def _work(self, record: ItemRecord) -> float:
        """Expected tokens of an item; none of one that is not planned, which a damaged run may hold."""
        assert self._forecast is not None
        num_tokens = self._lengths.get((record.task, record.target_tokens, record.index))
        if num_tokens is None:
            return 0.0
        return self._forecast.of_item(record.method, record.task, num_tokens).prompt_tokens
