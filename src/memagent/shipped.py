"""Configs that come with the package, by name: `tiny_cpu` is configs/train/tiny_cpu.toml.

A wheel has them in memagent/configs, a clone in its folder configs; pyproject.toml puts the one into the
other when a wheel is built.

    find_config("train", "tiny_cpu")      .../configs/train/tiny_cpu.toml
    find_config("train", "mine.toml")     mine.toml
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from memagent.errors import ConfigError
from memagent.names import hint

ConfigKind = Literal["train", "eval", "data"]
"""Which command a config is for."""
SUFFIX = ".toml"
PACKAGED = Path(__file__).resolve().parent / "configs"
"""Where an installed package has them."""
IN_CHECKOUT = Path(__file__).resolve().parents[2] / "configs"
"""Where a clone of the repository has them."""
NO_CONFIG = "prompts"
"""Files whose names start so are parts of configs."""
TITLES: dict[ConfigKind, str] = {"train": "config", "eval": "suite", "data": "recipe"}


def configs_folder() -> Path:
    """The folder of all shipped configs."""
    return PACKAGED if PACKAGED.is_dir() else IN_CHECKOUT


def config_names(kind: ConfigKind) -> list[str]:
    """Names of the shipped configs of a kind, such as `tiny_cpu` or `reader_1.5b/rl`."""
    folder = configs_folder() / kind
    paths = [path.relative_to(folder) for path in folder.rglob(f"*{SUFFIX}")]
    return sorted(
        path.as_posix().removesuffix(SUFFIX)
        for path in paths
        if not path.name.startswith(NO_CONFIG)
    )


def find_config(kind: ConfigKind, name: str | Path) -> Path:
    """The file that a path or the name of a shipped config means; a file takes precedence.

    Raises ConfigError if there is none.
    """
    path = Path(name).expanduser()
    if path.exists() and not path.is_dir():
        return path
    names = config_names(kind)
    if str(name) in names:
        return configs_folder() / kind / f"{name}{SUFFIX}"
    title = TITLES[kind]
    if path.suffix != SUFFIX:
        near = hint(str(name), names)
        raise ConfigError(f"there is no file {name}, and no {title} called so is shipped; {near}")
    same = [one for one in names if path.with_suffix("").as_posix().endswith(one)]
    shipped = f"; `{same[0]}` names the one that comes with memagent" if same else ""
    raise ConfigError(f"there is no {title} {name}{shipped}")
