"""Progress where there is no terminal: a line now and then, notes about repeated calls."""

import time

import pytest

from memagent.cli.shared import console as console_module
from memagent.cli.shared import progress
from memagent.cli.shared.console import CommandConsole
from memagent.cli.shared.progress import ProgressFrame, duration, size_text
from memagent.engines.limit import Failure
from tests.support.timing import wait_until

Capture = pytest.CaptureFixture[str]
FAILURE = Failure(kind="busy", reason="HTTP 503")


def test_a_line_is_printed_only_when_the_last_one_is_old(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    now = 0.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    with ProgressFrame(CommandConsole()) as frame:
        for now in (1.0, 9.0, 10.5, 12.0, 21.0):
            frame.show(f"{now:g} of 30 items", completed=now, total=30, detail="soon")
        assert frame.seconds == 21.0
    assert capsys.readouterr().err == "10.5 of 30 items, soon\n21 of 30 items, soon\n"


def test_a_first_line_comes_within_two_seconds_though_nothing_is_finished(capsys: Capture) -> None:
    started = time.monotonic()
    with ProgressFrame(CommandConsole()) as frame:
        frame.show("0 of 30 items", completed=0, total=30)
        wait_until(lambda: capsys.readouterr().err == "0 of 30 items\n")
    assert progress.SECONDS_TO_FIRST_LINE <= 0.5 <= time.monotonic() - started
    with ProgressFrame(CommandConsole(is_quiet=True)) as frame:
        frame.show("0 of 30 items", completed=0, total=30)
        time.sleep(0.8)
    assert capsys.readouterr().err == ""


def test_a_step_that_takes_longer_is_named_and_a_quick_one_is_not(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setattr(console_module, "NOTICE_SECONDS", 0.05)
    console = CommandConsole()
    with console.notice("opening the model"):
        time.sleep(0.2)
    with console.notice("nothing"):
        pass
    time.sleep(0.1)
    assert capsys.readouterr().err == "opening the model\n"


def test_a_wait_of_a_second_or_more_is_reported(capsys: Capture) -> None:
    with ProgressFrame(CommandConsole()) as frame:
        frame.retry(FAILURE, 0.2)
        frame.retry(FAILURE, 4.0)
    assert capsys.readouterr().err == "the endpoint failed (HTTP 503; retry in 4 s)\n"


def test_a_failure_of_many_calls_and_attempts_is_one_line_a_minute(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    now = 0.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    with ProgressFrame(CommandConsole()) as frame:
        for now in range(12):
            late = Failure(kind="failed", reason=f"no reply within {now}.5 s")
            frame.retry(FAILURE, 4.0)
            frame.retry(late, 2.0)
        now = 61
        frame.retry(FAILURE, 5.0)
        now = 130
        frame.retry(FAILURE, 5.0)
    assert capsys.readouterr().err.splitlines() == [
        "the endpoint failed (HTTP 503; retry in 4 s)",
        "the endpoint failed (no reply within 0.5 s; retry in 2 s)",
        "the endpoint failed 12 more times (HTTP 503; retry in 5 s)",
        "the endpoint failed (HTTP 503; retry in 5 s)",
    ]


def test_quiet_shows_nothing(capsys: Capture) -> None:
    with ProgressFrame(CommandConsole(is_quiet=True)) as frame:
        frame.retry(FAILURE, 4.0)
        frame.print("a line")
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0 s"), (59.4, "59 s"), (200, "3 min 20 s"), (7500, "2 h 5 min")]
)
def test_durations_are_written_for_people(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_sizes_are_written_for_people() -> None:
    sizes = (0, 1, 50_952, 1_000_000, 1_234_000_000)
    assert [*map(size_text, sizes)] == ["0 kB", "1 kB", "51 kB", "1 MB", "1,234 MB"]
