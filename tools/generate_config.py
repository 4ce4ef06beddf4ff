"""Write docs/config.md from the settings classes, so that the page and the code cannot differ.

python tools/generate_config.py
"""

from __future__ import annotations

import json
import types
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt, MaxLen, MinLen
from pydantic import SecretStr
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from memagent.config import Settings

PAGE = Path(__file__).resolve().parents[1] / "docs" / "config.md"
HEAD = """\
# Config keys

Every setting with its type, its default and its limits. This page is written by `tools/generate_config.py` from the
settings classes. Change the string under a field, then run `make docs`.

Settings of reading and of engines are options of the commands (`chunk_tokens` is `--chunk-tokens`) and keyword
arguments in Python. Suites, recipes and training configs are TOML files; `--set KEY=VALUE` changes a key from the
command line, with dots for tables: `--set optim.lr=2e-6`. An unknown key is an error, and so is a number that nobody can
mean: NaN, infinity, more than 1,000,000,000.

A suite, a recipe or a config is a program of its author: it can name code, which is run, programs, which are started,
and addresses, which get the texts. Read one of a stranger before you run it. An address that a suite or config names gets
only a key that was set for this address ([which key goes where](reading.md#endpoints)).
"""
PARTS: tuple[tuple[str, str, str], ...] = (
    (
        "Reading",
        "memagent.config:AgentConfig",
        "`memagent ask`, `[agent]` of a suite, `Reader(...)`",
    ),
    ("Endpoints", "memagent.config:EngineConfig", "`openai:MODEL`, `open_engine(...)`"),
    ("Local models", "memagent.config:LocalConfig", "`local:MODEL`, `open_engine(...)`"),
    ("vLLM", "memagent.config:VllmConfig", "`vllm:MODEL`, `open_engine(...)`"),
    ("Server", "memagent.config:ServeConfig", "`memagent serve`"),
    ("Gateway", "memagent.config:GatewayConfig", "`memagent serve --reader`"),
    ("Dataset recipes", "memagent.data.recipes:Recipe", "`memagent data build RECIPE.toml`"),
    ("Evaluation suites", "memagent.eval.suites:Suite", "`memagent eval SUITE.toml`"),
    ("Training", "memagent.rl.settings:TrainConfig", "`memagent train CONFIG.toml`"),
)
"""Title, class and where it is used."""

LIMITS = {
    Ge: ("ge", "at least"),
    Gt: ("gt", "more than"),
    Le: ("le", "at most"),
    Lt: ("lt", "less than"),
}


def config_page() -> str:
    """The page: a part for each settings class, with the tables inside it below."""
    parts = [_part(title, _class(where), used) for title, where, used in PARTS]
    return "\n".join([HEAD, *parts])


def _class(where: str) -> type[Settings]:
    module, name = where.split(":")
    found: type[Settings] = getattr(import_module(module), name)
    return found


def _part(title: str, settings: type[Settings], used: str) -> str:
    homes = dict(_homes(settings, path=""))
    tables = "\n".join(_table(kind, path, homes) for kind, path in homes.items())
    return f"## {title}\n\n{_sentence(settings.__doc__)} Used by {used}.\n\n{tables}"


def _homes(settings: type[Settings], *, path: str) -> Iterator[tuple[type[Settings], str]]:
    """The class and those of the tables inside it, each with its header as TOML has it."""
    homes = {settings: path}
    for name, field in settings.model_fields.items():
        if inner := _inner(field.annotation):
            for kind, where in _homes(inner, path=_header(name, field, path)):
                homes.setdefault(kind, where)
    yield from homes.items()


def _table(settings: type[Settings], path: str, homes: dict[type[Settings], str]) -> str:
    head = f"### `{path}`\n\n{_sentence(settings.__doc__)}\n\n" if path else ""
    rows = [_row(name, field, path, homes) for name, field in settings.model_fields.items()]
    lines = ["| key | type | default | meaning |", "| --- | --- | --- | --- |", *rows, ""]
    return head + "\n".join(lines)


def _header(name: str, field: FieldInfo, path: str) -> str:
    """The header of a table in TOML: `[model.scratch]`, or `[[tasks]]` for one of a list."""
    full = ".".join([*filter(None, [path.strip("[]")]), name])
    return f"[[{full}]]" if get_origin(field.annotation) is list else f"[{full}]"


def _row(name: str, field: FieldInfo, path: str, homes: dict[type[Settings], str]) -> str:
    inner, header = _inner(field.annotation), _header(name, field, path)
    kind = f"table `{header}`" if inner else _type(field.annotation)
    if inner and homes[inner] != header:
        kind = f"{kind}, keys as in `{homes[inner]}`"
    limits = ", ".join(_limits(field))
    meaning = " ".join((field.description or "").split())
    if inner and not meaning:
        meaning = _sentence(inner.__doc__)
    cells = [f"`{name}`", f"{kind}; {limits}" if limits else kind, _default(field), meaning]
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def _inner(annotation: Any) -> type[Settings] | None:
    """The settings class of a table, of an optional table, or of a list of tables."""
    for kind in (annotation, *get_args(annotation)):
        if isinstance(kind, type) and issubclass(kind, Settings):
            return kind
    return None


NAMES = {
    int: "integer",
    float: "number",
    str: "text",
    bool: "true or false",
    SecretStr: "text",
    Any: "any",
}


def _type(annotation: Any) -> str:
    """A type in words."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _type(arguments[0])
    if origin in (Union, types.UnionType):
        return " or ".join(
            dict.fromkeys(_type(kind) for kind in arguments if kind is not type(None))
        )
    if origin is Literal:
        return ", ".join(f"`{choice}`" for choice in arguments)
    if origin in (list, tuple):
        return f"list of {_type(arguments[0])}"
    if origin is dict:
        return "table"
    return NAMES.get(annotation, getattr(annotation, "__name__", str(annotation)))


def _limits(field: FieldInfo) -> Iterator[str]:
    for limit in field.metadata:
        if isinstance(limit, MinLen):
            yield "not empty" if limit.min_length == 1 else f"{limit.min_length} or more"
        elif isinstance(limit, MaxLen):
            yield f"{limit.max_length} at most"
        elif type(limit) in LIMITS:
            attribute, words = LIMITS[type(limit)]
            yield f"{words} {getattr(limit, attribute):,}"


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    default = field.get_default(call_default_factory=True)
    if default is None or default is PydanticUndefined or isinstance(default, Settings):
        return ""
    if isinstance(default, (list, tuple)) and any(isinstance(one, Settings) for one in default):
        return ", ".join(f"`{one.model_dump(exclude_defaults=True)}`" for one in default)
    return f"`{json.dumps(default)}`"


def _sentence(docstring: str | None) -> str:
    """The first sentence or two of a docstring, on one line."""
    return " ".join((docstring or "").strip().partition("\n\n")[0].split())


if __name__ == "__main__":
    PAGE.write_text(config_page(), encoding="utf-8")
