"""The options of `memagent eval`, and the evaluation they ask for."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from memagent.cli.shared.cluster import ClusterOptions
from memagent.cli.shared.engine import EngineOptions
from memagent.cli.shared.run_options import LimitOptions, RunOptions
from memagent.config import AgentConfig
from memagent.data.choices import named_sources
from memagent.data.tasks.lengths import parse_length
from memagent.errors import ConfigError
from memagent.eval.setup import EvalRequest, make_request, stored_request
from memagent.eval.suites import Suite, parse_suite, read_suite
from memagent.plugins import code_file, is_file_spec


@dataclass(frozen=True, slots=True, kw_only=True)
class SuiteOptions:
    """What is asked, and how."""

    suite: Path | None
    tasks: tuple[str, ...]
    files: tuple[Path, ...]
    lengths: str | None
    docs: str | None
    num: int | None
    samples: int | None
    seed: int | None
    sources: tuple[str, ...]
    length_tokenizer: str | None
    methods: tuple[str, ...]
    graders: tuple[str, ...]
    changes: tuple[str, ...]
    tokenizer: str | None
    agent: Annotated[dict[str, Any], AgentConfig]


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalOptions:
    """All options of the command."""

    asked: SuiteOptions
    engine: EngineOptions
    run: RunOptions
    limits: LimitOptions
    cluster: ClusterOptions
    processes: int | None
    dry_run: bool
    as_json: bool
    quiet: bool


def request_of(options: EvalOptions) -> EvalRequest:
    """The evaluation that is asked for; options that are not given are those of a resumed run."""
    resume, asked = options.run.resume, options.asked
    named = [change.partition("=")[0].strip() for change in asked.changes]
    named += [f"sources.{name}" for name in named_sources(asked.sources)]
    named += ["tasks"] * bool(asked.tasks or asked.files)
    resumed = stored_request(resume, methods=asked.methods, named=named) if resume else None
    path = asked.suite
    return make_request(
        _suite(options.asked, resumed),
        options.engine.engine,
        engine_settings=options.engine.settings.all,
        resumed=resumed,
        suite_name=path.stem if path else None,
        max_calls=options.limits.max_calls,
        max_cost=options.limits.max_cost,
        price_in=options.limits.prices.price_in,
        price_out=options.limits.prices.price_out,
    )


def _suite(options: SuiteOptions, resumed: EvalRequest | None) -> Suite:
    if resumed is not None:
        if options.suite is not None:
            raise ConfigError("a run that is resumed has its suite; leave the file out")
        stored = resumed.suite.model_dump(mode="json")
        if {_absolute(name) for name in options.methods} <= {
            _absolute(m.name) for m in resumed.suite.methods
        }:
            options = replace(options, methods=())  # named again: they keep labels and settings
        return _with_options(parse_suite(stored, changes=options.changes), options)
    if options.suite is not None:
        return _with_options(read_suite(options.suite, changes=options.changes), options)
    if not options.tasks and not options.files:
        raise ConfigError(
            "name what to evaluate: a suite such as smoke, --task NAME, or --file FILE"
        )
    suite = parse_suite({"tasks": _task_values(options)}, changes=options.changes)
    return _with_options(suite, options, has_tasks=True)


def _with_options(suite: Suite, options: SuiteOptions, *, has_tasks: bool = False) -> Suite:
    """The suite, overridden by the options."""
    values = suite.model_dump()
    if (options.tasks or options.files) and not has_tasks:
        values["tasks"] = _task_values(options)
    elif options.lengths or options.docs:
        values["tasks"] = _with_lengths(values["tasks"], options)
    if options.methods:
        values["methods"] = [{"name": name} for name in options.methods]
    if options.num is not None:
        values["num"] = options.num
        for task in values["tasks"]:
            task["num"] = options.num
    if options.graders:
        values["grader"], *values["graders"] = options.graders
    for name in ("samples", "seed", "tokenizer", "length_tokenizer"):
        value = getattr(options, name)
        if value is not None:
            values[name] = value
    values["agent"] |= {name: value for name, value in options.agent.items() if name != "seed"}
    values["sources"] |= named_sources(options.sources)
    return Suite.parse(values)


def _absolute(method: str) -> str:
    file, colon, function = method.partition(":")
    return f"{code_file(file)}{colon}{function}" if is_file_spec(method) else method


def _task_values(options: SuiteOptions) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    if options.tasks:
        found += _with_lengths([{"tasks": list(options.tasks)}], options)
    if options.files:
        found.append({"files": [str(file) for file in options.files]})
    return found


def _with_lengths(tasks: Sequence[dict[str, Any]], options: SuiteOptions) -> list[dict[str, Any]]:
    """Tasks with the lengths of the options alone, if there are any; files keep theirs.

    A length stays with the entries of a task that list it; one that none of them lists goes to the first.
    """
    wanted = {
        "tokens": [_tokens(part) for part in options.lengths.split(",")] if options.lengths else [],
        "docs": [_number(part) for part in options.docs.split(",")] if options.docs else [],
    }
    if not any(wanted.values()):
        return [*tasks]
    listed: dict[str, set[tuple[str, int]]] = defaultdict(set)
    for task in tasks:
        listed[_variant(task)] |= _lengths_of(task)
    seen, found = set(), []
    for task in tasks:
        variant, own = _variant(task), _lengths_of(task)
        kept = {
            name: [
                length
                for length in lengths
                if (place := (name, length)) in own
                or (place not in listed[variant] and variant not in seen)
            ]
            for name, lengths in wanted.items()
        }
        seen.add(variant)
        if task.get("files"):
            found.append(task)
        elif any(kept.values()):
            found.append({**task, **{name: lengths or None for name, lengths in kept.items()}})
    return found


def _variant(task: dict[str, Any]) -> str:
    """What is the same for the entries of a suite that differ by length and number alone."""
    return json.dumps([task.get("tasks"), task.get("settings")], sort_keys=True, default=str)


def _lengths_of(task: dict[str, Any]) -> set[tuple[str, int]]:
    return {
        (name, parse_length(length))
        for name in ("tokens", "docs")
        for length in task.get(name) or ()
    }


def _tokens(text: str) -> int:
    try:
        return parse_length(text)
    except ValueError as error:
        raise ConfigError(f"--lengths: {error}") from None


def _number(text: str) -> int:
    if not text.strip().isdigit():
        raise ConfigError(f"--docs {text}: numbers of documents, separated by commas")
    return int(text)
