"""What the page asks for, as plain values: the same for the server and for a page that holds a run.

    api = ViewerApi(open_library(["runs"]))
    api.runs()
    api.trace("tiny-5f1c09", "s12.3")

A trace has a key within its run: `q0` is a question of a reading, `i41` an item of an evaluation, `s12.3`
a rollout of a training step, `v30.17` an item of a validation.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from math import isfinite
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import Field

from memagent.documents.document import Document
from memagent.errors import RunError, plain
from memagent.eval.records import read_evaluation
from memagent.viewer.evaluations import MAX_ITEMS, PAGE_ITEMS, Items, comparison
from memagent.viewer.library import FileState, Library, ListedRun, Texts, version_of
from memagent.viewer.traces import AskRun, Json, StoredTrace, step_detail, step_prompt, step_section
from memagent.viewer.trainings import Training

T = TypeVar("T")
Whole = Annotated[int, Field(ge=0, le=10**9)]
Limit = Annotated[int, Field(ge=1, le=MAX_ITEMS)]
OPEN_RUNS = 32
"""Runs whose lines are known."""

_key = re.compile(r"([qisv])(\d{1,9})(?:\.(\d{1,9}))?")


class ViewerApi:
    """Answers about the runs of a library."""

    def __init__(self, library: Library, texts: Texts | None = None) -> None:
        self._library = library
        self._texts = texts or Texts()
        self._reading = _opener(AskRun)
        self._items = _opener(Items)
        self._training = _opener(Training)

    def runs(self) -> Json:
        """All runs, the newest first."""
        return {"runs": list(map(_listed, self._library.runs()))}

    def run(self, run_id: str) -> Json:
        """What a run is, without its steps, items or curves."""
        listed = self._library.find(run_id)
        return {**_listed(listed), **self._overview(listed)}

    def version(self, run_id: str) -> Json:
        """Changes when the run does."""
        listed = self._library.find(run_id)
        return {
            "version": str(version_of(listed.run.path)),
            "is_complete": listed.run.is_complete,
        }

    # --- traces --------------------------------------------------------------------------------

    def trace(self, run_id: str, key: str) -> Json:
        """The timeline of a trace."""
        return self._trace(run_id, key).overview()

    def step(self, run_id: str, key: str, number: int) -> Json:
        """The texts of a step."""
        return self._of_step(step_detail, run_id, key, number)

    def section(self, run_id: str, key: str, number: int) -> Json:
        """The text of the section that a step read."""
        return self._of_step(step_section, run_id, key, number)

    def prompt(self, run_id: str, key: str, number: int) -> Json:
        """The messages of a step."""
        return self._of_step(step_prompt, run_id, key, number)

    # --- evaluations and trainings --------------------------------------------------------------

    def items(
        self,
        run_id: str,
        *,
        task: str | None = None,
        method: str | None = None,
        tokens: str | None = None,
        status: str | None = None,
        text: str | None = None,
        offset: Whole = 0,
        limit: Limit = PAGE_ITEMS,
        step: Whole | None = None,
        grader: str | None = None,
    ) -> Json:
        """Items of an evaluation, or of the validation at a step; by another grader than their own."""
        given = {"task": task, "method": method, "tokens": tokens, "status": status, "text": text}
        wanted = {name: value for name, value in given.items() if value is not None}
        items = self._items_of(run_id, step)
        return items.page(wanted, offset=offset, limit=limit, grader=grader)

    def cells(self, run_id: str, *, step: Whole | None = None, grader: str | None = None) -> Json:
        """The table of an evaluation, or of the validation at a step, its scores by depth, and other graders."""
        items = self._items_of(run_id, step)
        return {
            "cells": items.cells(grader),
            "depths": items.depths(grader),
            "graders": items.graders(),
        }

    def compare(
        self, first: str, second: str, *, offset: Whole = 0, limit: Limit = PAGE_ITEMS
    ) -> Json:
        """Two evaluations side by side."""
        found = comparison(
            self._items_of(first, None), self._items_of(second, None), offset=offset, limit=limit
        )
        names = [_listed(self._library.find(each)) for each in (first, second)]
        return {**found, "runs": names}

    def metrics(self, run_id: str, *, after: Whole = 0) -> Json:
        """Lines of metrics of a training run."""
        return self._training_of(run_id).metrics(after)

    def rollouts(self, run_id: str, step: Whole = 0) -> Json:
        """Saved rollouts of a training step."""
        return self._training_of(run_id).rollouts(step)

    # --- finding them --------------------------------------------------------------------------

    def _overview(self, listed: ListedRun) -> Json:
        path = listed.run.path
        if listed.run.kind == "ask":
            return self._reading(path).overview()
        if listed.run.kind == "eval":
            found = read_evaluation(path)
            names = ("model", "suite", "seed", "length_tokenizer", "methods")
            return found.model_dump(include={*names}) | {"methods": list(found.methods)}
        if listed.run.kind == "train":
            return self._training(path).overview()
        return {}

    def _of_step(
        self,
        show: Callable[[StoredTrace, int, Document | None], T],
        run_id: str,
        key: str,
        number: int,
    ) -> T:
        trace = self._trace(run_id, key)
        path = self._library.find(run_id).run.path
        document = self._texts.find(trace.document_sha256, path) if trace.document_sha256 else None
        return show(trace, number, document)

    def _trace(self, run_id: str, key: str) -> StoredTrace:
        match = _key.fullmatch(key)
        if match is None:
            raise RunError("there is no such trace")
        kind, number = match[1], int(match[2])
        if (match[3] is None) == (kind in "sv"):
            raise RunError("there is no such trace")
        path = self._path(run_id, {"q": "ask", "i": "eval"}.get(kind, "train"))
        if kind == "q":
            return self._reading(path).trace(number)
        if kind == "i":
            methods = read_evaluation(path).methods.items()
            return self._items(path).trace(
                number, {name: _settings(each) for name, each in methods}
            )
        training = self._training(path)
        if kind == "s":
            return training.rollout(number, int(match[3]))
        items = training.validation(number)
        return items.trace(int(match[3]), {"agent": training.settings})

    def _items_of(self, run_id: str, step: int | None) -> Items:
        if step is not None:
            return self._training_of(run_id).validation(step)
        return self._items(self._path(run_id, "eval"))

    def _training_of(self, run_id: str) -> Training:
        return self._training(self._path(run_id, "train"))

    def _path(self, run_id: str, kind: str) -> Path:
        run = self._library.find(run_id).run
        if run.kind != kind:
            raise RunError(f"this is a run of kind {plain(run.kind)!r}, not {kind!r}")
        return run.path


def _opener(kind: Callable[[Path], T]) -> Callable[[Path], T]:
    """Opens runs of a kind once; again when another run has taken the place of one."""

    @lru_cache(OPEN_RUNS)
    def opened(path: Path, manifest: FileState) -> T:
        return kind(path)

    return lambda path: opened(path, version_of(path)[0])


def _listed(listed: ListedRun) -> Json:
    run = listed.run
    return {
        "id": listed.id,
        "name": run.name,
        "kind": run.kind,
        "created": run.created,
        "what": run.what,
        "state": run.state,
        "num_done": run.num_done,
        "num_all": run.num_all,
        "is_complete": run.is_complete,
        "is_running": run.is_in_use and not run.is_complete,
    }


def _settings(method: Mapping[str, Any]) -> Mapping[str, Any]:
    """The settings of a method of an evaluation."""
    found = method.get("settings")
    return found if isinstance(found, dict) else {}


def json_text(values: Json, *, is_ascii: bool = False) -> str:
    """Values as JSON. Numbers of a damaged file that JSON does not have, such as infinity, are null."""
    options: dict[str, Any] = {"ensure_ascii": is_ascii, "separators": (",", ":")}
    try:
        return json.dumps(values, allow_nan=False, **options)
    except ValueError:
        return json.dumps(_finite(values), allow_nan=False, **options)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not isfinite(value) else value
