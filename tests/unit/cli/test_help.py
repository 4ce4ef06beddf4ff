"""A command without arguments prints its help, line by line."""

from __future__ import annotations

import pytest

from memagent.cli.main import run


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
