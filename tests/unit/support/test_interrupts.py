"""The tests do not depend on how they are started: as a background job, SIGINT arrives ignored."""

import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
CHILD = "import signal; print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)"
PROGRAM = f"""
import subprocess, sys
{{setup}}
print(subprocess.run([sys.executable, "-c", {CHILD!r}], capture_output=True, text=True).stdout)
"""


def ignoring_interrupts(setup: str) -> str:
    """What a child's child has as handler, with SIGINT ignored as for a background job."""
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        command = [sys.executable, "-c", PROGRAM.format(setup=setup)]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
    finally:
        signal.signal(signal.SIGINT, handler)
    return done.stdout.strip()


def test_interrupts_work_in_children_of_the_tests_however_they_are_started() -> None:
    assert ignoring_interrupts("pass") == "False"
    assert ignoring_interrupts("import tests.conftest") == "True"
