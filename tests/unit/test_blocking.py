"""Async code from ordinary code: what is left open does not hold up the end of the process."""

import subprocess
import sys

import pytest

ITERATE = """
from memagent import Reader, open_engine
steps = Reader(open_engine("scripted")).iter_steps("Who?", "It was who. " * 20000)
print(next(steps).index)
"""


@pytest.mark.parametrize("end", ["", "raise SystemExit(3)", "del steps", "steps.close()"])
def test_a_process_ends_at_once_with_an_iterator_left_open(end: str) -> None:
    done = subprocess.run(
        [sys.executable, "-X", "dev", "-W", "error", "-c", ITERATE + end],
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert (done.stdout, done.stderr) == ("0\n", "")
    assert done.returncode == (3 if "3" in end else 0)
