"""Profiles: settings under a name, in a file of the user's, so that they need not be given each time.

    # config.toml in the config folder of memagent, such as ~/.config/memagent
    [profiles.work]
    base_url = "http://gpu.lan:8000/v1"
    model = "Qwen/Qwen2.5-7B-Instruct"
    api_key_env = "WORK_KEY"
    mode = "parallel"

    profile = load_profile("work")
    reader = Reader(open_engine(**profile.engine()), **profile.reading())

A profile counts only where it is named: a file alone sends no text away. It holds no key, but the name of the
environment variable that has it, and that key goes only to the address of the profile.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from platformdirs import user_config_path
from pydantic import Field, SecretStr, model_validator

from memagent.config import AgentConfig, EngineConfig, FileRecord, LocalConfig, Settings, VllmConfig
from memagent.errors import ConfigError
from memagent.names import hint

FILE = "config.toml"
VARIABLE = "MEMAGENT_PROFILE"
"""Names a profile where no option does."""
ENGINE_CLASSES: tuple[type[Settings], ...] = (EngineConfig, LocalConfig, VllmConfig)
ENGINE_KEYS = {"engine", *(name for group in ENGINE_CLASSES for name in group.model_fields)} - {
    "api_key"
}
READING_KEYS = {"tokenizer", *AgentConfig.model_fields}
OWN_KEYS = {"api_key_env"}


class Profile(FileRecord):
    """Settings of an engine and of reading, under a name."""

    name: str
    values: dict[str, Any] = Field(default_factory=dict)
    """As the file has them: `engine`, settings of engines and of reading, `tokenizer`, `api_key_env`."""

    @model_validator(mode="after")
    def _known(self) -> Self:
        known = ENGINE_KEYS | READING_KEYS | OWN_KEYS
        for key in self.values:
            if key == "api_key":
                raise ValueError(
                    "a profile holds no key; set `api_key_env` to the environment variable that has it"
                )
            if key not in known:
                raise ValueError(f"unknown setting {key}; {hint(key, sorted(known))}")
        if "engine" in self.values and "model" in self.values:
            raise ValueError("give either `engine` or `model`, not both")
        groups: tuple[type[Settings], ...] = (*ENGINE_CLASSES, AgentConfig)
        for group in groups:
            group.parse({key: self.values[key] for key in group.model_fields if key in self.values})
        return self

    def engine(self) -> dict[str, Any]:
        """What `open_engine` takes: the engine, its settings, and its key from the environment."""
        found = {key: value for key, value in self.values.items() if key in ENGINE_KEYS}
        key = self.key_for(found.get("base_url"))
        return found if key is None else {**found, "api_key": key}

    def reading(self) -> dict[str, Any]:
        """Settings of reading, as `Reader` takes them."""
        return {key: value for key, value in self.values.items() if key in READING_KEYS}

    def key_for(self, base_url: str | None) -> SecretStr | None:
        """The profile's key, if calls go to the profile's own address. Raises ConfigError if it is not set."""
        variable = self.values.get("api_key_env")
        if variable is None or base_url != self.values.get("base_url"):
            return None
        key = os.environ.get(str(variable))
        if not key:
            raise ConfigError(
                f"the profile {self.name} takes its key from {variable}, which is not set"
            )
        return SecretStr(key)


def config_file() -> Path:
    """Where profiles are looked for."""
    return user_config_path("memagent", appauthor=False) / FILE


def load_profile(name: str, path: Path | None = None) -> Profile:
    """A profile by its name. Raises ConfigError where there is none, or where it is wrong."""
    path = path or config_file()
    if not path.exists():
        raise ConfigError(
            f"there is no file of profiles {path}; create it with a table [profiles.{name}]"
        )
    profiles = _tables(path)
    if name not in profiles:
        raise ConfigError(f"there is no profile {name!r} in {path}; {hint(name, sorted(profiles))}")
    try:
        return Profile.parse({"name": name, "values": profiles[name]})
    except ConfigError as error:
        raise ConfigError(f"{path}, profile {name}: {error}") from None


def list_profiles(path: Path | None = None) -> list[str]:
    """The names of the profiles; none where there is no file."""
    path = path or config_file()
    return sorted(_tables(path)) if path.exists() else []


def with_profile(profile: Profile, given: Mapping[str, Any]) -> dict[str, Any]:
    """Settings by name, those of a profile where none was given; None counts as not given.

    An engine that was given replaces that of the profile with all its settings.
    """
    merged = dict(given)
    chosen = {name for name, value in given.items() if value is not None}
    names_engine = bool(chosen & {"engine", "model"})
    for key, value in profile.values.items():
        is_engine = key in ENGINE_KEYS
        if key in merged and merged[key] is None and not (is_engine and names_engine):
            merged[key] = value
    if "api_key" in merged and merged["api_key"] is None and not names_engine:
        merged["api_key"] = profile.key_for(merged.get("base_url"))
    return merged


def _tables(path: Path) -> dict[str, dict[str, Any]]:
    file = ProfileFile.read(path, "file of profiles")
    return file.profiles


class ProfileFile(FileRecord):
    """The file of profiles."""

    profiles: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Settings by the name of the profile."""
