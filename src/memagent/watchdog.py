"""Run a command until it ends or standard input does, whichever is first; then end all it started.

    memagent ── pipe ──▶ watchdog ──▶ the command, in a process group of its own
                                        └──▶ what it starts in turn

The pipe closes when memagent closes it and when memagent dies, however it dies, so a server never
outlives the process it was started for. The group is asked to end, and killed if it does not. This file
is run by its path and imports nothing but the standard library.

    python watchdog.py GRACE_SECONDS COMMAND ...
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
    grace_seconds, command = float(arguments[0]), arguments[1:]
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # the pipe alone decides; not SIG_IGN, which the command would inherit
        signal.signal(number, lambda *_: None)
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)

    def end_when_alone() -> None:
        while os.read(sys.stdin.fileno(), 1024):
            pass
        end_group(child.pid, grace_seconds)

    threading.Thread(target=end_when_alone, daemon=True).start()
    status = child.wait()
    end_group(child.pid, grace_seconds)  # a server that crashed leaves its workers behind
    return status if status >= 0 else 128 - status


def end_group(group: int, grace_seconds: float) -> None:
    """Ask the processes of a group to end; kill those that are there after the grace."""
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGTERM)
        deadline = time.monotonic() + grace_seconds
        while time.monotonic() < deadline and is_anyone_left(group):
            time.sleep(POLL_SECONDS)
        os.killpg(group, signal.SIGKILL)


def is_anyone_left(group: int) -> bool:
    """Whether a process of a group runs. A zombie does not count."""
    os.killpg(group, 0)  # raises when there is not even one that has ended
    if not os.path.isdir("/proc/self"):
        return True
    for name in filter(str.isdigit, os.listdir("/proc")):
        with (
            suppress(OSError),
            open(f"/proc/{name}/stat", encoding="utf-8", errors="replace") as file,
        ):
            state, _, process_group = file.read().rpartition(")")[2].split()[:3]
            if int(process_group) == group and state not in "ZX":
                return True
    return False


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
