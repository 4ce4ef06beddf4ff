"""Groups of commands that are imported when they are called, so that `--help` is quick."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from types import MappingProxyType
from typing import Any

import click

from memagent.names import nearest

NUMBERS = (click.types.IntParamType, click.types.FloatParamType)


def _sensible(ctx: click.Context, param: click.Parameter, value: Any) -> Any:
    """What was given for an option or argument; numbers that nobody can mean are refused."""
    from memagent.config import sensible_number  # takes its time

    try:
        return sensible_number(value)
    except ValueError as error:
        raise click.BadParameter(f"{value} {error}", ctx, param) from None


class HintingGroup(click.Group):
    """A group that suggests a command for a misspelt one, and refuses NaN and its like for all of them."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        command = self.get_command(ctx, name)
        for param in command.params if command is not None else ():
            if isinstance(param.type, NUMBERS):
                param.callback = _sensible
        if not ctx.resilient_parsing and command is None:
            near = nearest(name, self.list_commands(ctx))
            if near is not None:
                ctx.fail(f"No such command {name!r} (did you mean {near}?)")
        return super().resolve_command(ctx, args)


class LazyGroup(HintingGroup):
    """A group that knows its commands by name and one line of help, until one of them is called.

    With a `default`, arguments that begin with no command are those of that command, and the help is that
    command's with the other commands after it. Where the context's `obj` is a list, the command that is called
    is appended to it.
    """

    def __init__(
        self,
        package: str,
        about: str,
        commands: Mapping[str, str],
        *,
        default: str | None = None,
        places: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """`commands`: each with one line of help. The module of its name in `package` has it as `command`.

        `places`: MODULE:NAME in place of that, for commands that live with others.
        """
        super().__init__(help=about, context_settings={"help_option_names": ["-h", "--help"]})
        self.default = default
        self._package = package
        self._lazy = commands
        self._places = places

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if self.default and args and args[0] not in (*self._lazy, *ctx.help_option_names):
            args = [self.default, *args]
        return super().parse_args(ctx, args)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self._lazy)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self._lazy:
            return None
        module, _, name = self._places.get(cmd_name, cmd_name).partition(":")
        command: click.Command = getattr(
            import_module(f"{self._package}.{module}"), name or "command"
        )
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name, command, rest = super().resolve_command(ctx, args)
        if isinstance(ctx.obj, list) and command is not None:
            ctx.obj.append(command)
        return name, command, rest

    def format_usage(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        command = self._default_command(ctx)
        if command is None:
            return super().format_usage(ctx, formatter)
        formatter.write_usage(ctx.command_path, " ".join(command.collect_usage_pieces(ctx)))
        formatter.write_usage(ctx.command_path, "COMMAND [ARGS]...", prefix=" " * len("Usage: "))

    def format_help_text(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        command = self._default_command(ctx)
        if command is None:
            return super().format_help_text(ctx, formatter)
        command.format_help_text(ctx, formatter)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        command = self._default_command(ctx)
        if command is None:
            return super().format_options(ctx, formatter)
        command.format_options(ctx, formatter)
        self.format_commands(ctx, formatter)

    def _default_command(self, ctx: click.Context) -> click.Command | None:
        return self.get_command(ctx, self.default) if self.default else None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(self._lazy.items()))
