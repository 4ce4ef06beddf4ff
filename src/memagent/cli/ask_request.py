"""The request of `memagent ask`: from the command line and, on resuming, from the run's manifest."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memagent import trust
from memagent.agent.journal import read_reading
from memagent.agent.model_call import LimitSettings
from memagent.agent.reader import checked_question, read_questions
from memagent.cli.shared.run_options import ReaderOptions, RunOptions
from memagent.engines.base import ANY_ENDPOINT, BaseEngine, EngineChoice
from memagent.errors import ConfigError
from memagent.names import absolute_path


@dataclass(frozen=True, slots=True, kw_only=True)
class AskOptions:
    """The options of the command."""

    files: tuple[str, ...]
    questions: tuple[str, ...]
    questions_file: str | None
    as_json: bool
    dry_run: bool
    show_memory: bool
    quiet: bool
    continues: Path | None
    watch: bool
    watch_seconds: float | None
    encoding: str | None
    run: RunOptions
    reader: ReaderOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class AskRequest:
    """A reading to do: what is read with what."""

    paths: tuple[str, ...]
    folder: str
    """Where relative paths start."""
    questions: tuple[str, ...]
    encoding: str | None
    engine: EngineChoice
    agent_settings: dict[str, Any]
    tokenizer: str | None
    limits: LimitSettings
    is_stored: bool = False
    """Whether it is that of an earlier run, which has all settings."""

    @property
    def files(self) -> list[str]:
        """The absolute paths of what is read, but for standard input."""
        names = [os.path.expanduser(path) for path in self.paths if path != "-"]
        return [os.path.abspath(os.path.join(self.folder, name)) for name in names]

    def kept(self, engine: BaseEngine) -> dict[str, Any]:
        """What a manifest keeps, to resume by: no key, no credentials in the address."""
        choice = self.engine.kept(engine)
        return {
            "paths": list(self.paths),
            "folder": self.folder,
            "encoding": self.encoding,
            "engine": choice.spec,
            "engine_settings": dict(choice.settings),
            "limits": self.limits.given,
        }


def make_request(options: AskOptions) -> AskRequest:
    """The request that these options mean, checked; of a run, with what is given now.

    The run refuses what would change its trace.
    """
    resume, continues = options.run.resume, options.continues
    if continues is not None and resume is not None:
        raise ConfigError(
            "give --resume for the same text or --continue for one that has changed, not both"
        )
    earlier = resume or continues
    manifest = read_reading(earlier) if earlier else {}
    stored: Mapping[str, Any] | None = manifest.get("command")
    if earlier and stored is None:
        raise ConfigError("this run was begun from Python; resume it there with run_dir")
    stored = stored or {"paths": (), "folder": "", "encoding": None, "limits": {}}
    reader = options.reader
    files = options.questions_file
    given = [checked_question(question) for question in options.questions]
    questions = (*given, *(read_questions(files) if files else ()))
    settings = {**reader.agent}
    if prompts := settings.get("prompts"):
        settings["prompts"] = absolute_path(prompts)
    engine = _stored_engine(stored, manifest["model"]) if earlier else None
    tokenizer = absolute_path(reader.tokenizer) if reader.tokenizer else None
    request = AskRequest(
        paths=options.files or tuple(stored["paths"]),
        folder=_current_folder() if options.files or not earlier else stored["folder"],
        questions=questions or tuple(manifest.get("questions", ())),
        encoding=options.encoding or stored["encoding"],
        engine=reader.engine.choose(stored=engine),
        agent_settings={**manifest.get("agent", {}), **settings},
        tokenizer=tokenizer or manifest.get("tokenizer"),
        limits=reader.limits.over(LimitSettings(**stored["limits"])),
        is_stored=earlier is not None,
    )
    _check(request, options, earlier)
    return request


def _check(request: AskRequest, options: AskOptions, earlier: Path | None) -> None:
    """Raise ConfigError for a request that cannot be meant, or that reads files which only a run directory names."""
    if earlier and not options.files:
        how = "resume" if options.run.resume else "continue"
        again = shlex.join(["memagent", "ask", *request.files, f"--{how}", str(earlier)])
        what, may = f"the text {', '.join(request.files)}", "the model may read it"
        trust.require("file", *request.files, what=what, may=may, again=again)
    trust.remember("file", *request.files)
    if not request.paths:
        raise ConfigError("name at least one file or folder to read, or - for standard input")
    if options.watch and ("-" in request.paths or options.dry_run):
        raise ConfigError(
            "--watch follows files on disk; name files, and leave out --dry-run and -"
        )
    if not request.questions:
        last = request.paths[-1]
        if len(last.split()) > 1 and not Path(request.folder, last).exists():
            raise ConfigError(f"{last!r} is no file; ask it as a question with -q")
        raise ConfigError("ask something: -q QUESTION, or --questions FILE")
    request.limits.open()  # raises before an engine is opened in vain


def _stored_engine(stored: Mapping[str, Any], model: str) -> EngineChoice:
    """The engine of a run, with the model it found when none was named."""
    spec = stored["engine"]
    spec = f"{spec}{model}" if spec == ANY_ENDPOINT else spec
    return EngineChoice(spec=spec, settings=stored["engine_settings"])


def _current_folder() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:
        raise ConfigError("the current folder no longer exists; change to another one") from None
