"""Messages name settings; each command shows them as its own options."""

from pathlib import Path

import click
import pytest

from memagent.cli.main import run
from memagent.cli.shared.console import with_options


@click.command()
@click.option("--chunk-tokens", type=int)
@click.option("-q", "--question", "questions", multiple=True)
@click.option("--figure/--no-figure", default=True)
@click.option("--force", is_flag=True)
@click.option("--set", "changes", multiple=True, metavar="NAME=VALUE")
@click.option("--source", "sources", multiple=True, metavar="[NAME=]PATH")
def example() -> None:
    """A command with one option of each kind."""


@pytest.mark.parametrize(
    ("message", "shown"),
    [
        ("lower `chunk_tokens`", "lower --chunk-tokens"),
        ("give `chunk_tokens=512`", "give --chunk-tokens 512"),
        ("name `questions`", "name --question"),
        ("raise `window=64`", "raise window=64"),
        ("raise `window`", "raise window"),
        ("with `figure=False` or `force=True`", "with --no-figure or --force"),
        ("try `optim.lr=2e-6`", "try --set optim.lr=2e-6"),
        ("lower `optim.lr`", "lower optim.lr"),
        ("name it: `sources.squad-dev=PATH`", "name it: --source squad-dev=PATH"),
        ("see `questions.a=b`", "see --set questions.a=b"),
        ("run `memagent models list`", "run `memagent models list`"),
        ("see `ulimit -n`", "see `ulimit -n`"),
    ],
)
def test_settings_are_shown_as_options_of_the_command(message: str, shown: str) -> None:
    assert with_options(message, example) == shown


def test_inside_a_command_its_own_options_are_used() -> None:
    with click.Context(example):
        assert with_options("lower `chunk_tokens`") == "lower --chunk-tokens"


def test_outside_of_commands_settings_lose_their_backticks() -> None:
    assert with_options("lower `chunk_tokens=5`") == "lower chunk_tokens=5"


def test_errors_of_a_command_name_its_options(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.txt").write_text("The key is red.")
    options = ["-q", "Who?", "--engine", "scripted", "--max-cost", "1"]
    assert run(["ask", str(tmp_path / "a.txt"), *options]) == 2
    assert "--set price_in and --set price_out" in capsys.readouterr().err
