"""The config of a run on disk: what is stored, and what may change when the run is resumed.

    stored = stored_values(config)                               into the manifest of a run
    resumed = resumed_config(stored, changes=["steps=200"])

The stored config is data: code, endpoints and files that it names are used only if the user named them before on this
machine, or names them again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from memagent import trust
from memagent.cluster import LOCAL_CLUSTER
from memagent.config import with_override
from memagent.engines.addresses import origins
from memagent.engines.base import CODE_SETTINGS, check_stored
from memagent.errors import ConfigError
from memagent.plugins import code_file, is_file_spec
from memagent.rl.agents.command import is_command
from memagent.rl.settings import TrainConfig, is_path, parse_config
from memagent.trust import paths_in

MAY_CHANGE = ("steps", "sources", "checkpoint", "logging", "validation", "update.max_tokens",
              "update.checkpointing", "update.compiled", "rollout.concurrency", "rollout.seconds",
              "rollout.engine_settings", "cluster")  # fmt: skip
"""Settings that may change when a run is resumed."""
CODE_NAMES = ("agent.name", "agent.reward", "warm_start.replies")
"""Settings that may be given again, unchanged, as those of files may: they may name code."""
GRADERS = "validation.graders"


def resumed_config(values: Mapping[str, Any], *, changes: Sequence[str] = ()) -> TrainConfig:
    """The config of a run that is resumed. Only settings in `MAY_CHANGE` can be changed.

    Code and endpoints may be named again in `changes`.
    """
    made, named = [], []
    for change in changes:
        name, _, value = (part.strip() for part in change.partition("="))
        named.append(name)
        if name in CODE_NAMES and _is_same_code(value, values, name):
            continue
        if is_path(name) and with_override(dict(values), change) == values:
            continue
        if not any(name == one or name.startswith(f"{one}.") for one in MAY_CHANGE):
            raise ConfigError(
                f"`{name}` cannot change when a run is resumed; start a new run with it (may change: "
                f"{', '.join(MAY_CHANGE)})"
            )
        made.append(change)
    preset = values.get(
        "preset"
    )  # applied when the run was started; its values may be others today
    config = parse_config({**values, "preset": None}, changes=made)
    config = config.model_copy(update={"preset": preset})
    _check_trust(config, named)
    return config


def remember_named(config: TrainConfig) -> None:
    """Record the code and the endpoints of a config as named by the user, see `memagent.trust`."""
    settings = config.rollout.engine_settings
    engine_code = [str(settings[name]) for name in CODE_SETTINGS if settings.get(name) is not None]
    trust.remember("code", *(_trusted_name(spec) for _, spec in _code(config)), *engine_code)
    files = paths_in(config.model_dump(mode="json"), is_path)
    trust.remember("file", *(path for _, path in files))
    if settings.get("base_url") is not None:
        trust.remember("address", *origins(str(settings["base_url"])))
    if config.cluster is not None and config.cluster.address != LOCAL_CLUSTER:
        trust.remember("address", config.cluster.address)


def stored_values(config: TrainConfig) -> dict[str, Any]:
    """The config as a run keeps it: without the key of an endpoint."""
    values = config.model_dump(mode="json")
    values["rollout"]["engine_settings"].pop("api_key", None)
    return values


def _check_trust(config: TrainConfig, named: Sequence[str]) -> None:
    """Raise ConfigError for code or an endpoint of a stored config that the user has not named."""

    def is_named(setting: str) -> bool:
        return any(setting == one or setting.startswith(f"{one}.") for one in named)

    for setting, spec in _code(config):
        if not is_named(setting):
            again = f"{setting}={[spec] if setting == GRADERS else spec}"
            name, what = _trusted_name(spec), f"the code {spec}"
            trust.require("code", name, what=what, may="it may run", again=again)
    cluster = config.cluster.address if config.cluster is not None else LOCAL_CLUSTER
    if cluster != LOCAL_CLUSTER and not is_named("cluster.address"):
        what, again = f"the cluster {cluster}", f"cluster.address={cluster}"
        trust.require("address", cluster, what=what, may="it may be used", again=again)
    stored, prefix = config.rollout.engine_settings, "rollout.engine_settings."
    given = {name: value for name, value in stored.items() if is_named(f"{prefix}{name}")}
    check_stored(stored, given, prefix=prefix)
    files = paths_in(config.model_dump(mode="json"), is_path)
    trust.require_files((setting, path) for setting, path in files if not is_named(setting))


def _code(config: TrainConfig) -> list[tuple[str, str]]:
    """Settings that name functions in files or programs, each with such a name."""
    graders = config.validation.graders if config.validation else ()
    found = [("agent.name", config.agent.name), ("agent.reward", config.agent.reward)]
    found += [(GRADERS, grader) for grader in graders]
    if config.warm_start is not None and config.warm_start.replies is not None:
        found.append(("warm_start.replies", config.warm_start.replies))
    return [(setting, spec) for setting, spec in found if is_file_spec(spec) or is_command(spec)]


def _trusted_name(spec: str) -> str:
    """What is remembered of code that the user named: the file, or the whole command."""
    return spec if is_command(spec) else code_file(spec)


def _is_same_code(given: str, values: Mapping[str, Any], name: str) -> bool:
    """Whether a change names the function that the stored config has already."""
    table, _, key = name.partition(".")
    given, stored = given.strip("\"'"), str((values.get(table) or {}).get(key))
    if not (is_file_spec(given) and is_file_spec(stored)):
        return given == stored
    is_same = given.partition(":")[2] == stored.partition(":")[2]
    return is_same and code_file(given) == code_file(stored)
