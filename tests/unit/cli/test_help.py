"""A command without arguments prints its help, line by line."""

import pytest

from memagent.cli.main import run
from memagent.profiles import VARIABLE


@pytest.mark.parametrize("arguments", [[], ["models"], ["data"]])
def test_a_group_without_a_command_prints_its_help(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(arguments) == 2
    bare = capsys.readouterr()
    assert run([*arguments, "--help"]) == 0
    assert bare.out == capsys.readouterr().out
    assert bare.out.startswith("Usage: memagent")
    assert len(bare.out.splitlines()) > 5
    assert bare.err == ""


@pytest.mark.parametrize(
    ("group", "option", "command"),
    [
        ("serve", "--max-concurrency", "keys"),
        ("eval", "--lengths", "regrade"),
        ("train", "--set", "sft"),
    ],
)
def test_a_group_that_runs_without_a_command_lists_options_and_commands(
    group: str, option: str, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([group, "--help"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[0].startswith(f"Usage: memagent {group} [OPTIONS]")
    assert shown[1] == f"       memagent {group} COMMAND [ARGS]..."
    assert any(line.startswith(f"  {option} ") for line in shown)
    commands = shown[shown.index("Commands:") :]
    assert any(line.startswith(f"  {command} ") for line in commands)
    assert run([group, "run", "--help"]) == 0
    own = capsys.readouterr().out.splitlines()
    assert set(own) - set(shown) == {own[0]}


@pytest.mark.parametrize("command", ["ask", "eval", "mcp", "serve"])
def test_every_command_that_takes_an_engine_takes_a_profile(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([command, "--help"]) == 0
    shown = capsys.readouterr().out
    assert "--engine" in shown
    assert "--profile" in shown
    assert VARIABLE in shown
