"""Settings in messages of the library, written as options of the running command.

    lower `chunk_tokens` or raise `window=16384`     what the library says
    lower --chunk-tokens or raise --window 16384     what `memagent ask` prints

A setting that the command has no option for loses its backticks: `lr` becomes lr. With a value and a
dotted name it becomes `--set optim.lr=2e-6` where the command has that option, and an entry of a table
such as `sources.essays=PATH` becomes `--source essays=PATH`. Backticks around anything else, such as a
command, stay.
"""

from __future__ import annotations

import re

import click

_setting = re.compile(r"`([a-z_][a-z0-9_]*(?:\.[a-z0-9_-]+)*)(?:=([^`]*))?`")

TABLE_METAVAR = "[NAME=]PATH"
"""Of options that set entries of a table."""


def with_options(message: str, command: click.Command | None = None) -> str:
    """A message with its settings as options of a command, by default the running one."""
    if command is None:
        context = click.get_current_context(silent=True)
        command = context.command if context else None
    options = _options(command) if command else {}
    return _setting.sub(lambda match: _spelled(match[1], match[2], options), message)


def _options(command: click.Command) -> dict[str, click.Option]:
    """The options of a command by the settings they set: by name, else by flag, else all that `--set` sets."""
    options = [param for param in command.params if isinstance(param, click.Option)]
    by_set = {name: one for one in options for name in getattr(one, "kinds", ())}
    by_name = {option.name: option for option in options if option.name}
    by_flag = {
        flag.lstrip("-").replace("-", "_"): option for option in options for flag in option.opts
    }
    return {**by_set, **by_name, **by_flag}


def _spelled(name: str, value: str | None, options: dict[str, click.Option]) -> str:
    option = options.get(name)
    assignment = name if value is None else f"{name}={value}"
    if option is not None and name in getattr(option, "kinds", ()):
        return f"--set {assignment}"
    if option is None:
        table, _, entry = assignment.partition(".")
        if table in options and entry and options[table].metavar == TABLE_METAVAR:
            return f"{max(options[table].opts, key=len)} {entry}"
        return f"--set {assignment}" if value and "." in name and "set" in options else assignment
    flag = max(option.opts, key=len)
    if not option.is_flag:
        return flag if value is None else f"{flag} {value}"
    is_off = value is not None and value.lower() == "false"
    return option.secondary_opts[0] if is_off and option.secondary_opts else flag
