"""The harness of the hostile corpora reports what it is there to find."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

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


CORPUS = """
import itertools
import sys
import tempfile
from platformdirs import user_cache_path
from tests.hostile import harness

harness.HARD_SECONDS = 1

def complaint(number, seed):
    if not str(user_cache_path()).startswith(tempfile.gettempdir()):
        return "the user's folder"
    if number == 3:
        sum(itertools.repeat(0))
    return "wrong" if number == 1 else None

sys.exit(harness.main("corpus", complaint, count=4, what="things", per_process=2))
"""
"""Its last input never ends, in code that no signal reaches."""


def test_a_corpus_exits_with_1_and_prints_what_is_wrong(tmp_path: Path) -> None:
    (tmp_path / "corpus.py").write_text(CORPUS)
    paths = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[2])])
    done = subprocess.run(
        [sys.executable, "-m", "corpus"],
        env={**os.environ, "PYTHONPATH": paths, "XDG_CACHE_HOME": "/nonexistent"},
        capture_output=True,
        text=True,
        check=False,
    )
    summary, first, last = done.stdout.splitlines()
    assert done.returncode == 1
    slowest = r"slowest \d+\.\d s \(number \d\), \d+ MB"
    assert re.fullmatch(rf"4 things, 2 complaints; {slowest}", summary)
    assert first == "seed 0, number 1: wrong"
    assert last == f"numbers 2 to 4: code -{signal.SIGXCPU} ['number 3']"
