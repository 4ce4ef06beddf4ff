"""Step and Trace: what happened, one record per model call, the same on disk and in memory."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import reduce
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Literal, cast

from pydantic import Field, TypeAdapter

from memagent.agent import display
from memagent.agent.evidence.ledger import Citation, ledger_of, without_sources
from memagent.agent.evidence.quotes import Quote
from memagent.agent.prompts import asks_box
from memagent.documents.document import Chunk, Place
from memagent.errors import RunError
from memagent.rewards.text import unboxed
from memagent.runs import JOURNAL, read_records
from memagent.types import Usage

StepKind = Literal["read", "merge", "answer"]
StepFlag = Literal[
    "reply_cut",
    "memory_cut",
    "memory_kept",
    "malformed",
    "enough",
    "stopped_early",
    "citations_inferred",
    "carried",
    "nothing",
    "joined",
    "withheld",
    "refused",
]
"""reply_cut: the limit ended the reply. memory_cut: the reply was longer than the memory may be.
memory_kept: the reply was empty or said that nothing changes, so the memory before it stays.
malformed: the reply did not keep the format; what could be used of it was used.
enough: the model said that its memory holds all that the question needs.
stopped_early: the answer was given before the whole text was read; `unread` says what was not.
citations_inferred: the answer named no quotes; those that hold its words are cited.
carried: the step was taken over from an earlier run and cost nothing in this one.
nothing: the section was read on its own and holds nothing for the question.
joined: the reply to a merge was empty, so what was to be merged was put together as it is.
withheld: the server's content filter kept back the reply or a part of it.
refused: the model refused to reply; `refusal` has what it said."""
Status = Literal["answered", "unfinished"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """Which part of the text a step read: a chunk without its text."""

    start: int
    """Character offset into the document's text."""
    end: int
    num_tokens: int
    places: tuple[Place, ...]

    @classmethod
    def of(cls, chunk: Chunk) -> Section:
        """The section that a chunk is."""
        return cls(
            start=chunk.start, end=chunk.end, num_tokens=chunk.num_tokens, places=chunk.places
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One model call: a section read, notes or memories merged, or the answer."""

    kind: StepKind
    index: int
    """Position in the trace, from 0; the section's index too where sections are read in the order of the text."""
    reply: str
    """The reply, without reasoning."""
    memory: str
    """The memory after this step; for a section that is read on its own, the note on it."""
    section: Section | None = None
    """None for merges and the answer."""
    reasoning: str | None = None
    """The reasoning before the reply, as the model wrote it."""
    refusal: str | None = None
    """What the model said instead of a reply, where the server marks it as a refusal."""
    served: str | None = None
    """What the server said has replied; None where that is the model of the trace."""
    flags: tuple[StepFlag, ...] = ()
    usage: Usage = field(default_factory=Usage)
    num_attempts: int = 1
    """Requests the call took, failed ones included."""
    started: float = 0.0
    """Unix time when the call was sent."""
    seconds: float = 0.0
    """How long the call took, retries included."""
    logprob: float | None = None
    """Log-probability of the reply under the distribution it was sampled from; None where it is not reported."""
    quotes: tuple[Quote, ...] = ()
    """What the model quoted from the section, found in it or not."""
    cited: tuple[int, ...] | None = None
    """Numbers in `Trace.ledger` that the answer rests on; None where quotes are not kept."""
    shown: str = ""
    """For the answer: the list of quotes that stood after the memory in its prompt."""
    unread: tuple[tuple[int, int], ...] = ()
    """For the answer: parts of the text that were not read, as character offsets."""
    round: int | None = None
    """Round of a parallel reading, from 1; None where sections are read in order."""
    inputs: tuple[int, ...] = ()
    """The steps whose notes or memories a merge combines, by index."""
    missing: str | None = None
    """What a merge says is still missing; the next round looks for it."""
    is_known: bool = field(default=False, compare=False)
    """Whether its reply was on disk, so that no call was made now. It is not stored."""

    @property
    def start(self) -> int | None:
        """Where its section begins; None for merges and the answer."""
        return None if self.section is None else self.section.start

    def flagged(self, **happened: bool) -> Step:
        """With those flags of which it is true."""
        new = cast(tuple[StepFlag, ...], tuple(name for name, is_so in happened.items() if is_so))
        return replace(self, flags=self.flags + new) if new else self

    def to_json(self) -> bytes:
        """One JSON line without the newline."""
        return _steps.dump_json(self, exclude=self.unused)

    @property
    def unused(self) -> set[str]:
        """Fields that files leave out because they hold nothing: a plain reading has none of them."""
        unused = (
            each.name for each in _optional_fields if getattr(self, each.name) == each.default
        )
        return {"is_known", *unused}

    @classmethod
    def from_json(cls, data: bytes | str | dict[str, Any]) -> Step:
        """A step as `to_json` wrote it, or as parsed JSON."""
        return (
            _steps.validate_python(data) if isinstance(data, dict) else _steps.validate_json(data)
        )


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Trace:
    """The ordered steps for one question, and the answer they led to."""

    question: str
    steps: tuple[Step, ...]
    model: str
    prompts: str
    """Name of the prompt set."""
    source: str
    """Name of the document."""
    document_sha256: str

    def __repr__(self) -> str:  # never all steps: there may be thousands
        parts = f"question={self.question!r}, answer={self.answer!r}, num_steps={len(self.steps)}"
        return f"Trace({parts}, source={self.source!r})"

    def _repr_html_(self) -> str:
        """The trace as a notebook shows it."""
        return display.trace_html(self)

    def _repr_markdown_(self) -> str:
        """The trace as Markdown, for notebooks that show no HTML."""
        return display.trace_markdown(self)

    @property
    def answer(self) -> str | None:
        """The answer, without the line that names its sources; None while the reading is unfinished."""
        last = self.steps[-1] if self.steps else None
        if last is None or last.kind != "answer":
            return None
        return last.reply if last.cited is None else without_sources(last.reply)

    @property
    def final_answer(self) -> str | None:
        r"""The answer as it is shown: what stands in `\boxed{}` where the prompt asked for it, else all of it."""
        if self.answer is None:
            return None
        return unboxed(self.answer, is_asked=asks_box(self.prompts))

    @property
    def status(self) -> Status:
        """Whether there is an answer."""
        return "unfinished" if self.answer is None else "answered"

    @property
    def memory(self) -> str:
        """The last memory; notes on sections that are read in parallel are none."""
        memories = (step for step in reversed(self.steps) if step.kind != "read" or not step.round)
        return next((step.memory for step in memories), "")

    @property
    def num_chunks(self) -> int:
        """Sections read, however often."""
        return sum(step.kind == "read" and step.round in (None, 1) for step in self.steps)

    @property
    def has_quotes(self) -> bool:
        """Whether quotes were kept and the answer says which of them it rests on."""
        return bool(self.steps) and self.steps[-1].cited is not None

    @property
    def ledger(self) -> tuple[Quote, ...]:
        """Every quote that the text has, in its order, each place once. Citations count them from 1."""
        return ledger_of(quote for step in self.steps for quote in step.quotes)

    @property
    def citations(self) -> tuple[Citation, ...]:
        """The quotes that the answer rests on, with their numbers."""
        ledger = self.ledger
        cited = self.steps[-1].cited or () if self.steps else ()
        return tuple(
            Citation(number, ledger[number - 1]) for number in cited if 0 < number <= len(ledger)
        )

    @property
    def rejected_quotes(self) -> tuple[Quote, ...]:
        """What the model quoted although the text does not have it."""
        return tuple(quote for step in self.steps for quote in step.quotes if not quote.is_found)

    @property
    def unread(self) -> tuple[tuple[int, int], ...]:
        """Parts of the text that were not read, as character offsets."""
        return self.steps[-1].unread if self.steps else ()

    @property
    def num_withheld(self) -> int:
        """Replies that a content filter kept back, a part of them at least, or that the model refused."""
        return sum(not {"withheld", "refused"}.isdisjoint(step.flags) for step in self.steps)

    @property
    def served(self) -> tuple[str, ...]:
        """The models that the server said have replied, each once, the first one first."""
        in_time = sorted(self.steps, key=lambda step: step.started)
        return tuple(
            dict.fromkeys(step.served or self.model for step in in_time if step.usage.calls)
        )

    @property
    def usage(self) -> Usage:
        """What all calls together cost."""
        return total_usage(self.steps)

    @property
    def seconds(self) -> float:
        """Time spent in calls."""
        return sum(step.seconds for step in self.steps)

    def to_dict(self) -> dict[str, Any]:
        """The trace as plain JSON values, derived fields included for readers of the file."""
        unused = {number: step.unused for number, step in enumerate(self.steps)}
        values: dict[str, Any] = _traces.dump_python(self, mode="json", exclude={"steps": unused})
        return {**values, "answer": self.answer, "status": self.status}

    def to_json(self) -> str:
        """The trace as one JSON object."""
        return json.dumps(self.to_dict(), ensure_ascii=False)

    @classmethod
    def from_json(cls, data: bytes | str) -> Trace:
        """A trace as `to_json` wrote it."""
        return cls.from_dict(json.loads(data))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Trace:
        """A trace from `to_dict`."""
        stored = {key: value for key, value in values.items() if key not in ("answer", "status")}
        return _traces.validate_python(stored)

    @classmethod
    def load(cls, run_dir: str | Path) -> list[Trace]:
        """The traces of a run directory, one per question, finished or not."""
        from memagent.agent.journal import read_reading  # it needs this module

        path = Path(run_dir)
        manifest = read_reading(path)
        steps = steps_by_question(read_records(path), path)
        return [
            cls(
                question=question,
                steps=tuple(steps.get(number, ())),
                model=manifest["model"],
                prompts=manifest["prompts"]["name"],
                source=manifest["document"]["source"],
                document_sha256=manifest["document"]["sha256"],
            )
            for number, question in enumerate(manifest["questions"])
        ]


def total_usage(steps: Iterable[Step]) -> Usage:
    """What steps cost together."""
    return reduce(Usage.__add__, (step.usage for step in steps), Usage())


def model_changes(served: Iterable[Sequence[str]]) -> str | None:
    """A line on the models that have replied; None where it was one."""
    names = [name[:80] for name in dict.fromkeys(chain.from_iterable(served))]
    return (
        f"the model of the server changed in mid-run: {', then '.join(names)}"
        if names[1:]
        else None
    )


def call_seconds(steps: Iterable[Step]) -> float:
    """How long at least one call was in flight; less than the time of all calls where they overlap."""
    total, until = 0.0, 0.0
    for start, end in sorted((step.started, step.started + step.seconds) for step in steps):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total


def journal_line(question_number: int, step: Step) -> bytes:
    """A step as it stands in a run's journal."""
    return b'{"question":%d,"step":%b}' % (question_number, step.to_json())


def steps_by_question(records: Iterable[dict[str, Any]], path: Path) -> dict[int, list[Step]]:
    """The steps in the journal at `path`, by question number. Raises RunError for what no reading wrote."""
    questions: dict[int, list[Step]] = {}
    for number, record in enumerate(records, start=1):
        try:
            question, step = journal_entry(record)
            steps = questions.setdefault(question, [])
            if step.index != len(steps):
                raise ValueError
        except ValueError:
            raise RunError(f"{path / JOURNAL}, line {number}, is damaged") from None
        steps.append(step)
    return questions


def journal_entry(record: Mapping[str, Any]) -> tuple[int, Step]:
    """The question's number and the step that a line of a journal holds. Raises ValueError for what none can hold."""
    try:
        step = Step.from_json(record["step"])
        number = _number.validate_python(record["question"])
    except (KeyError, TypeError):
        raise ValueError("no line of a journal") from None
    if not is_sound(step):
        raise ValueError("no step of a reading")
    return number, step


def is_sound(step: Step) -> bool:
    """Whether no measure of a step is negative, and its section and inputs can be there."""
    usage, section = step.usage, step.section
    counts = (usage.calls, usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens)
    return (
        min(*counts, *step.inputs, 0) >= 0
        and max(step.inputs, default=-1) < step.index
        and 0 <= step.seconds < math.inf
        and step.num_attempts >= 1
        and (section is not None) == (step.kind == "read")
        and (section is None or 0 <= section.start < section.end)
    )


_OPTIONAL = (
    "logprob",
    "quotes",
    "cited",
    "shown",
    "unread",
    "round",
    "inputs",
    "missing",
    "refusal",
    "served",
)
_optional_fields = tuple(each for each in fields(Step) if each.name in _OPTIONAL)
_steps = TypeAdapter(Step)
_number = TypeAdapter(Annotated[int, Field(ge=0, strict=True)])
_traces = TypeAdapter(Trace)
