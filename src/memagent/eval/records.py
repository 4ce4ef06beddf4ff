"""ItemRecord: the result of one example under one method, as stored in a run's journal.

    RUN/run.json       kind "eval": engine, model, methods, tasks, lengths, num, seed, grader
    RUN/steps.jsonl    one ItemRecord per line, in the order in which items finished
    RUN/grades/        scores of graders that graded the answers later (`memagent.eval.records`)

    for record in read_items(Path("RUN")):
        print(record.task, record.target_tokens, record.method, record.score)

A failed item is a record like any other: its score is 0 and it stays in every denominator.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from memagent.agent.model_call import LimitSettings
from memagent.agent.trace import Trace
from memagent.data.example import Example
from memagent.errors import ConfigError, RunError
from memagent.rewards.evidence import overlap, recall
from memagent.rewards.verifiers import NEEDS_NO_ANSWERS, Match, grade, open_grader
from memagent.run_files import check_tree, read_lines, write_file
from memagent.runs import (
    JOURNAL,
    ManifestShape,
    parse_manifest,
    read_manifest,
)
from memagent.types import AttemptStatus, Usage

KIND = "eval"
GRADES = "grades"
"""Folder in a run directory with a file for each grader that graded later."""


@dataclass(frozen=True, slots=True)
class ItemKey:
    """Identifies an item of a run; no two records of a run share it."""

    task: str
    method: str
    target_tokens: int | None
    index: int
    sample: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemRecord:
    """One example, one method: the answer, its score, and what it took."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    id: str
    """The example's id; empty when the example could not be generated."""
    task: str
    method: str
    target_tokens: int | None
    """Requested length of the text; None without a request."""
    num_tokens: int | None
    """Actual length, by the tokenizer it was generated with."""
    index: int
    """Number of the example within its task, or within its file."""
    sample: int = 0
    """Number of the answer, where an example is answered several times."""
    seed: int
    """Sampling seed of the item."""
    depth: Annotated[float, Field(ge=0, le=1)] | None = None
    """Mean position of the evidence, from 0, the start of the text, to 1; None without evidence."""
    depths: tuple[Annotated[float, Field(ge=0, le=1)], ...] = ()
    """Position of each piece of evidence; empty in runs of earlier versions."""
    status: AttemptStatus
    error: str | None = None
    """Why the item failed."""
    answer: str = ""
    answers: tuple[str, ...] = ()
    """The accepted answers."""
    match: Match | None = None
    """Whether one of them is enough or all are required; None in runs of earlier versions."""
    grader: str
    score: float
    """From 0 to 1, unless the method grades itself; 0 for a failed item."""
    extracted: str | None = None
    """The part of the answer that was graded."""
    graded_tokens: int | None = None
    """Tokens of the answer that are graded, at most; None for no limit."""
    generated_tokens: int | None = None
    """Tokens that were generated for the answer, at most; None for those of the method's settings."""
    answer_tokens: int | None = None
    """Tokens of the answer, without what precedes it in the reply; None where no limit is graded."""
    scores: dict[str, float] = field(default_factory=dict)
    """Scores by further graders, by their name; empty for a failed item."""
    num_calls: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    seconds: float = 0.0
    """From the first call of the item to its end, without the time in which all its calls queued."""
    cost: float | None = None
    """None without prices."""
    num_sections: int = 0
    """Sections of the text that were read."""
    is_cut: bool = False
    """True when the method did not read the whole text."""
    num_withheld: int = 0
    """Replies that a content filter kept back, a part of them at least, or that the model refused."""
    served: tuple[str, ...] = ()
    """The models that the server said have replied."""
    captured: float | None = None
    """Share of the evidence that was in any memory, word for word; None where it is not known, or the method
    keeps no memory."""
    retained: float | None = None
    """Share of the evidence that was in the last memory."""
    quoted: float | None = None
    """Share of the evidence that the reader quoted; None where it does not quote."""
    citation_precision: float | None = None
    """Share of the cited quotes that are evidence; None where none is cited."""
    citation_recall: float | None = None
    """Share of the evidence that the answer cites."""
    trace: dict[str, Any] = field(default_factory=dict)
    """The full trace, as `Trace.to_dict` writes it; of a failed item, its steps until the failure."""
    metadata: dict[str, Any] = field(default_factory=dict)
    """The example's metadata, and the notes of the method under `method`."""

    @property
    def is_empty(self) -> bool:
        """Whether the item was answered with nothing."""
        return self.status == "ok" and not self.answer.strip()

    @property
    def is_over_limit(self) -> bool:
        """Whether a part of the answer was not graded because it is too long."""
        return (self.answer_tokens or 0) > (self.graded_tokens or math.inf)

    @property
    def usage(self) -> Usage:
        """What its calls used."""
        return Usage(
            calls=self.num_calls,
            prompt_tokens=self.prompt_tokens,
            completion_tokens=self.completion_tokens,
            cached_tokens=self.cached_tokens,
        )

    @property
    def key(self) -> ItemKey:
        """Which item of the run this is."""
        return ItemKey(self.task, self.method, self.target_tokens, self.index, self.sample)

    def graded_by(self, grader: str) -> ItemRecord | None:
        """The record with the score of another grader; None where that one has not graded it.

        A question without an accepted answer keeps its own grader where the other one needs an answer. Failed
        items keep their score for every grader.
        """
        score = self.scores.get(grader)
        is_unasked = bool(self.id) and not self.answers and grader not in NEEDS_NO_ANSWERS
        if score is None and (grader == self.grader or is_unasked):
            return self
        if score is None and self.status != "failed":
            return None
        if (grader, score) == (self.grader, self.score):
            return self
        known = self.score if score is None else score
        return replace(self, grader=grader, score=known, extracted=None)

    def to_dict(self) -> dict[str, Any]:
        """The record as plain JSON values."""
        values = ((item.name, getattr(self, item.name)) for item in fields(self))
        return {name: list(one) if isinstance(one, tuple) else one for name, one in values}

    def to_json(self) -> bytes:
        """One JSON line without the newline."""
        line = json.dumps(self.to_dict(), ensure_ascii=False, separators=(",", ":"))
        return line.encode("utf-8", "backslashreplace")

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ItemRecord:
        """A record as `to_dict` wrote it, checked."""
        return _record.validate_python(dict(values))


class StoredEngine(ManifestShape):
    """The engine of an evaluation, as its manifest names it."""

    spec: str = ""
    settings: dict[str, Any] = Field(default_factory=dict)


class StoredCommand(ManifestShape):
    """What an evaluation was asked to do: enough to ask it again."""

    suite: dict[str, Any]
    suite_name: str | None = None
    engine: str
    engine_settings: dict[str, Any]
    concurrency: int | None = Field(default=None, ge=1)
    limits: LimitSettings = LimitSettings()


class EvaluationManifest(ManifestShape):
    """The manifest of an evaluation."""

    kind: Literal["eval"]
    created: str = ""
    memagent: str = ""
    """Version that wrote it."""
    model: str = ""
    suite: str | None = None
    seed: int | None = None
    length_tokenizer: str | None = None
    """Tokenizer that counted lengths; None where no lengths were requested."""
    num_items: int | None = None
    methods: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Each method with its settings, by its title."""
    sources: dict[str, str] = Field(default_factory=dict)
    """SHA-256 of the source files of generated texts."""
    engine: StoredEngine = StoredEngine()
    identity: dict[str, Any] = Field(default_factory=dict)
    """Everything that decides the records."""
    command: StoredCommand | None = None
    """None for an evaluation that was started from Python with an open engine."""


def read_evaluation(path: Path, purpose: str = "not an evaluation") -> EvaluationManifest:
    """The manifest of the evaluation at `path`, checked; `purpose` ends the error for another kind."""
    return parse_evaluation(read_manifest(path), path, purpose)


def parse_evaluation(
    manifest: Mapping[str, Any], path: Path, purpose: str = "not an evaluation"
) -> EvaluationManifest:
    """A manifest that was read from `path`, checked."""
    if manifest.get("kind") != KIND:
        raise RunError(f"{path} is a run of kind {manifest.get('kind')!r:.60}, {purpose}")
    return parse_manifest(manifest, EvaluationManifest, path)


@dataclass(frozen=True, slots=True, kw_only=True)
class LaterGrade:
    """What a grader that graded later said of an item."""

    item: ItemKey
    score: float


def read_items(path: Path, *, with_traces: bool = True) -> Iterator[ItemRecord]:
    """The records of an evaluation's directory, one by one; a torn last line is skipped.

    Without traces they are small, whatever the length of the texts. `scores` has the graders that graded
    later, too.
    """
    read_evaluation(path)
    journal = path / JOURNAL
    if not journal.exists():
        return
    later = _later_scores(path)
    for number, (values, _) in enumerate(read_lines(journal), start=1):
        record = parse_item(
            values if with_traces else {**values, "trace": {}}, f"{journal}, line {number},"
        )
        scores = later.get(record.key)
        yield replace(record, scores=record.scores | scores) if scores else record


def parse_item(values: Mapping[str, Any], where: str) -> ItemRecord:
    """The record that a line of the journal holds; `where` names the line in errors."""
    try:
        return ItemRecord.from_dict(values)
    except ValidationError:
        raise RunError(f"{where} is damaged; the run cannot be resumed") from None


def _later_scores(path: Path) -> dict[ItemKey, dict[str, float]]:
    """Scores of the graders that graded later, by item."""
    found: dict[ItemKey, dict[str, float]] = {}
    for file in sorted(check_tree(path / GRADES).glob("*.jsonl")):
        for number, (values, _) in enumerate(read_lines(file), start=1):
            try:
                grade = _grade.validate_python(values)
            except ValidationError:
                raise RunError(
                    f"{file}, line {number}, is damaged; delete the file and grade again"
                ) from None
            found.setdefault(grade.item, {})[file.stem] = grade.score
    return found


def grade_of_line(line: bytes) -> LaterGrade:
    """A line of a grader's file. Raises ValueError where it is damaged."""
    return _grade.validate_json(line)


_record = TypeAdapter(ItemRecord)
_grade = TypeAdapter(LaterGrade)


# --- grading again --------------------------------------------------------------------------------

#     records[0].scores["f1"]
#     RUN/grades/f1.jsonl    one line per record: its item, its score, what of the answer was graded
# The run itself is not changed. Grading again replaces a grader's file, so that a run that was resumed can be
# graded as a whole.


def regrade(path: Path, graders: Sequence[str]) -> list[ItemRecord]:
    """The records of a run without traces, graded by each of `graders` too; their scores are stored in the run.

    Failed items are not graded: they count as 0 for every grader. Questions without an accepted answer are
    left to graders that need none.
    """
    if not graders:
        raise ConfigError("name at least one `grader`")
    for name in graders:
        open_grader(name)
    records = list(read_items(path, with_traces=False))
    if not records:
        raise RunError(f"{path} holds no finished items yet; there is nothing to grade")
    for name in dict.fromkeys(graders):
        lines = []
        for number, record in enumerate(records):
            if record.status == "failed" or not (record.answers or name in NEEDS_NO_ANSWERS):
                continue
            if record.match is None:
                raise RunError(
                    f"{path} was written by an earlier version, which did not record whether one or all of "
                    "the accepted answers are required; evaluate again"
                )
            limit = record.graded_tokens
            score = grade(name, record.answer, record.answers, record.match, max_tokens=limit)
            records[number] = replace(record, scores={**record.scores, name: score.value})
            line = {"item": asdict(record.key), **asdict(score)}
            line["score"] = line.pop("value")
            lines.append(json.dumps(line, ensure_ascii=False).encode("utf-8", "backslashreplace"))
        write_file(path, f"{GRADES}/{name}.jsonl", b"".join(b"%b\n" % line for line in lines))
    return records


# --- what became of the evidence ------------------------------------------------------------------


class EvidenceScores(NamedTuple):
    """Shares from 0 to 1; None where the evidence is not known, or nothing was kept of that kind."""

    captured: float | None = None
    """Evidence that was in any memory, word for word, or as its note words it."""
    retained: float | None = None
    """Evidence that was in the last memory."""
    quoted: float | None = None
    """Evidence that is in the ledger, by its place."""
    citation_precision: float | None = None
    """Cited quotes that are evidence; None for an answer that cites none."""
    citation_recall: float | None = None
    """Evidence that the answer cites."""

    def known(self) -> dict[str, float]:
        """Those that have a value, by name."""
        return {name: value for name, value in self._asdict().items() if value is not None}


def evidence_scores(example: Example, trace: Trace, *, is_cut: bool = False) -> EvidenceScores:
    """Compare a reading with the evidence of its example.

    `is_cut`: the text was read without a part, so that places in it are not those of the example.
    """
    evidence = [(item.text, item.note) for item in example.evidence]
    noted = recall(evidence, [step.memory for step in trace.steps])
    captured, retained = noted or (None, None)
    found = EvidenceScores(captured, retained)
    if not trace.has_quotes or not example.evidence or is_cut:
        return found
    wanted = example.evidence_offsets()
    kept = overlap([quote.span for quote in trace.ledger], wanted)
    cited = overlap([one.quote.span for one in trace.citations], wanted)
    assert kept is not None, "there is evidence"
    assert cited is not None, "there is evidence"
    return found._replace(
        quoted=kept.recall, citation_precision=cited.precision, citation_recall=cited.recall
    )
