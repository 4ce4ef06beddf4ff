"""Every number that a command, a settings class or a manifest takes: what nobody can mean is refused.

Options and settings are found by walking the commands and the classes, so that a new one is tried, too. A number that
is taken must be finite and inside limits that its declaration names; those without a lower limit are listed here with
the reason.
"""

import math
import re
from collections.abc import Iterable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, get_args

import click
import pytest
from annotated_types import Ge, Gt
from pydantic import ValidationError
from pydantic.fields import FieldInfo

from memagent.cli.main import app, run
from memagent.config import Settings
from memagent.errors import MemagentError

PACKAGE = Path(__file__).resolve().parents[2] / "src" / "memagent"
HERE = str(Path(__file__).resolve())
NEVER = ("nan", "inf", "-inf", "1e308", "")
"""What no number may be."""
TRIED = (*NEVER, "-1", "0")
UNLIMITED = {
    "seed": "any whole number is a seed",
    "AnchorLine.lengths": "published figures that come with the package",
    "AnchorLine.values": "published figures that come with the package",
    "RolloutSettings.on_failure": "a reward may be negative",
}
"""Settings and options that may be negative, with the reason."""


# --- settings -------------------------------------------------------------------------------------


def settings_classes() -> list[type[Settings]]:
    """All of the package; modules that define none are not imported."""
    for path in sorted(PACKAGE.rglob("*.py")):
        if re.search(
            r"^class \w+\(\w*(Settings|Config|Selection)\)", path.read_text("utf-8"), re.MULTILINE
        ):
            import_module(".".join(("memagent", *path.relative_to(PACKAGE).with_suffix("").parts)))
    found: dict[type[Settings], None] = {}
    waiting: list[type[Settings]] = [Settings]
    while waiting:
        below = [
            each
            for each in waiting.pop().__subclasses__()
            if each.__module__.startswith("memagent.")
        ]
        found.update(dict.fromkeys(below))
        waiting += below
    return sorted(found, key=lambda each: each.__name__)


def kinds(annotation: Any) -> Iterator[type]:
    """The plain types in an annotation such as `float | None` or `list[int]`."""
    if isinstance(annotation, type) and not get_args(annotation):
        yield annotation
    for argument in get_args(annotation):
        yield from kinds(argument)


def numeric_fields() -> list[tuple[type[Settings], str]]:
    return [
        (each, name)
        for each in settings_classes()
        for name, field in each.model_fields.items()
        if {int, float} & set(kinds(field.annotation))
    ]


def limits(marks: Iterable[Any]) -> Iterator[float]:
    """Numbers that a setting must reach or exceed, by its declaration."""
    for mark in marks:
        if isinstance(mark, Ge):
            yield float(mark.ge)  # type: ignore[arg-type]
        elif isinstance(mark, Gt):
            yield math.nextafter(float(mark.gt), math.inf)  # type: ignore[arg-type]
        elif isinstance(mark, FieldInfo):
            yield from limits(mark.metadata)


def complaint(settings: type[Settings], name: str, value: Any) -> str | None:
    """Why a settings class does not take a value of a field; None if it does."""
    try:
        settings.model_validate({name: value})
    except ValidationError as error:
        own = [one["msg"] for one in error.errors() if one["loc"][:1] in ((), (name,))]
        return own[0] if own else None
    except MemagentError as error:
        return str(error)
    return None


def marks_in(annotation: Any) -> Iterator[Any]:
    """What annotations such as `list[Annotated[int, Field(ge=1)]]` declare."""
    yield from getattr(annotation, "__metadata__", ())
    for argument in get_args(annotation):
        yield from marks_in(argument)


@pytest.mark.parametrize(
    ("settings", "name"), numeric_fields(), ids=lambda one: getattr(one, "__name__", one)
)
def test_a_setting_takes_only_numbers_that_can_be_meant(
    settings: type[Settings], name: str
) -> None:
    field = settings.model_fields[name]
    declared = list(limits([*field.metadata, *marks_in(field.annotation)]))
    may_be_negative = name in UNLIMITED or f"{settings.__name__}.{name}" in UNLIMITED
    for text in TRIED:
        number = float(text) if text else text  # as TOML has it
        for value in (number, [number], [number, number], {"a": number}):
            why = complaint(settings, name, value)
            assert why is None or "\n" not in why
            is_below = text not in NEVER and any(float(text) < limit for limit in declared)
            if text in NEVER or is_below or (text == "-1" and not may_be_negative):
                assert why, f"{value!r} is taken"


# --- options --------------------------------------------------------------------------------------


def commands(
    group: click.Group = app, above: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """All commands with their names, as a call finds them."""
    ctx = click.Context(group, info_name=" ".join(above))
    for name in group.list_commands(ctx):
        _, command, _ = group.resolve_command(ctx, [name])
        assert command is not None
        yield (*above, name), command
        if isinstance(command, click.Group):
            yield from commands(command, (*above, name))


NUMBERS = (click.types.IntParamType, click.types.FloatParamType)


def numeric_options() -> list[tuple[str, click.Command, click.Parameter]]:
    return [
        (" ".join(names), command, param)
        for names, command in commands()
        for param in command.params
        if isinstance(param.type, NUMBERS)
    ]


def is_taken(command: click.Command, param: click.Parameter, text: str) -> bool:
    """Whether a command takes a value of an option or argument; others that it needs are given."""
    given = [
        other.opts[0] if isinstance(other, click.Option) else ""
        for other in command.params
        if other is not param and other.required
    ]
    words = [word for flag in given for word in ([flag, HERE] if flag else [HERE])]
    words += [f"{param.opts[0]}={text}"] if isinstance(param, click.Option) else ["--", text]
    try:
        command.make_context("command", words)
    except click.UsageError as error:
        message = error.format_message()
    else:
        return True
    assert "\n" not in message
    return False


def test_some_options_are_numbers() -> None:
    found = {f"{name} {param.opts[0]}" for name, _, param in numeric_options()}
    assert {"ask --max-cost", "train run --max-minutes"} <= found


@pytest.mark.parametrize(
    ("name", "command", "param"),
    numeric_options(),
    ids=lambda one: one if isinstance(one, str) else getattr(one, "name", ""),
)
def test_an_option_takes_only_numbers_that_can_be_meant(
    name: str, command: click.Command, param: click.Parameter
) -> None:
    fields = {field for _, field in numeric_fields()}  # tried above
    for text in NEVER:
        assert not is_taken(command, param, text), f"{name}: {param.name}={text} is taken"
    if param.name not in fields and param.name not in UNLIMITED:
        assert not is_taken(command, param, "-1"), f"{name}: {param.name}=-1 is taken"


def test_a_command_that_is_given_such_a_number_says_so_in_one_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for number in NEVER:
        assert run(["ask", HERE, "-q", "Why?", "--max-cost", number]) == 2
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == 1
        assert "--max-cost" in lines[0]
