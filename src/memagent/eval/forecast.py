"""What an evaluation will take: calls, tokens and cost before its first call, time while it runs.

    forecast = make_forecast(plan, methods, pool.samples, samples=1)
    forecast.of_method("reader").num_calls

One short example of each task is generated and its prompts are counted; other items are scaled to it by their
length.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from memagent.agent.budget import JOINT_TOKENS, measure_budget
from memagent.agent.prompts import prompts_for
from memagent.agent.work import Work, max_merges, recall
from memagent.documents.chunking import Chunks
from memagent.documents.document import Document
from memagent.engines.base import facts_of
from memagent.eval import prompts
from memagent.eval.calls import CallDone, EngineGate
from memagent.eval.items import EvalPlan, TaskSample
from memagent.eval.methods import LEAST_TEXT_TOKENS
from memagent.eval.records import ItemRecord
from memagent.eval.suites import CLOSED_BOOK
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

    def of_method(self, method: str) -> Work:
        """The work of all answers of a method."""
        works = (self.works[method][item.task, item.num_tokens] for item in self.plan.items)
        return sum(works, Work()) * self.samples

    @property
    def total(self) -> Work:
        """The work of all methods."""
        return sum((self.of_method(method) for method in self.works), Work())

    def seconds(self, gate: EngineGate) -> float | None:
        """How long all of it takes, as fast as the last run with the model was; None where there was none."""
        speed, num_answers = recall(gate.engine), len(self.plan.items) * len(self.works)
        is_shared = facts_of(gate.engine).runs_here
        lanes = None if is_shared else min(gate.concurrency, num_answers * self.samples)
        return self.total.seconds(speed, lanes=lanes) if speed else None


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
        self._method, self._settings = method, method.settings
        self._question = sample.example.question
        text = sample.example.text()
        head = Document.from_text(text[:SAMPLE_CHARS], source="sample")
        settings = self._settings
        ends = settings.section_ends
        chunks = [
            chunk.num_tokens
            for chunk in Chunks(head, method.tokenizer, settings.chunk_tokens, ends=ends)
        ]
        self._sample_tokens = sum(chunks) * len(text) / max(1, len(head.text))
        known = sample.item.num_tokens
        self._scale = self._sample_tokens / known if known else None
        full = chunks[:-1]
        self._section = sum(full) / len(full) if full else float(settings.chunk_tokens)

    def work(self, num_tokens: int) -> Work:
        """The work of one answer about a text of about this length."""
        tokens = num_tokens * self._scale if self._scale and num_tokens else self._sample_tokens
        sections = max(1, math.ceil(tokens / self._section - 0.01))
        kind = self._method.kind.partition(":")[0]
        if kind == "reader":
            return self._reader(tokens, sections)
        settings = self._settings
        reply = settings.memory_tokens + settings.reasoning_tokens
        answer = settings.answer_tokens + settings.reasoning_tokens
        if kind == "refine":
            return Work(
                num_calls=sections,
                prompt_tokens=tokens + sections * self._count(prompts.REFINE),
                max_memory_tokens=(sections - 1) * settings.memory_tokens,
                max_completion_tokens=sections * reply,
            )
        if kind == "map_reduce":
            num_notes = sections + self._merges(sections)
            counted = sections * self._count(prompts.MAP) + self._count(prompts.REDUCE)
            return Work(
                num_calls=sections + 1,
                prompt_tokens=tokens + counted,
                max_memory_tokens=num_notes * settings.memory_tokens,
                max_completion_tokens=num_notes * reply + answer,
            )
        return Work(
            num_calls=1, prompt_tokens=self._once(tokens, kind), max_completion_tokens=answer
        )

    def _reader(self, tokens: float, sections: int) -> Work:
        settings = self._settings
        budget = measure_budget(
            self._question, settings, prompts_for(settings), self._method.tokenizer
        )
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

    def _merges(self, num_notes: int) -> int:
        """Merges of notes that do not fit one prompt, counted with all notes at their limit."""
        settings = self._settings
        room = max(LEAST_TEXT_TOKENS, settings.window - settings.answer_tokens - 200)
        merges = 0
        while num_notes * settings.memory_tokens > room and num_notes > 1:
            fewer = math.ceil(num_notes * settings.memory_tokens / room)
            num_notes = max(1, min(num_notes - 1, fewer))
            merges += num_notes
        return merges

    def _once(self, tokens: float, kind: str) -> float:
        """Prompt tokens of a method with one call."""
        settings = self._settings
        if kind == CLOSED_BOOK:
            return self._count(prompts.CLOSED_BOOK)
        is_retrieved = kind in ("bm25", "dense")
        empty = self._count(prompts.RETRIEVED if is_retrieved else prompts.DIRECT)
        if is_file_spec(self._method.kind):
            return empty + tokens
        reply = settings.answer_tokens + settings.reasoning_tokens
        room = settings.window - empty - reply - JOINT_TOKENS
        return empty + min(tokens, max(0, room))

    def _count(self, template: str) -> int:
        """Tokens of a prompt without its text."""
        asked = prompts.messages(
            template, text="", question=self._question, draft="", number="100", words="100"
        )
        return self._method.tokenizer.count_messages(asked)


class Remaining:
    """Time that is left of an evaluation: the prompt tokens that are left, at the speed of the calls so far.

    Calls of unfinished items count as soon as they are answered. Each method has its own speed, and calls in flight
    share the time that is left.
    """

    def __init__(self, forecast: EvalForecast | None) -> None:
        self._forecast = forecast
        methods = forecast.works if forecast else {}
        self._left = {name: forecast.of_method(name).prompt_tokens for name in methods if forecast}
        """Expected tokens of all answers that are not finished."""
        items = forecast.plan.items if forecast else ()
        self._lengths = {
            (item.task, item.target_tokens, item.index): item.num_tokens for item in items
        }
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._tokens: Counter[str] = Counter()
        self._under_way: Counter[str] = Counter()
        """Tokens of the calls of items that are not finished."""
        self._in_flight = 1
        self.num_calls = 0
        """Calls that were answered."""

    @property
    def prompt_tokens(self) -> int:
        """Prompt tokens of the calls that were answered."""
        return sum(self._tokens.values())

    @property
    def call_seconds(self) -> float:
        """The calls that were answered, one after the other."""
        return sum(self._seconds.values())

    def call(self, call: CallDone) -> None:
        """Take in a call that was answered."""
        self.num_calls += 1
        self._seconds[call.method] += call.seconds
        self._tokens[call.method] += call.prompt_tokens
        self._under_way[call.method] += call.prompt_tokens
        self._in_flight = call.in_flight

    def finish(self, record: ItemRecord) -> None:
        """Take in a finished item; one that is not planned, which a damaged run may hold, counts nothing."""
        num_tokens = self._lengths.get((record.task, record.target_tokens, record.index))
        if self._forecast is None or num_tokens is None or record.method not in self._left:
            return
        work = self._forecast.works[record.method][record.task, num_tokens]
        self._left[record.method] -= work.prompt_tokens
        under_way = self._under_way[record.method] - record.prompt_tokens
        self._under_way[record.method] = max(0, under_way)

    def seconds(self, elapsed: float) -> float | None:
        """Seconds that are left after `elapsed`; None before the first call was answered."""
        busy, tokens = self.call_seconds, self.prompt_tokens
        if self._forecast is None or not tokens or busy <= 0 or elapsed <= 0:
            return None
        left = 0.0
        for method, expected in self._left.items():
            own = self._tokens[method]
            per_token = self._seconds[method] / own if own else busy / tokens
            left += max(0.0, expected - self._under_way[method]) * per_token
        return left / max(1.0, busy / elapsed, float(self._in_flight))
