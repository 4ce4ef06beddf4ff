"""Files that strangers wrote: a failure is one line with the file's name, within a limit of time.

    with foreign_file(path, "cannot be loaded", seconds=60):
        ...     # whatever raises here raises a ConfigError: "model.gguf cannot be loaded: ..."

Libraries that parse a damaged file raise anything, Rust's panics included, which are no `Exception`.
"""

from __future__ import annotations

import ctypes
import threading
import time
from base64 import b64decode
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from math import prod
from pathlib import Path
from typing import Any

from pydantic_core import from_json

from memagent.errors import ConfigError, MemagentError, UserError, one_line

POLL_SECONDS = 0.2
AGAIN_SECONDS = 2.0
"""A thread whose time is up is stopped again after this: code of others may ignore it once, and freeing what it
had built takes a while."""
GROWING = ("normalizer", "pre_tokenizer", "decoder")
"""Parts of a tokenizer.json that change a text."""
MAX_GROWTH = 64
"""Times as long. Published tokenizers stay below 40: the longest replacement of Unicode has 18 characters."""


@contextmanager
def foreign_file(
    path: Path | str,
    failure: str,
    *,
    seconds: float | None = None,
    is_processor_time: bool = False,
    advice: str = "",
    error: type[UserError] = ConfigError,
    unless: Callable[[BaseException], bool] = lambda failed: False,
) -> Iterator[None]:
    """Turn what a file's contents cause into an error of one line: path, `failure`, the reason, `advice`.

    Errors of memagent pass, and so do those for which `unless` is true. `seconds` limits code in Python;
    code in other languages is stopped when it returns. With `is_processor_time` they are those that the
    processor works in this thread, where the system counts them.
    """
    try:
        with nullcontext() if seconds is None else _deadline(seconds, is_processor_time):
            yield
    except MemagentError:
        raise
    except _TimeIsUp:
        raise error(f"{path} {failure}: more than {seconds:g} seconds{advice}") from None
    except BaseException as failed:
        if not _is_failure(failed) or unless(failed):
            raise
        raise error(f"{path} {failure}: {one_line(failed)}{advice}") from None


def check_tokenizer(file: Path) -> None:
    """Raise ConfigError for a tokenizer.json that makes a text many times as long, step after step.

    The library that computes such steps would end this process when memory has run out.
    """
    with foreign_file(file, "is not a tokenizer"):
        contents = from_json(file.read_bytes())
        growth = max(_growth(contents.get(name)) for name in GROWING)
    if growth > MAX_GROWTH:
        raise ConfigError(
            f"{file} can make a text {min(growth, 1e9):,.0f} times as long; use another tokenizer"
        )


def _growth(step: Any) -> float:
    """How many times as long a step of a tokenizer, with the steps inside it, can make a text."""
    if isinstance(step, list):
        return prod(map(_growth, step))
    if not isinstance(step, dict):
        return 1.0
    growth = prod(map(_growth, step.values()))
    if isinstance(content := step.get("content"), str):
        pattern = step.get("pattern")
        literal = pattern.get("String") if isinstance(pattern, dict) else pattern
        growth *= max(1.0, len(content) / len(literal)) if literal else 1.0 + len(content)
    if isinstance(charsmap := step.get("precompiled_charsmap"), str):
        raw = b64decode(charsmap)
        replacements = raw[4 + int.from_bytes(raw[:4], "little") :].split(b"\0")
        growth *= max(1, *(len(one.decode("utf-8", "replace")) for one in replacements))
    if step.get("type") == "ByteLevel":
        growth *= 4  # bytes of a character
    return growth * (1 + len(step.get("prepend") or ""))


def _is_failure(error: BaseException) -> bool:
    """Not Ctrl-C, an exit, a cancelled task or a closed generator; a panic of Rust is a failure."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


class _TimeIsUp(BaseException):
    """Raised in the thread whose time is up; no handler of a library catches it."""


@contextmanager
def _deadline(seconds: float, is_processor_time: bool) -> Iterator[None]:
    watched = _Watched()
    clock = _processor_clock(watched.thread) if is_processor_time else time.monotonic
    end = clock() + seconds

    def watch() -> None:
        until = end
        while not watched.is_over.wait(max(until - clock(), POLL_SECONDS)):
            if clock() >= until:
                watched.stop()
                until = clock() + AGAIN_SECONDS

    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        watched.end()


class _Watched:
    """A thread that may be stopped by another one until it ends by itself."""

    def __init__(self) -> None:
        self.thread = threading.get_ident()
        self.is_over = threading.Event()
        self._lock = threading.Lock()
        self._was_stopped = False

    def stop(self) -> None:
        """Raise `_TimeIsUp` in the thread, soon, unless it has ended."""
        with self._lock:
            if not self.is_over.is_set():
                self._was_stopped = True
                _raise_in(self.thread, _TimeIsUp)

    def end(self) -> None:
        """The thread is not stopped any more. What was raised and has not arrived yet arrives here."""
        while not self.is_over.is_set():
            with suppress(_TimeIsUp), self._lock:
                self.is_over.set()
        if self._was_stopped:
            with suppress(_TimeIsUp):
                # not taken back with None: Python 3.11 would wait for it forever when it is profiled
                _raise_in(self.thread, _TimeIsUp)
                while True:
                    time.sleep(0)


def _processor_clock(thread: int) -> Callable[[], float]:
    """The seconds that the processor has worked in a thread; wall time where they are not counted."""
    if not hasattr(time, "pthread_getcpuclockid"):
        return time.monotonic
    clock = time.pthread_getcpuclockid(thread)
    return lambda: time.clock_gettime(clock)


def _raise_in(thread: int, error: type[BaseException]) -> None:
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(error))
