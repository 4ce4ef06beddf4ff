"""Paths in a config: relative ones are looked up in its own folder first, then in the working folder.

    # experiments/my_run.toml
    [agent]
    name = "my_agent.py:agent"         # experiments/my_agent.py, if it is there

Found files get their absolute path, so that the stored config of a run means the same everywhere.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from memagent.agent.prompts import PROMPT_SETS
from memagent.data.choices import SOURCE_SETTINGS
from memagent.engines import store
from memagent.plugins import is_file_spec

_source_settings = "|".join(sorted(SOURCE_SETTINGS))
_PATHS = re.compile(
    rf"""model\.(source|adapter)
    | agent\.settings\.prompts
    | sources\..+
    | warm_start\.files\.\*
    | (warm_start\.|validation\.)?tasks\.\*\.(files\.\*|settings\.({_source_settings}))""",
    re.VERBOSE,
)
_CODE = re.compile(r"agent\.(name|reward)|warm_start\.replies|validation\.graders\.\*")


def located(values: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The values of a config with absolute paths where files lie in its folder."""
    return {name: _located(value, folder, name) for name, value in values.items()}


def is_path(setting: str) -> bool:
    """Whether a setting such as `tasks.0.files.1` may name a file or a folder."""
    return _PATHS.fullmatch(re.sub(r"\.\d+(?=\.|$)", ".*", setting)) is not None


def _located(value: Any, folder: Path, setting: str) -> Any:
    if isinstance(value, dict):
        return {key: _located(one, folder, f"{setting}.{key}") for key, one in value.items()}
    if isinstance(value, list):
        return [_located(one, folder, f"{setting}.*") for one in value]
    if not isinstance(value, str) or value in store.KNOWN or value in PROMPT_SETS:
        return value
    if _CODE.fullmatch(setting) and is_file_spec(value):
        path, colon, function = value.partition(":")
        return f"{_beside(path, folder)}{colon}{function}"
    return _beside(value, folder) if _PATHS.fullmatch(setting) else value


def _beside(path: str, folder: Path) -> str:
    """The absolute path of a file in the folder; another path as it is."""
    found = folder / Path(path).expanduser()
    return os.path.abspath(found) if found.exists() else path
