"""Run a command until it ends or a pipe does, whichever is first; then end all it started.

    memagent ── pipe ──▶ watchdog ──▶ the command ──▶ what it starts in turn
                        └────────── one process group ──────────┘

The pipe closes when memagent closes it and when memagent dies, however it dies, so a server never
outlives the process it was started for. The group is asked to end, and killed if it does not; its number is
that of the watchdog, so memagent can end it where the watchdog was killed. This file is run by its path and
imports nothing but the standard library.

    python watchdog.py PIPE GRACE_SECONDS COMMAND ...      # PIPE: its descriptor; with 0 the command gets no input
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress

POLL_SECONDS = 0.1


def main(arguments: list[str]) -> int:
    """Watch over a command; its exit status."""
    pipe, grace_seconds, command = int(arguments[0]), float(arguments[1]), arguments[2:]
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # the pipe alone decides; not SIG_IGN, which the command would inherit
        signal.signal(number, lambda *_: None)
    child = subprocess.Popen(command, stdin=None if pipe else subprocess.DEVNULL)
    group = os.getpgrp()

    def end_when_alone() -> None:
        while os.read(pipe, 1024):
            pass
        ask_to_end(group, grace_seconds)
        os.killpg(group, signal.SIGKILL)  # this process, too

    threading.Thread(target=end_when_alone, daemon=True).start()
    status = child.wait()
    ask_to_end(group, grace_seconds)  # a server that crashed leaves its workers behind
    return status if status >= 0 else 128 - status


def ask_to_end(group: int, grace_seconds: float) -> None:
    """Ask the processes of a group to end, and wait until they have; after the grace they are killed."""
    deadline = time.monotonic() + grace_seconds
    os.killpg(group, signal.SIGTERM)
    while time.monotonic() < deadline and others_in(group):
        time.sleep(POLL_SECONDS)
    for process in others_in(group):
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


def others_in(group: int) -> list[int]:
    """The processes of a group, without this one. A zombie does not count."""
    found = []
    for process, state, its_group in processes():
        if int(its_group) == group and state[0] not in "ZX" and int(process) != os.getpid():
            found.append(int(process))
    return found


def processes() -> list[list[str]]:
    """The id, state and group of each process."""
    if not os.path.isdir("/proc/self"):
        listed = subprocess.run(("ps", "-A", "-o", "pid=,state=,pgid="), capture_output=True)
        return [line.split() for line in listed.stdout.decode().splitlines()]
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        with (
            suppress(OSError),
            open(f"/proc/{name}/stat", encoding="utf-8", errors="replace") as file,
        ):
            state, _, group = file.read().rpartition(")")[2].split()[:3]
            found.append([name, state, group])
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
