"""How commands with a run stop: why, what was kept, how to resume, which exit code."""

import asyncio
import os
import signal
import time
from pathlib import Path

import click
import pytest

from memagent.cli.shared import console as console_module
from memagent.cli.shared.console import CommandConsole, resumable
from memagent.errors import ConfigError, EngineError, LimitReached
from memagent.runs import Run

Capture = pytest.CaptureFixture[str]


@click.command()
@click.option("--max-calls")
def example() -> None:
    """A command with a run."""


def stopped(run: Run, error: BaseException) -> int:
    """The exit code of a command whose work ends with an error."""

    async def work() -> None:
        with resumable(run, CommandConsole(), kept="all answers are kept"):
            raise error

    with (
        click.Context(example, info_name="memagent example"),
        pytest.raises(click.exceptions.Exit) as caught,
    ):
        asyncio.run(work())
    return caught.value.exit_code


def test_an_engine_that_fails_leaves_a_run_to_resume(tmp_path: Path, capsys: Capture) -> None:
    with Run.create(tmp_path / "a run", {}) as run:
        assert stopped(run, EngineError("the endpoint is down")) == 3
    assert capsys.readouterr().err == (
        "memagent: the endpoint is down\n"
        f"all answers are kept; resume with: memagent example --resume '{tmp_path / 'a run'}'\n"
    )


def test_a_limit_is_to_be_raised_and_named_as_an_option(tmp_path: Path, capsys: Capture) -> None:
    with Run.create(tmp_path / "run", {}) as run:
        assert stopped(run, LimitReached("stopped after 2 calls: `max_calls=2`")) == 4
    first, second = capsys.readouterr().err.splitlines()
    assert first == "memagent: stopped after 2 calls: --max-calls 2"
    assert second.startswith("all answers are kept; raise the limit and resume with: memagent")


def test_an_interrupted_run_ends_with_code_130(tmp_path: Path, capsys: Capture) -> None:
    with Run.create(tmp_path / "run", {}) as run:
        assert stopped(run, asyncio.CancelledError()) == 130
    assert capsys.readouterr().err.startswith("memagent: interrupted\n")


def test_sigterm_ends_the_work_like_ctrl_c(tmp_path: Path) -> None:
    async def work(run: Run) -> None:
        with resumable(run, CommandConsole(), kept="all is kept"):
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(60)

    with (
        Run.create(tmp_path / "run", {}) as run,
        click.Context(example, info_name="memagent example"),
        pytest.raises(click.exceptions.Exit) as caught,
    ):
        asyncio.run(work(run))
    assert caught.value.exit_code == 130


def test_a_mistake_of_the_user_before_anything_was_done_leaves_no_run(tmp_path: Path) -> None:
    async def work(run: Run) -> None:
        with resumable(run, CommandConsole(), kept="all is kept"):
            raise ConfigError("no such model")

    run = Run.create(tmp_path / "run", {})
    with pytest.raises(ConfigError, match="no such model"):
        asyncio.run(work(run))
    assert not (tmp_path / "run").exists()


def test_a_mistake_of_the_user_after_some_work_keeps_the_run(tmp_path: Path) -> None:
    with Run.create(tmp_path / "run", {}) as run:
        run.append(b'{"n": 1}')
        assert stopped(run, ConfigError("the disk is full")) == 2
    assert (tmp_path / "run" / "run.json").exists()


def test_quiet_leaves_out_reports_but_not_errors(capsys: Capture) -> None:
    quiet = CommandConsole(is_quiet=True)
    quiet.report("reading")
    quiet.print("memagent: interrupted")
    assert capsys.readouterr().err == "memagent: interrupted\n"


def test_what_takes_long_is_named_where_no_terminal_shows_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(console_module, "NOTICE_SECONDS", 0.01)
    with CommandConsole().busy("counting"):
        time.sleep(0.2)
    assert capsys.readouterr().err == "counting\n"
    monkeypatch.setattr(console_module, "NOTICE_SECONDS", 60)
    with CommandConsole().busy("counting"):
        pass
    assert capsys.readouterr().err == ""
