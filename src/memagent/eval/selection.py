"""Which questions an evaluation asks of hotpotqa, the same at every length.

    suite.selection ── file ──────────────────────────────────────────────▶ its questions
                    └─ engines: the first candidates ─▶ engine 1 ─▶ engine 2 ─▶ those that none answers

Questions that a model knows without the text do not measure reading. The original project asked two models,
dropped what either knew, and kept the first 128 questions for all lengths. Engines are opened one after the
other, so that each may need the whole GPU. What they leave is kept in the user's state folder: another model,
or a run that is resumed, is asked the same questions, and no reply is requested twice.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from platformdirs import user_state_path

from memagent.agent.prompts import CLOSED_BOOK
from memagent.data.choices import source_settings
from memagent.data.example import Example
from memagent.data.filtering.run import DEFAULT_CONCURRENCY, filter_dataset
from memagent.data.formats.files import read_examples, write_examples
from memagent.data.tasks.registry import Task, open_task
from memagent.engines.base import BaseEngine, as_endpoint, choose_engine
from memagent.errors import ConfigError
from memagent.eval.suites import HOTPOTQA, QuestionSelection, Suite, SuiteTasks
from memagent.runs import MANIFEST

OnNote = Callable[[str], None]
QUESTION_SETTINGS = ("split", "dev", "train", "overlap")
"""Settings of hotpotqa that decide which questions there are."""
LEAST_DOCS = 2
"""Documents of a candidate, whose text is not used."""


async def with_questions(suite: Suite, *, on_note: OnNote | None = None) -> Suite:
    """The suite with the file of its questions among the settings of hotpotqa; engines are asked if needed."""
    choices = [choice for choice in suite.tasks if HOTPOTQA in choice.tasks]
    if suite.selection is None or not choices:
        return suite
    file = suite.selection.file or str(await _screened(suite, suite.selection, on_note))
    tasks = [_with_file(choice, file) if choice in choices else choice for choice in suite.tasks]
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


def _with_file(choice: SuiteTasks, file: str) -> SuiteTasks:
    return choice.model_copy(update={"settings": {"selection": file, **choice.settings}})


async def _screened(suite: Suite, selection: QuestionSelection, on_note: OnNote | None) -> Path:
    """The file of the questions that no engine answers."""
    task = await asyncio.to_thread(_open_candidates, suite)
    folder = _folder(task, selection)
    await asyncio.to_thread(folder.mkdir, parents=True, exist_ok=True)
    file = folder / "candidates.jsonl"
    if not file.exists():
        await asyncio.to_thread(write_examples, file, _candidates(task, selection.candidates))
    for number, spec in enumerate(selection.engines, start=1):
        out = folder / f"left-{number}.jsonl"
        if not out.exists():
            if on_note:
                on_note(f"selecting questions: {spec} is asked without the text")
            await _ask(spec, file, out, folder / f"replies-{number}", selection)
        file = out
    _check_number(suite, selection, file, on_note)
    return file


async def _ask(
    spec: str, file: Path, out: Path, run_dir: Path, selection: QuestionSelection
) -> None:
    """Write the questions of `file` that an engine does not answer to `out`."""
    choice = choose_engine(spec, {})
    if choice.kind == "vllm":  # only training needs token ids
        choice = replace(choice, settings={"token_ids": False, **choice.settings})
    is_there = (run_dir / MANIFEST).exists()
    async with choice.open() as engine:
        endpoint = as_endpoint(engine)
        await filter_dataset(
            file,
            out,
            [await _inspected(engine)],
            selection.screening,
            run_dir=None if is_there else run_dir,
            resume=run_dir if is_there else None,
            concurrency=endpoint.config.concurrency if endpoint else DEFAULT_CONCURRENCY,
        )


async def _inspected(engine: BaseEngine) -> BaseEngine:
    if endpoint := as_endpoint(engine):
        await endpoint.inspect()
    return engine


def _open_candidates(suite: Suite) -> Task:
    """The questions in the order of their file."""
    own = next(choice.settings for choice in suite.tasks if HOTPOTQA in choice.tasks)
    which = {name: value for name, value in own.items() if name in QUESTION_SETTINGS}
    settings = {**source_settings(HOTPOTQA, suite.sources), **which}
    length = {"docs": LEAST_DOCS, "order": "file", "tokenizer": "bytes"}
    return open_task(HOTPOTQA, {**settings, **length})


def _candidates(task: Task, num: int) -> Iterator[Example]:
    for index in range(min(num, task.num_available or num)):
        yield replace(task.example(index), documents=None)


def _folder(task: Task, selection: QuestionSelection) -> Path:
    """Where a selection is kept: what decides it decides the name."""
    origin = task.example(0).origin
    assert origin is not None, "examples of hotpotqa have an origin"
    key: list[Any] = [
        origin.sources,
        origin.settings["split"],
        selection.model_dump(mode="json", exclude={"file"}),
        CLOSED_BOOK,
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
