"""How commands end."""

import asyncio
import sys
from types import SimpleNamespace

import click
import pytest

from memagent.cli.main import COMMANDS, run
from memagent.cli.shared.console import INTERRUPTED


@click.command("stopped")
def stopped() -> None:
    """Is cancelled, and cancelled again while it shuts down, as by the two signals of `timeout`."""

    async def work() -> None:
        task = asyncio.current_task()
        assert task is not None
        try:
            task.cancel()
            await asyncio.sleep(10)
        finally:
            task.cancel()
            await asyncio.sleep(10)

    asyncio.run(work())


def test_a_command_that_is_stopped_again_while_it_shuts_down_ends_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(COMMANDS, "stopped", "Is cancelled.")
    monkeypatch.setitem(sys.modules, "memagent.cli.stopped", SimpleNamespace(command=stopped))
    assert run(["stopped"]) == INTERRUPTED
    assert capsys.readouterr() == ("", "memagent: interrupted\n")


@pytest.mark.parametrize(
    ("typed", "meant"), [(["aks"], "ask"), (["models", "lst"], "list"), (["data", "bild"], "build")]
)
def test_a_misspelt_command_is_suggested(
    typed: list[str], meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(typed) == 2
    assert f"No such command '{typed[-1]}' (did you mean {meant}?)" in capsys.readouterr().err


def test_a_command_like_no_other_is_not_guessed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["xyzzy"]) == 2
    assert capsys.readouterr().err == "memagent: No such command 'xyzzy'; see `memagent --help`\n"
