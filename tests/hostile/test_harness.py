"""The harness of the hostile corpora reports what it is there to find."""

import socket
import subprocess
import sys
import time
from contextlib import suppress

import pytest

from memagent.errors import DocumentError
from tests.hostile import harness


def test_an_unexpected_error_is_a_complaint_that_says_where() -> None:
    def complaint(number: int, seed: int) -> str | None:
        return None if number == 0 else str(1 // 0)

    (line,) = harness.tried(complaint, 2, 7)
    assert line.startswith("seed 7, number 1: ZeroDivisionError at ")


def test_an_input_that_takes_too_long_is_a_complaint(monkeypatch: pytest.MonkeyPatch) -> None:
    def busy(number: int, seed: int) -> str | None:
        while True:
            pass

    monkeypatch.setattr(harness, "WALL_SECONDS", 0.2)
    (line,) = harness.tried(busy, 1, 0)
    assert "TookTooLong" in line
    (line,) = harness.tried(lambda number, seed: time.sleep(60), 1, 0)
    assert "TookTooLong" in line


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ("a.txt is broken", None),
        ("it is broken", "does not name a.txt"),
        ("a.txt has\nlines", "not one plain line"),
        ("a.txt " + "x" * 2000, "not one plain line"),
    ],
)
def test_errors_for_users_are_one_line_with_the_name(message: str, reason: str | None) -> None:
    found = harness.wrong_line(DocumentError(message), "a.txt")
    assert found is None if reason is None else reason in str(found)


def test_connections_to_addresses_that_were_not_named_are_seen() -> None:
    connections = harness.Connections()
    with socket.socket() as one, suppress(OSError):
        one.connect(("127.0.0.1", 9))
    assert connections.strangers("127.0.0.1:9") == []
    assert connections.strangers("127.0.0.1:10") == ["127.0.0.1:9"]


def test_a_corpus_exits_with_1_and_prints_what_is_wrong() -> None:
    code = (
        "import sys; from tests.hostile.harness import main\n"
        "sys.exit(main('x', lambda number, seed: 'wrong' if number else None, count=2, what='things'))"
    )
    command = [sys.executable, "-c", code, "--first", "0"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "seed 0, number 1: wrong\n")
