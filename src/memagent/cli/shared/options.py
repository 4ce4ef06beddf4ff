"""Command-line options from settings classes, so that no option is declared twice."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, is_dataclass
from functools import wraps
from types import MappingProxyType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import click
from pydantic import SecretStr
from pydantic.fields import FieldInfo

from memagent.config import AgentConfig, FileRecord, Settings
from memagent.names import hint
from memagent.profiles import VARIABLE, load_profile, with_profile

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")


def json_object(value: str) -> dict[str, Any]:
    """A JSON object on the command line."""
    try:
        parsed = json.loads(value)
    except ValueError:
        parsed = None
    if not isinstance(parsed, dict):
        raise click.BadParameter(f"{value!r} is not a JSON object, such as '{{\"top_k\": 20}}'")
    return parsed


TYPES: dict[type, Any] = {
    bool: bool,
    int: int,
    float: float,
    str: str,
    SecretStr: str,
    dict: json_object,
}


class Panel(click.Option):
    """An option that is listed under its own heading in the help."""

    def __init__(self, *args: Any, panel: str = "Options", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.panel = panel


class SetOption(Panel):
    """`--set NAME=VALUE` for settings without an option of their own."""

    def __init__(
        self, *args: Any, kinds: Mapping[str, Any], passes_on: bool, **kwargs: Any
    ) -> None:
        """`kinds`: the settings by name, each with its type; others are passed on, or refused."""
        super().__init__(*args, **kwargs)
        self.kinds = kinds
        self._passes_on = passes_on

    def applied(self, ctx: click.Context) -> dict[str, Any]:
        """The parameters of the command with what is set; settings that are not given are None.

        An option of its own counts more.
        """
        values = {**dict.fromkeys(self.kinds), **ctx.params}
        given = {name for name, value in values.items() if value is not None}
        others = []
        for assignment in values["changes"]:
            name, equals, text = assignment.partition("=")
            name = name.strip().replace("-", "_")
            if equals and name in self.kinds:
                kind = click.types.convert_type(self.kinds[name])
                try:
                    value = kind.convert(text.strip(), self, ctx)
                except click.BadParameter as error:
                    raise click.BadParameter(f"{name}: {error.message}", ctx, self) from None
                values[name] = values[name] if name in given else value
            elif self._passes_on:
                others.append(assignment)
            elif equals:
                raise click.BadParameter(
                    f"there is no setting {name!r}; {hint(name, sorted(self.kinds))}", ctx, self
                )
            else:
                raise click.BadParameter(f"{assignment!r} is not NAME=VALUE", ctx, self)
        return {**values, "changes": tuple(others)}


class PanelCommand(click.Command):
    """A command whose help lists its options under headings, and that takes settings of a profile."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        option = next((one for one in self.params if isinstance(one, SetOption)), None)
        try:
            rest = super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            name = error.option_name.lstrip("-").replace("-", "_")
            if option is None or name not in option.kinds:
                raise
            raise click.UsageError(
                f"{error.option_name} has no option of its own; give --set {name}=VALUE", ctx
            ) from None
        if option is not None:
            ctx.params = option.applied(ctx)
        name = ctx.params.pop("profile", None)
        if name is not None:
            ctx.params = with_profile(load_profile(name), ctx.params)
        return rest

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        panels: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None and isinstance(param, click.Option):
                panels.setdefault(getattr(param, "panel", "Options"), []).append(record)
        for title, records in panels.items():
            with formatter.section(title):
                formatter.write_dl(records)


def panel_option(*names: str, panel: str, **attributes: Any) -> Callable[[F], F]:
    """`click.option` under a heading."""
    return click.option(*names, cls=Panel, panel=panel, **attributes)


def profile_option(parameter: str = "profile", *, panel: str = "Engine") -> Callable[[F], F]:
    """`--profile`. As the parameter `profile` a PanelCommand applies it; under another name the command does."""
    return panel_option(
        "--profile",
        parameter,
        envvar=VARIABLE,
        panel=panel,
        help=f"Settings under this name in your config file, where no option gives them; also {VARIABLE}.",
    )


def settings_options(
    settings: type[Settings], *, panel: str, only: Iterable[str] | None = None
) -> Callable[[F], F]:
    """An option for each field of a settings class, or for some. Options that are not given are None."""

    def decorate(function: F) -> F:
        for name in reversed(list(settings.model_fields if only is None else only)):
            function = _field_option(settings, name, panel)(function)
        return function

    return decorate


def set_option(
    *settings: type[Settings],
    panel: str,
    help: str,
    further: Mapping[str, Any] = MappingProxyType({}),
    passes_on: bool = False,
) -> Callable[[F], F]:
    """`--set` for the fields of settings classes, and for `further` values by name, each with its type.

    With `passes_on` other assignments are the command's parameter `changes`.
    """
    fields = {name: _type(field) for one in settings for name, field in one.model_fields.items()}
    fields["tokenizer"] = str
    return click.option(
        "--set",
        "changes",
        cls=SetOption,
        multiple=True,
        metavar="NAME=VALUE",
        panel=panel,
        kinds={**fields, **further},
        passes_on=passes_on,
        help=help,
    )


SHOWN = ("mode", "window", "chunk_tokens", "prompts", "evidence", "items", "stop_early")
"""Settings of reading with an option of their own."""


def reading_options(panel: str = "Reading", only: Iterable[str] = SHOWN) -> Callable[[F], F]:
    """`--tokenizer`, and an option for each setting of reading that many set."""
    return all_options(
        panel_option(
            "--tokenizer",
            panel=panel,
            help="Folder, hub id, tiktoken:NAME, bytes or estimate. [default: the model's own]",
        ),
        settings_options(AgentConfig, panel=panel, only=only),
    )


def given(settings: type[Settings], values: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a settings class that were given on the command line."""
    return {name: values[name] for name in settings.model_fields if values.get(name) is not None}


def all_options(*options: Callable[[F], F]) -> Callable[[F], F]:
    """Several options as one decorator."""

    def decorate(function: F) -> F:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


# --- options as typed objects ---------------------------------------------------------------------


def taking(options: type[T]) -> Callable[[Callable[[T], int]], Callable[..., int]]:
    """Let a command take its options as one frozen dataclass.

    Fields are filled by name; a field that is itself such a dataclass, or a record, gets its own fields; a field of
    type `Annotated[dict[str, Any], AgentConfig]` gets the settings of that class, or of several, that were given.
    """

    def decorate(function: Callable[[T], int]) -> Callable[..., int]:
        @wraps(function)
        def command(**values: Any) -> int:
            return function(build(options, values))

        return command

    return decorate


def build(options: type[T], values: Mapping[str, Any]) -> T:
    """A dataclass of options from what click parsed."""
    assert is_dataclass(options)
    hints = get_type_hints(options, include_extras=True)
    found: dict[str, Any] = {}
    for each in fields(options):
        kind = hints[each.name]
        if get_origin(kind) is Annotated:
            groups = (given(settings, values) for settings in get_args(kind)[1:])
            found[each.name] = {name: value for group in groups for name, value in group.items()}
        elif is_dataclass(kind) and isinstance(kind, type):
            found[each.name] = build(kind, values)
        elif isinstance(kind, type) and issubclass(kind, FileRecord):
            found[each.name] = kind(**{name: values[name] for name in kind.model_fields})
        else:
            found[each.name] = values[each.name]
    return options(**found)


def _field_option(settings: type[Settings], name: str, panel: str) -> Callable[[F], F]:
    field = settings.model_fields[name]
    help_text = settings.help(name)
    if field.default not in (None, "") and not field.is_required():
        help_text = f"{help_text} [default: {field.default}]"
    flag = f"--{name.replace('_', '-')}"
    if field.default is False:
        return panel_option(
            flag, name, panel=panel, is_flag=True, default=None, help=settings.help(name)
        )
    return panel_option(flag, name, panel=panel, type=_type(field), default=None, help=help_text)


def _type(field: FieldInfo) -> Any:
    annotation: Any = field.annotation
    if get_origin(annotation) in (Union, UnionType):
        annotation = next(part for part in get_args(annotation) if part is not type(None))
    if get_origin(annotation) is Literal:
        return click.Choice(get_args(annotation))
    return TYPES[get_origin(annotation) or annotation]
