"""Many hostile inputs, each within limits of time and memory, and with an eye on what is sent where.

A corpus is a function `complaint(number, seed)` that tries one input and says what is wrong, if anything
is. `python -m MODULE --count N --seed S` tries N of them, in processes of a hundred, and exits with 1 if
anything is wrong: a traceback, a crash, more than 10 seconds, more than 1 GB, a connection to a host that
was not named. It also prints how long the slowest took, and how much memory a process needed.
"""

import argparse
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from memagent.errors import MemagentError

SECONDS = 10.0
WALL_SECONDS = 300.0
"""On a busy machine 10 seconds of the processor take longer."""
HARD_SECONDS = 60
"""Of the processor; code that no signal reaches is ended after this, with its process."""
MEGABYTES = 1000
PER_PROCESS = 100
MAX_LINE_CHARS = 1000
OWN = "MEMAGENT_HOSTILE_FOLDER"
"""Variable with the folder that stands for the user's."""

Complaint = Callable[[int, int], str | None]


class Tried(NamedTuple):
    """What came of some inputs."""

    wrong: list[str]
    seconds: float = 0.0
    """How long the slowest took."""
    slowest: int = 0
    """Its number."""
    megabytes: float = 0.0
    """Memory beyond that at the start."""

    def __str__(self) -> str:
        return f"slowest {self.seconds:.1f} s (number {self.slowest}), {self.megabytes:.0f} MB"


class TookTooLong(BaseException):
    """Nothing catches this."""


@contextmanager
def time_limit(seconds: float = SECONDS) -> Iterator[None]:
    """Raise TookTooLong in the main thread after so many seconds of the processor, or far more in all."""

    def stop(number: int, frame: Any) -> None:
        if number == signal.SIGALRM:
            raise TookTooLong(f"more than {WALL_SECONDS:g} seconds in all")
        raise TookTooLong(f"more than {seconds:g} seconds of the processor")

    clocks = (
        (signal.ITIMER_PROF, signal.SIGPROF, seconds),
        (signal.ITIMER_REAL, signal.SIGALRM, WALL_SECONDS),
    )
    old = [signal.signal(number, stop) for _, number, _ in clocks]
    for clock, _, limit in clocks:
        signal.setitimer(clock, limit)
    try:
        yield
    finally:
        for (clock, number, _), handler in zip(clocks, old, strict=True):
            signal.setitimer(clock, 0)
            signal.signal(number, handler)


def line_of(error: BaseException) -> str:
    """An unexpected error and where it was raised."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__} at {last.filename}:{last.lineno}: {str(error)[:200]!r}"


def wrong_line(error: MemagentError, name: str = "") -> str | None:
    """What is wrong with an error for users, which is one printable line with the file's name."""
    text = str(error)
    if name not in text:
        return f"the error does not name {name}: {text[:300]!r}"
    if not text.isprintable() or len(text) > MAX_LINE_CHARS:
        return f"the error is not one plain line: {text[:300]!r}"
    return None


class Connections:
    """Addresses that this process connects to or looks up, from now on."""

    def __init__(self) -> None:
        self.addresses: list[str] = []
        sys.addaudithook(self._on_event)

    def strangers(self, *named: str) -> list[str]:
        """Those that were not named."""
        return [address for address in self.addresses if not address.startswith(named)]

    def _on_event(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "socket.connect" and isinstance(arguments[1], tuple):
            host, port, *_ = arguments[1]
            self.addresses.append(f"{host}:{port}")
        elif event == "socket.getaddrinfo":
            self.addresses.append(f"{arguments[0]}:{arguments[1]}")


def tried(complaint: Complaint, count: int, seed: int, *, first: int = 0) -> list[str]:
    """What is wrong with inputs from number `first` on."""
    return _tried(complaint, count, seed, first).wrong


def _tried(complaint: Complaint, count: int, seed: int, first: int) -> Tried:
    wrong, durations = [], []
    for number in range(first, first + count):
        started = time.monotonic()
        try:
            with time_limit():
                reason = complaint(number, seed)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            reason = line_of(error)
        durations.append((time.monotonic() - started, number))
        if reason is not None:
            wrong.append(f"seed {seed}, number {number}: {reason}")
    return Tried(wrong, *max(durations))


def _tried_here(complaint: Complaint, count: int, seed: int, first: int) -> Tried:
    def limited(number: int, seed: int) -> str | None:
        print(f"number {number}", file=sys.stderr, flush=True)  # the last one if the process ends
        limit = int(time.process_time()) + HARD_SECONDS
        resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.RLIM_INFINITY))
        return complaint(number, seed)

    limited(first, seed)  # imports
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found = _tried(limited, count, seed, first)
    used = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1000
    if used > MEGABYTES:
        found.wrong.append(f"numbers {first} to {first + count}: {used:.0f} MB")
    return found._replace(megabytes=used)


def main(
    module: str, complaint: Complaint, *, count: int, what: str, per_process: int = PER_PROCESS
) -> int:
    """The exit code of `python -m MODULE`: 1 if something is wrong."""
    parser = argparse.ArgumentParser(prog=f"python -m {module}")
    parser.add_argument("--count", type=int, default=count)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, help="try them here, from this number on")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        own_folders(os.environ.setdefault(OWN, folder))  # processes that are started share it
        if options.first is not None:
            found = _tried_here(complaint, options.count, options.seed, options.first)
            print(json.dumps(found))
            return 1 if found.wrong else 0
        found = _in_processes(module, options.count, options.seed, per_process)
    print(f"{options.count} {what}, {len(found.wrong)} complaints; {found}", *found.wrong, sep="\n")
    return 1 if found.wrong else 0


def own_folders(folder: str) -> None:
    """Put all that this process would write into the user's folders into another one: inputs leave traces there."""
    for name in ("STATE", "CACHE", "DATA", "CONFIG"):
        os.environ[f"XDG_{name}_HOME"] = f"{folder}/{name.lower()}"


def _in_processes(module: str, count: int, seed: int, per_process: int) -> Tried:
    parts = []
    for first in range(0, count, per_process):
        some = min(per_process, count - first)
        command = [sys.executable, "-m", module, "--first", str(first), "--count", str(some)]
        done = subprocess.run(
            [*command, "--seed", str(seed)], capture_output=True, text=True, check=False
        )
        *_, line = ["", *done.stdout.splitlines()]
        part = Tried(*json.loads(line)) if line.startswith("[") else Tried([])
        if done.returncode not in (0, 1) or "Traceback" in done.stderr:
            last = done.stderr.strip().splitlines()[-1:]
            part.wrong.append(f"numbers {first} to {first + some}: code {done.returncode} {last}")
        parts.append(part)
        print(f"{first + some} of {count}: {parts[-1]}", file=sys.stderr, flush=True)
    slowest = max(parts, key=lambda part: part.seconds)
    return slowest._replace(
        wrong=[line for part in parts for line in part.wrong],
        megabytes=max(part.megabytes for part in parts),
    )
