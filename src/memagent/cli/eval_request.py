"""What `memagent eval` is asked: from a suite, the command line and, on resuming, the run's manifest."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memagent.agent.limits import Limits
from memagent.cli.ask_request import (
    ANY_ENDPOINT,
    EMBEDDED,
    SECRET_SETTINGS,
    SETTINGS_OF,
    settings_of,
)
from memagent.cli.shared.options import given
from memagent.cli.shared.run_options import limits_of, prices_of
from memagent.config import AgentConfig, EngineConfig
from memagent.data.choices import named_sources
from memagent.engines import store
from memagent.engines.base import BaseEngine, split_spec
from memagent.engines.openai import EndpointEngine, endpoint_from
from memagent.errors import ConfigError
from memagent.eval.methods import MethodSettings, is_prompt_set, open_method
from memagent.eval.records import KIND
from memagent.eval.suites import MethodChoice, Suite, TaskChoice, parse_suite, read_suite
from memagent.runs import read_manifest
from memagent.types import Prices

LIMITS = ("max_calls", "max_cost", "price_in", "price_out")
STRETCHED = ("local", "vllm")
"""Kinds of engines that are opened with YaRN settings for the method yarn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalRequest:
    """Everything that one call of the command needs to know."""

    suite: Suite
    """With absolute paths, so that resuming finds everything from any folder."""
    suite_name: str | None
    engine: str
    is_embedded: bool
    """True when the engine was chosen for want of any other."""
    engine_settings: dict[str, Any]
    concurrency: int | None
    """Calls under way at once; None leaves it to the engine."""
    limit_settings: dict[str, Any]

    @property
    def prices(self) -> Prices | None:
        """What the endpoint charges, if the user said so."""
        return prices_of(self.limit_settings)

    def limits(self) -> Limits:
        """The limits the user set."""
        return limits_of(self.limit_settings)

    def settings_of(self, method: MethodChoice) -> dict[str, Any]:
        """The settings of the engine that answers a method."""
        kind, _ = split_spec(self.engine)
        own = dict(method.engine_settings)
        if method.name == "yarn" and kind in STRETCHED and "yarn_window" not in own:
            factor = method.settings.get("yarn_factor") or self.suite.agent.get("yarn_factor")
            own.setdefault("yarn_factor", factor or MethodSettings().yarn_factor)
        return {**self.engine_settings, **own}

    def public_settings(self, engine: BaseEngine) -> dict[str, Any]:
        """Settings of the engine that may be kept: no key, no credentials in an address."""
        settings = {n: v for n, v in self.engine_settings.items() if n not in SECRET_SETTINGS}
        if isinstance(engine, EndpointEngine) and engine.kept_address:
            settings["base_url"] = engine.kept_address
        return settings

    def kept(self, engine: BaseEngine) -> dict[str, Any]:
        """What a manifest keeps, to resume by."""
        spec = f"{self.engine}{engine.model}" if self.engine == ANY_ENDPOINT else self.engine
        return {
            "suite": self.suite.model_dump(mode="json"),
            "suite_name": self.suite_name,
            "engine": spec,
            "engine_settings": self.public_settings(engine),
            "concurrency": self.concurrency,
            "limits": self.limit_settings,
        }


def make_request(options: dict[str, Any]) -> EvalRequest:
    """What is asked with these options, checked; on resuming, the rest is as it was."""
    resume: Path | None = options["resume"]
    if resume is not None and options["run_dir"] is not None:
        raise ConfigError("give --resume to go on with a run or --run-dir to begin one, not both")
    stored = _stored(resume) if resume else {}
    suite = _suite(options, stored)
    engine, is_embedded = _engine(options, stored, suite)
    settings = _engine_settings(options, stored, suite, engine)
    concurrency = settings.pop("concurrency", None) or stored.get("concurrency")
    if concurrency is not None and EngineConfig in SETTINGS_OF[split_spec(engine)[0]]:
        settings["concurrency"] = concurrency
    limits = {name: options[name] for name in LIMITS if options[name] is not None}
    for method in suite.methods:
        open_method(method.name)
        _check_prompts(method)
    request = EvalRequest(
        suite=suite,
        suite_name=options["suite"].stem if options["suite"] else stored.get("suite_name"),
        engine=engine,
        is_embedded=is_embedded,
        engine_settings=settings,
        concurrency=concurrency,
        limit_settings={**stored.get("limits", {}), **limits},
    )
    _check_engines(request)
    return request


# --- the suite ------------------------------------------------------------------------------------


def _suite(options: dict[str, Any], stored: dict[str, Any]) -> Suite:
    changes = list(options["changes"])
    if stored:
        if options["suite"] is not None:
            raise ConfigError("a run that is resumed has its suite; leave the file out")
        return _with_options(parse_suite(stored["suite"], changes=changes), options)
    if options["suite"] is not None:
        return _with_options(read_suite(options["suite"], changes=changes), options)
    if not options["tasks"] and not options["files"]:
        raise ConfigError(
            "say what to evaluate: a suite such as smoke.toml, --task NAME, or --file F"
        )
    suite = parse_suite({"tasks": _task_values(options)}, changes=changes)
    return _with_options(suite, {**options, "tasks": (), "files": ()})


def _with_options(suite: Suite, options: dict[str, Any]) -> Suite:
    """The suite with what the command line says in its place, and its paths made absolute."""
    values = suite.model_dump()
    if options["tasks"] or options["files"]:
        values["tasks"] = _task_values(options)
    elif options["lengths"] or options["docs"]:
        values["tasks"] = [_with_lengths(task, options) for task in values["tasks"]]
    if options["methods"]:
        values["methods"] = [{"name": name} for name in options["methods"]]
    if options["num"] is not None:
        values["num"] = options["num"]
        for task in values["tasks"]:
            task["num"] = options["num"]
    for name in ("seed", "grader", "tokenizer", "length_tokenizer"):
        if options[name] is not None:
            values[name] = options[name]
    values["agent"] |= {n: v for n, v in given(AgentConfig, options).items() if n != "seed"}
    values["sources"] |= named_sources(options["sources"])
    return _absolute(Suite.parse(values))


def _task_values(options: dict[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    if options["tasks"]:
        found.append(_with_lengths({"tasks": list(options["tasks"])}, options))
    if options["files"]:
        found.append({"files": [str(file) for file in options["files"]]})
    return found


def _with_lengths(task: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """Lengths of the command line in place of a task's own; files have theirs."""
    if task.get("files"):
        return task
    lengths = {
        "tokens": options["lengths"] and options["lengths"].split(","),
        "docs": options["docs"] and [_number(part) for part in options["docs"].split(",")],
    }
    chosen = {name: value for name, value in lengths.items() if value}
    return {**task, **({"tokens": None, "docs": None} if chosen else {}), **chosen}


def _number(text: str) -> int:
    if not text.strip().isdigit():
        raise ConfigError(f"--docs {text}: numbers of documents, separated by commas")
    return int(text)


def _absolute(suite: Suite) -> Suite:
    return suite.model_copy(
        update={
            "tasks": [_absolute_task(task) for task in suite.tasks],
            "methods": [_absolute_method(method) for method in suite.methods],
            "sources": {name: _anywhere(path) for name, path in suite.sources.items()},
            "tokenizer": suite.tokenizer and _anywhere(suite.tokenizer),
            "agent": _with_absolute_prompts(suite.agent),
        }
    )


def _absolute_task(task: TaskChoice) -> TaskChoice:
    files = [str(Path(file).expanduser().resolve()) for file in task.files]
    return task.model_copy(update={"files": files})


def _absolute_method(method: MethodChoice) -> MethodChoice:
    base, colon, function = method.name.rpartition(":")
    name = f"{_anywhere(base)}:{function}" if colon and base.endswith(".py") else method.name
    settings = _with_absolute_prompts(method.settings)
    return method.model_copy(update={"name": name, "label": method.title, "settings": settings})


def _with_absolute_prompts(settings: dict[str, Any]) -> dict[str, Any]:
    prompts = settings.get("prompts")
    return {**settings, "prompts": _anywhere(prompts)} if isinstance(prompts, str) else settings


def _anywhere(name: str) -> str:
    """A name, or a path in its absolute form."""
    path = Path(name).expanduser()
    return str(path.resolve()) if path.exists() and name not in ("bytes", "estimate") else name


def _check_prompts(method: MethodChoice) -> None:
    kind, _, prompt_set = method.name.partition(":")
    if kind == "reader" and prompt_set and not is_prompt_set(prompt_set):
        raise ConfigError(f"method {method.name}: there is no prompt set or file {prompt_set!r}")


# --- the engine -----------------------------------------------------------------------------------


def _engine(options: dict[str, Any], stored: dict[str, Any], suite: Suite) -> tuple[str, bool]:
    """The engine's name, and whether it was chosen for want of any other."""
    if options["engine"] and options["model"]:
        raise ConfigError("give either --engine KIND:MODEL or --model, not both")
    if options["engine"] or options["model"]:
        return options["engine"] or f"{ANY_ENDPOINT}{options['model']}", False
    if stored:
        return str(stored["engine"]), False
    has_endpoint = options["base_url"] or any(endpoint_from(os.environ))
    if suite.engine is not None and not options["base_url"]:
        return suite.engine, False
    return (ANY_ENDPOINT, False) if has_endpoint else (EMBEDDED, True)


def _engine_settings(
    options: dict[str, Any], stored: dict[str, Any], suite: Suite, engine: str
) -> dict[str, Any]:
    """The settings of the engine; those of another kind of engine are refused."""
    kind, name = split_spec(engine)
    new = settings_of(kind, {**options, "concurrency": None}, engine)
    if options["concurrency"] is not None:  # how many calls at once: for engines of every kind
        new["concurrency"] = options["concurrency"]
    base = stored["engine_settings"] if stored else suite.engine_settings
    if not stored and suite.engine is not None and split_spec(suite.engine)[0] != kind:
        base = {n: value for n, value in base.items() if n == "concurrency"}
    adapter = store.shipped_adapter(name) if kind == "local" and not stored else None
    ours: dict[str, Any] = {"adapter": str(adapter)} if adapter else {}
    if kind == "vllm":
        ours["token_ids"] = False  # only training needs them, and they make replies long
    return {**ours, **base, **new}


def _check_engines(request: EvalRequest) -> None:
    """Two vLLM servers do not fit the same GPUs; local models and endpoints may be opened twice."""
    methods = request.suite.methods
    other = next(
        (m for m in methods if request.settings_of(m) != request.settings_of(methods[0])), None
    )
    if other is not None and split_spec(request.engine)[0] == "vllm":
        raise ConfigError(
            f"{methods[0].title} and {other.title} need vLLM with different settings; evaluate them in "
            "runs of their own"
        )


def _stored(run: Path) -> dict[str, Any]:
    manifest = read_manifest(run)
    if manifest.get("kind") != KIND or "command" not in manifest:
        raise ConfigError(f"{run} is not a run of `memagent eval`")
    stored: dict[str, Any] = manifest["command"]
    return stored
