"""Questions that need their text: those that a model does not answer without it.

    FILE ──▶ evaluation of `closed_book`, some answers to each question ──▶ records ──▶ kept ──▶ OUT

    report = await filter_dataset("train.jsonl", "hard.jsonl", "local:smollm2-135m")
    print(report.to_text())

A question that a model answers without reading cannot train or measure reading. The run is an evaluation: it
is resumed, limited and reported as one. What is written is the input without the dropped examples: same
order, same content, whatever the concurrency.

A suite may name engines that select the questions of hotpotqa (`with_questions`). The original project asked two
models, dropped what either knew, and kept the first 128 questions for all lengths. Engines are opened one after
the other, so that each may need the whole GPU. What they leave is kept in the user's state folder: another
model, or a run that is resumed, is asked the same questions.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from platformdirs import user_state_path

from memagent.data.build import refuse_to_overwrite
from memagent.data.choices import source_settings
from memagent.data.formats.benchmarks import read_dataset
from memagent.data.formats.files import FORMATS, read_examples, write_examples
from memagent.data.tasks.registry import Task, open_task
from memagent.engines.limit import RetryListener
from memagent.errors import ConfigError
from memagent.eval.calls import OnCall
from memagent.eval.prompts import CLOSED_BOOK as CLOSED_BOOK_PROMPT
from memagent.eval.records import ItemRecord
from memagent.eval.runner import Evaluation, OnRecord
from memagent.eval.setup import EvalRequest, OnNote, make_request, open_evaluation
from memagent.eval.suites import (
    CLOSED_BOOK,
    HOTPOTQA,
    KNOWN_BY,
    QuestionSelection,
    Suite,
)
from memagent.rewards.verifiers import NEEDS_NO_ANSWERS
from memagent.runs import MANIFEST
from memagent.types import Engine, Usage

SAMPLES = 2
SAMPLING = {"answer_tokens": 512, "temperature": 1.0, "top_p": 0.7}
QUESTION_SETTINGS = ("split", "dev", "train", "overlap")
"""Settings of hotpotqa that decide which questions there are."""
LEAST_DOCS = 2
"""Documents of a candidate, whose text is not used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FilterReport:
    """What was kept and dropped of a file."""

    model: str
    num_questions: int
    """Questions in the file."""
    num_screened: int
    """Questions with a verdict; fewer where enough were kept before the end."""
    num_kept: int
    num_dropped: int
    """Questions that were answered without their text."""
    num_failed: int
    """Questions with a failed call that no reply answered: they are not kept either."""
    by_grader: dict[str, int]
    """Dropped questions by the graders that took a reply for right."""
    by_task: dict[str, dict[str, int]]
    """For each task, how many questions were kept, dropped and failed."""
    usage: Usage
    cost: float | None = None
    """In the currency of the prices; None without prices."""

    def to_dict(self) -> dict[str, Any]:
        """The report as plain JSON values."""
        return asdict(self)

    def to_text(self) -> str:
        """The report for people."""
        lines = [
            f"questions   {self.num_questions:>9,}",
            f"screened    {self.num_screened:>9,}",
            f"kept        {self.num_kept:>9,}",
            f"dropped     {self.num_dropped:>9,}",
            *(f"  {grader}: {num:,}" for grader, num in self.by_grader.items()),
        ]
        if self.num_failed:
            lines.append(f"failed      {self.num_failed:>9,} (not kept)")
        if len(self.by_task) > 1:
            lines += [
                f"  {task}: " + ", ".join(f"{fate} {num:,}" for fate, num in counts.items())
                for task, counts in self.by_task.items()
            ]
        cost = f", cost {self.cost:.4f}" if self.cost is not None else ""
        lines.append(
            f"{self.usage.calls:,} calls, {self.usage.prompt_tokens:,} prompt and "
            f"{self.usage.completion_tokens:,} completion tokens{cost}"
        )
        return "\n".join(lines) + "\n"


async def filter_dataset(
    file: str | Path,
    out: str | Path,
    engine: Engine | str | None = None,
    *,
    engine_settings: Mapping[str, Any] | None = None,
    num: int | None = None,
    samples: int = SAMPLES,
    graders: Sequence[str] = KNOWN_BY,
    run_dir: str | Path | None = None,
    force: bool = False,
    on_record: OnRecord | None = None,
) -> FilterReport:
    """Write the examples of `file` that the engine does not answer without the text to `out`.

    A question is dropped if one of `graders` takes one of `samples` replies for right. Stops when `num` are
    kept. A run directory that holds this filtering already is resumed.
    """
    file, out = Path(file), Path(out)
    check_paths(file, out, force=force)
    suite = closed_book_suite(file, samples=samples, graders=graders)
    request = make_request(suite, engine, engine_settings=engine_settings)
    path = Path(run_dir) if run_dir is not None else None
    is_there = path is not None and (path / MANIFEST).exists()
    async with open_evaluation(request, run_dir=path, resume=is_there) as evaluation:
        return await filter_with(evaluation, file, out, num=num, on_record=on_record)


def check_paths(file: Path, out: Path, *, force: bool = False) -> None:
    """Raise an error where `file` cannot be filtered to `out`."""
    if not out.name.endswith(tuple(FORMATS)):
        raise ConfigError(f"{out.name}: a dataset ends in {', '.join(FORMATS)}; change `out`")
    if file.expanduser().resolve() == out.expanduser().resolve():
        raise ConfigError("`out` is the file that is read; name another")
    if not force:
        refuse_to_overwrite(out)


def closed_book_suite(
    file: Path, *, samples: int = SAMPLES, graders: Sequence[str] = KNOWN_BY
) -> Suite:
    """The suite that asks the questions of a file without their texts."""
    grader, *more = graders
    return Suite.parse(
        {
            "methods": [{"name": CLOSED_BOOK}],
            "tasks": [{"files": [str(file)]}],
            "samples": samples,
            "grader": grader,
            "graders": more,
            "agent": SAMPLING,
        }
    )


def file_of(request: EvalRequest, path: Path) -> Path:
    """The file that a stored request filters. Raises ConfigError for another evaluation."""
    suite = request.suite
    files = [file for task in suite.tasks for file in task.files]
    if [method.name for method in suite.methods] != [CLOSED_BOOK] or len(files) != 1:
        raise ConfigError(f"{path} is not a run of `memagent data filter`")
    return Path(files[0])


async def filter_with(
    evaluation: Evaluation,
    file: Path,
    out: Path,
    *,
    num: int | None = None,
    on_record: OnRecord | None = None,
    on_retry: RetryListener | None = None,
    on_call: OnCall | None = None,
) -> FilterReport:
    """Ask the questions of an open evaluation of `closed_book`, and write the examples that are kept."""
    fates = _Fates(evaluation, await asyncio.to_thread(_unanswerable, file), num)

    def take(record: ItemRecord) -> None:
        fates.add(record)
        if on_record:
            on_record(record)
        if fates.is_enough:
            raise _Enough

    if not fates.is_enough:
        with suppress(_Enough):
            await evaluation.evaluate(on_record=take, on_retry=on_retry, on_call=on_call)
    kept = frozenset(fates.kept())
    examples = enumerate(read_dataset(file))
    await asyncio.to_thread(
        write_examples, out, (example for number, example in examples if number in kept)
    )
    return fates.report()


class _Enough(Exception):
    """Ends an evaluation when enough questions are kept."""


class _Fates:
    """What becomes of each question, in the order of the file."""

    def __init__(self, evaluation: Evaluation, unasked: frozenset[int], num: int | None) -> None:
        """Questions that no reply can answer, `unasked`, are kept; they leave the plan of the evaluation."""
        items = evaluation.plan.items
        self._num = num
        self._tasks = {item.position: item.task for item in items}
        self._model = evaluation.methods[0].gate.engine.model
        self._positions = {(one.task, one.target_tokens, one.index): one.position for one in items}
        self._records: dict[int, list[ItemRecord]] = defaultdict(list)
        self._samples = evaluation.num_items // max(1, len(items))
        self._fates = dict.fromkeys(unasked, "kept")
        self._next = self._num_kept = 0
        asked = tuple(item for item in items if item.position not in unasked)
        evaluation.plan = replace(evaluation.plan, items=asked)
        for record in evaluation.records.values():
            self.add(record)

    def add(self, record: ItemRecord) -> None:
        """Take in a record; with its last answer the fate of a question is known."""
        position = self._positions.get((record.task, record.target_tokens, record.index))
        if position is None or record.sample >= self._samples:
            return  # a damaged run may hold it
        records = self._records[position]
        records.append(record)
        if len(records) == self._samples:
            is_failed = any(one.status == "failed" for one in records)
            is_known = any(map(_right_by, records))
            self._fates[position] = "dropped" if is_known else "failed" if is_failed else "kept"
        while self._next in self._fates:
            self._num_kept += self._fates[self._next] == "kept"
            self._next += 1

    @property
    def is_enough(self) -> bool:
        """Whether so many are kept that no further question is needed."""
        return self._num is not None and self._num_kept >= self._num

    def kept(self) -> list[int]:
        """The positions of the questions that are kept, at most as many as are wanted."""
        kept = sorted(position for position, fate in self._fates.items() if fate == "kept")
        return kept[: self._num]

    def report(self) -> FilterReport:
        """Count the fates, up to the last question that is kept if there are enough."""
        last = self.kept()[-1] if self.is_enough else len(self._tasks)
        fates = {number: fate for number, fate in sorted(self._fates.items()) if number <= last}
        by_task: dict[str, dict[str, int]] = {}
        for position, fate in fates.items():
            task = self._tasks[position]
            by_task.setdefault(task, dict.fromkeys(("kept", "dropped", "failed"), 0))[fate] += 1
        graders = []
        for position, fate in fates.items():
            if fate == "dropped":
                found = dict.fromkeys(g for one in self._records[position] for g in _right_by(one))
                graders.append(" and ".join(found))
        records = [record for records in self._records.values() for record in records]
        costs = [record.cost for record in records if record.cost is not None]
        counts = Counter(fates.values())
        return FilterReport(
            model=self._model,
            num_questions=len(self._tasks),
            num_screened=len(fates),
            num_kept=counts["kept"],
            num_dropped=counts["dropped"],
            num_failed=counts["failed"],
            by_grader=dict(sorted(Counter(graders).items())),
            by_task=by_task,
            usage=sum((record.usage for record in records), Usage()),
            cost=sum(costs) if costs else None,
        )


def _right_by(record: ItemRecord) -> list[str]:
    scores = {record.grader: record.score, **record.scores}
    return [grader for grader, score in scores.items() if score == 1.0]


def _unanswerable(file: Path) -> frozenset[int]:
    """The examples whose text holds no answer, so that no model can know it."""
    return frozenset(
        number
        for number, example in enumerate(read_dataset(file))
        if not example.answers or example.grader in NEEDS_NO_ANSWERS
    )


# --- the questions of hotpotqa --------------------------------------------------------------------


async def with_questions(suite: Suite, *, on_note: OnNote | None = None) -> Suite:
    """The suite with the file of its questions among the settings of hotpotqa; engines are asked if needed."""
    choices = [choice for choice in suite.tasks if HOTPOTQA in choice.tasks]
    if suite.selection is None or not choices:
        return suite
    file = suite.selection.file or str(await _screened(suite, suite.selection, on_note))
    own = {"selection": file}
    tasks = [
        one.model_copy(update={"settings": own | one.settings}) if one in choices else one
        for one in suite.tasks
    ]
    return suite.model_copy(update={"tasks": tasks})


def describe_selection(suite: Suite) -> str | None:
    """One line about the questions of hotpotqa; None where there is nothing to say."""
    selection = suite.selection
    if selection is None or not any(HOTPOTQA in choice.tasks for choice in suite.tasks):
        return None
    if selection.file is not None:
        return f"questions of {HOTPOTQA}: those of {selection.file}"
    return (
        f"questions of {HOTPOTQA}: of the first {selection.candidates:,}, those that "
        f"{' and '.join(selection.engines)} do not answer without the text"
    )


async def _screened(suite: Suite, selection: QuestionSelection, on_note: OnNote | None) -> Path:
    """The file of the questions that no engine answers."""
    task = await asyncio.to_thread(_open_candidates, suite)
    folder = _folder(task, selection)
    await asyncio.to_thread(folder.mkdir, parents=True, exist_ok=True)
    file = folder / "candidates.jsonl"
    if not file.exists():
        num = min(selection.candidates, task.num_available or selection.candidates)
        questions = (replace(task.example(index), documents=None) for index in range(num))
        await asyncio.to_thread(write_examples, file, questions)
    for number, spec in enumerate(selection.engines, start=1):
        out = folder / f"left-{number}.jsonl"
        if not out.exists():
            if on_note:
                on_note(f"selecting questions: {spec} is asked without the text")
            run_dir = folder / f"replies-{number}"
            await filter_dataset(file, out, spec, graders=selection.graders, run_dir=run_dir)
        file = out
    _check_number(suite, selection, file, on_note)
    return file


def _open_candidates(suite: Suite) -> Task:
    """The questions in the order of their file."""
    own = next(choice.settings for choice in suite.tasks if HOTPOTQA in choice.tasks)
    which = {name: value for name, value in own.items() if name in QUESTION_SETTINGS}
    settings = {**source_settings(HOTPOTQA, suite.sources), **which}
    length = {"docs": LEAST_DOCS, "order": "file", "tokenizer": "bytes"}
    return open_task(HOTPOTQA, {**settings, **length})


def _folder(task: Task, selection: QuestionSelection) -> Path:
    """Where a selection is kept: what decides it decides the name."""
    origin = task.example(0).origin
    assert origin is not None, "examples of hotpotqa have an origin"
    key: list[Any] = [
        origin.sources,
        origin.settings["split"],
        selection.model_dump(mode="json", exclude={"file"}),
        CLOSED_BOOK_PROMPT,
    ]
    name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:32]
    return user_state_path("memagent", appauthor=False) / "selections" / name


def _check_number(
    suite: Suite, selection: QuestionSelection, file: Path, on_note: OnNote | None
) -> None:
    num_left = sum(1 for _ in read_examples(file))
    nums = [choice.num or suite.num for choice in suite.tasks if HOTPOTQA in choice.tasks]
    if num_left < max(nums):
        raise ConfigError(
            f"{num_left:,} of the first {selection.candidates:,} questions are left that no engine answers "
            f"without the text, fewer than `num={max(nums)}`; raise `candidates` of the selection, or lower "
            "`num`"
        )
    if on_note:
        on_note(f"questions: the first of {num_left:,} that need the text, {file}")
