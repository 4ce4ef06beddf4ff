"""Filter a dataset: drop what a model answers without the text, and report what and why.

    with open_engine("local:smollm2-135m") as engine:
        report = asyncio.run(filter_dataset("train.jsonl", "hard.jsonl", [engine]))
    print(report.to_text())

A question that a model can answer without reading cannot train or measure reading. Every reply is on
disk before it counts, so a run that is killed requests no reply twice. What is written is the input
without the dropped examples: same order, same content, whatever the concurrency.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from pydantic import ConfigDict, Field

from memagent.agent.prompts import CLOSED_BOOK
from memagent.config import EngineConfig
from memagent.data.build import refuse_to_overwrite
from memagent.data.filtering.report import FilterReport, report_on, report_path, write_report
from memagent.data.filtering.screening import (
    BareQuestion,
    FilterSettings,
    ReplyLog,
    Verdict,
    read_questions,
    screen,
)
from memagent.data.formats.files import FORMATS, read_examples, write_examples
from memagent.engines.base import BaseEngine
from memagent.errors import ConfigError, RunError
from memagent.runs import ManifestShape, Run, check_manifest, read_manifest
from memagent.types import Prices

KIND = "data filter"
DEFAULT_SETTINGS = FilterSettings()
DEFAULT_CONCURRENCY = EngineConfig().concurrency


async def filter_dataset(
    file: str | Path,
    out: str | Path,
    engines: Sequence[BaseEngine],
    settings: FilterSettings = DEFAULT_SETTINGS,
    *,
    num: int | None = None,
    concurrency: int = DEFAULT_CONCURRENCY,
    prices: Prices | None = None,
    run_dir: Path | None = None,
    resume: Path | None = None,
    force: bool = False,
    on_verdict: Callable[[BareQuestion, Verdict], None] | None = None,
) -> FilterReport:
    """Write the examples of `file` that no engine answers without the text to `out`.

    Stops when `num` are kept. Replies are kept in `run_dir`, by default a new folder of the user's
    state; `resume` names the folder of an earlier run.
    """
    with FilterRun.open(
        file, out, engines, settings, run_dir=run_dir, resume=resume, force=force
    ) as run:
        return await run.screen(
            num=num, concurrency=concurrency, prices=prices, on_verdict=on_verdict
        )


class FilterRun:
    """One filtering, with its replies in a run directory."""

    def __init__(
        self,
        file: Path,
        out: Path,
        engines: Sequence[BaseEngine],
        settings: FilterSettings,
        questions: list[BareQuestion],
        run: Run,
    ) -> None:
        self.out = out
        self.num_questions = len(questions)
        self._file = file
        self._engines = engines
        self._settings = settings
        self._questions = questions
        self._run = run

    @classmethod
    def open(
        cls,
        file: str | Path,
        out: str | Path,
        engines: Sequence[BaseEngine],
        settings: FilterSettings = DEFAULT_SETTINGS,
        *,
        run_dir: Path | None = None,
        resume: Path | None = None,
        force: bool = False,
        questions: list[BareQuestion] | None = None,
        command: dict[str, Any] | None = None,
    ) -> Self:
        """A new run, or an earlier one.

        `questions` are those of the file if they were read before; `command` is kept in the manifest.
        """
        file, out = Path(file), Path(out)
        check_paths(file, out)
        if resume is None and not force:
            refuse_to_overwrite(out)
        questions = read_questions(file) if questions is None else questions
        expected = identity(questions, [engine.model for engine in engines], settings)
        if resume is None:
            manifest = expected if command is None else {**expected, "command": command}
            run = Run.create(run_dir, manifest)
        else:
            check_same(read_manifest(resume), expected, resume)
            run = Run.open(resume)
        return cls(file, out, engines, settings, questions, run)

    @property
    def path(self) -> Path:
        """The run directory."""
        return self._run.path

    async def screen(
        self,
        *,
        num: int | None = None,
        concurrency: int = DEFAULT_CONCURRENCY,
        prices: Prices | None = None,
        on_verdict: Callable[[BareQuestion, Verdict], None] | None = None,
    ) -> FilterReport:
        """Ask the questions, write the examples that are kept, and the report beside them."""
        log = ReplyLog(self._run)
        verdicts = await screen(
            self._questions,
            self._engines,
            self._settings,
            log,
            concurrency=concurrency,
            num=num,
            on_verdict=on_verdict,
        )
        models = [engine.model for engine in self._engines]
        report = report_on(self._questions, verdicts, models, self._settings, log, prices=prices)
        kept = (one.number for one in verdicts if one.is_kept(self._settings.on_failure))
        write_kept(self._file, self.out, kept)
        write_report(report_path(self.out), report)
        return report

    def check_kept(self) -> None:
        """Raise RunNotWritable where the replies are no longer in the run directory."""
        self._run.check_kept()

    def discard_if_empty(self) -> bool:
        """Remove a run without a reply; whether that was so."""
        return self._run.discard_if_empty()

    def close(self) -> None:
        """Release the run directory."""
        self._run.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def check_paths(file: Path, out: Path) -> None:
    """Raise ConfigError where `file` cannot be filtered to `out`."""
    if not out.name.endswith(tuple(FORMATS)):
        raise ConfigError(f"{out.name}: a dataset ends in {', '.join(FORMATS)}; change `out`")
    if file.expanduser().resolve() == out.expanduser().resolve():
        raise ConfigError("`out` is the file that is read; name another")


def write_kept(file: Path, out: Path, kept: Iterable[int]) -> int:
    """Write the examples at these positions, in their order; how many."""
    positions = frozenset(kept)
    examples = enumerate(read_examples(file))
    return write_examples(out, (example for number, example in examples if number in positions))


def identity(
    questions: Sequence[BareQuestion], models: Sequence[str], settings: FilterSettings
) -> dict[str, Any]:
    """Everything that decides what is asked. The number of samples and the rule may change later."""
    asked = [[q.id, q.question, q.answers, q.match] for q in questions]
    return {
        "kind": KIND,
        "questions": {"num": len(questions), "sha256": _sha256(asked)},
        "models": list(models),
        "prompt": _sha256(CLOSED_BOOK),
        "sampling": settings.model_dump(include={"max_tokens", "temperature", "top_p", "seed"}),
    }


class _QuestionsShape(ManifestShape):
    num: int
    sha256: str


class _EngineShape(ManifestShape):
    model_config = ConfigDict(extra="forbid")

    spec: str
    settings: dict[str, Any]


class _CommandShape(ManifestShape):
    file: str
    out: str
    num: int | None = None
    engines: list[_EngineShape]
    settings: dict[str, Any] = Field(default_factory=dict)
    price_in: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    price_out: float | None = Field(default=None, ge=0, allow_inf_nan=False)


class ScreeningShape(ManifestShape):
    """The manifest of a screening."""

    questions: _QuestionsShape
    models: list[str]
    prompt: str
    sampling: dict[str, Any]
    command: _CommandShape | None = None


def check_same(stored: Mapping[str, Any], expected: Mapping[str, Any], path: Path) -> None:
    """Raise RunError with the first difference when a run differs from what is asked now."""
    if stored.get("kind") != KIND:
        reason = f"it is a run of kind {stored.get('kind')!r:.60}, not {KIND!r}"
        raise RunError(f"cannot resume {path}: {reason}; start a new run for it")
    check_manifest(dict(stored), ScreeningShape, path)
    if stored["questions"] != expected["questions"]:
        then, now = stored["questions"]["num"], expected["questions"]["num"]
        reason = f"the questions have changed since (then {then:,}, now {now:,})"
    elif stored["models"] != expected["models"]:
        reason = f"models were {', '.join(stored['models'])}, now {', '.join(expected['models'])}"
    elif stored["prompt"] != expected["prompt"]:
        reason = "the wording of the prompt has changed"
    elif stored["sampling"] != expected["sampling"]:
        then, now = stored["sampling"], expected["sampling"]
        name = next(n for n in {**now, **then} if then.get(n) != now.get(n))
        reason = f"{name:.60} was {then.get(name)!s:.60}, now {now.get(name)}"
    else:
        return
    raise RunError(f"cannot resume {path}: {reason}; start a new run for it")


def _sha256(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, ensure_ascii=False).encode()).hexdigest()
