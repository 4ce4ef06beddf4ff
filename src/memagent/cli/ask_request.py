"""What `memagent ask` is asked: from the command line and, on resuming, from the run's manifest."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memagent.agent.limits import Limits
from memagent.agent.reader import checked_question
from memagent.cli.shared.options import given
from memagent.cli.shared.run_options import limits_of, prices_of
from memagent.config import AgentConfig, EngineConfig, LocalConfig, Settings, VllmConfig
from memagent.engines import store
from memagent.engines.base import split_spec
from memagent.engines.openai import EndpointEngine, endpoint_from
from memagent.errors import ConfigError
from memagent.runs import read_manifest
from memagent.types import Engine, Prices

ANY_ENDPOINT = "openai:"
"""The engine where an endpoint is set and no model is given: the endpoint is asked for it."""
EMBEDDED = f"local:{store.EMBEDDED}"
"""The engine where neither an engine nor an endpoint is given."""
SETTINGS_OF: dict[str, tuple[type[Settings], ...]] = {
    "openai": (EngineConfig,),
    "local": (LocalConfig,),
    "vllm": (EngineConfig, VllmConfig),
    "scripted": (),
}
"""The settings that go with a kind of engine."""
SECRET_SETTINGS = ("api_key", "base_url")
"""Never kept as given: one is a key, the other may hold one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """Everything that one call of the command needs to know."""

    paths: tuple[str, ...]
    folder: str
    """Where relative paths start."""
    questions: tuple[str, ...]
    encoding: str | None
    engine: str
    is_embedded: bool
    """True when the engine was chosen for want of any other."""
    engine_settings: dict[str, Any]
    agent_settings: dict[str, Any]
    tokenizer: str | None
    limit_settings: dict[str, Any]

    @property
    def prices(self) -> Prices | None:
        """What the endpoint charges, if the user said so."""
        return prices_of(self.limit_settings)

    def limits(self) -> Limits:
        """The limits the user set."""
        return limits_of(self.limit_settings)

    def kept(self, engine: Engine) -> dict[str, Any]:
        """What a manifest keeps, to resume by: no key, no credentials in the address."""
        engine_settings = {
            name: value
            for name, value in self.engine_settings.items()
            if name not in SECRET_SETTINGS
        }
        if isinstance(engine, EndpointEngine) and engine.kept_address:
            engine_settings["base_url"] = engine.kept_address
        return {
            "paths": list(self.paths),
            "folder": self.folder,
            "encoding": self.encoding,
            "engine": self.engine,
            "engine_settings": engine_settings,
            "limits": self.limit_settings,
        }


def make_request(options: dict[str, Any]) -> Request:
    """What is asked with these options, checked."""
    resume: Path | None = options["resume"]
    if resume is not None and options["run_dir"] is not None:
        raise ConfigError("give --resume to go on with a run or --run-dir to begin one, not both")
    manifest = None if resume is None else read_manifest(resume)
    new = _new_request(options, manifest)
    request = new if manifest is None else _resumed(new, manifest)
    if not request.paths:
        raise ConfigError("name at least one file or folder to read, or - for standard input")
    if not request.questions:
        raise ConfigError("ask something: -q QUESTION")
    return request


def _new_request(options: dict[str, Any], manifest: Mapping[str, Any] | None) -> Request:
    """What the options say; a manifest only says which engine they go with."""
    engine, engine_settings = _engine(options, manifest)
    agent_settings = given(AgentConfig, options)
    if "prompts" in agent_settings:
        agent_settings["prompts"] = _found_anywhere(agent_settings["prompts"])
    limits = ("max_calls", "max_cost", "price_in", "price_out")
    return Request(
        paths=tuple(options["files"]),
        folder=_current_folder(),
        questions=tuple(checked_question(question) for question in options["questions"]),
        encoding=options["encoding"],
        engine=engine,
        is_embedded=manifest is None and not options["engine"] and engine == EMBEDDED,
        engine_settings=engine_settings,
        agent_settings=agent_settings,
        tokenizer=_found_anywhere(options["tokenizer"]) if options["tokenizer"] else None,
        limit_settings={name: options[name] for name in limits if options[name] is not None},
    )


def _engine(
    options: dict[str, Any], manifest: Mapping[str, Any] | None
) -> tuple[str, dict[str, Any]]:
    """The engine's name and its settings; settings of another kind of engine are refused."""
    endpoint = given(EngineConfig, options)
    model = endpoint.pop("model", "")
    if options["engine"] and model:
        raise ConfigError("give either --engine KIND:MODEL or --model, not both")
    if options["engine"] or model:
        engine = options["engine"] or f"{ANY_ENDPOINT}{model}"
    elif manifest is not None:
        engine = _stored_engine(manifest)
    else:
        engine = ANY_ENDPOINT if endpoint or any(endpoint_from(os.environ)) else EMBEDDED
    kind, name = split_spec(engine)
    settings = settings_of(kind, options, engine)
    adapter = store.shipped_adapter(name) if kind == "local" and manifest is None else None
    return engine, {"adapter": str(adapter), **settings} if adapter else settings


def settings_of(kind: str, options: dict[str, Any], engine: str) -> dict[str, Any]:
    """The options that are settings of a kind of engine; those of other kinds are refused."""
    values = {**options, "model": None}  # part of the engine's name by now
    own = {name: v for settings in SETTINGS_OF[kind] for name, v in given(settings, values).items()}
    for settings in (EngineConfig, LocalConfig, VllmConfig):
        if foreign := [name for name in given(settings, values) if name not in own]:
            names = ", ".join(f"--{name.replace('_', '-')}" for name in foreign)
            raise ConfigError(f"{names} does not go with the engine {engine!r}")
    return own


def _resumed(new: Request, manifest: Mapping[str, Any]) -> Request:
    """The stored request, with what was given anew; the run refuses what would change its trace."""
    stored = _stored_command(manifest)
    return Request(
        paths=new.paths or tuple(stored["paths"]),
        folder=new.folder if new.paths else stored["folder"],
        questions=new.questions or tuple(manifest["questions"]),
        encoding=new.encoding or stored["encoding"],
        engine=new.engine,
        is_embedded=False,
        engine_settings={**stored["engine_settings"], **new.engine_settings},
        agent_settings={**manifest["agent"], **new.agent_settings},
        tokenizer=new.tokenizer or str(manifest["tokenizer"]),
        limit_settings={**stored["limits"], **new.limit_settings},
    )


def _stored_command(manifest: Mapping[str, Any]) -> Mapping[str, Any]:
    """What the command was asked when the run began."""
    stored: Mapping[str, Any] | None = manifest.get("command")
    if stored is None:
        raise ConfigError("this run was begun from Python; continue it there with run_dir")
    return stored


def _stored_engine(manifest: Mapping[str, Any]) -> str:
    """The engine of a run, with the model it found when none was named."""
    engine = str(_stored_command(manifest)["engine"])
    return f"{engine}{manifest['model']}" if engine == ANY_ENDPOINT else engine


def _found_anywhere(name: str) -> str:
    """A name, or a path in its absolute form, so that resuming finds it from any folder."""
    path = Path(name).expanduser()
    return str(path.resolve()) if path.exists() and name not in ("bytes", "estimate") else name


def _current_folder() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:
        raise ConfigError("the current folder no longer exists; change to another one") from None
