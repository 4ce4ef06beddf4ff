"""What commands print, and how they stop: messages on the side, escaped for terminals, and an orderly end.

    console = CommandConsole(is_quiet=options.quiet)
    console.report("reading book.txt")                     # standard error; nothing with --quiet
    with resumable(run, console, kept="all answers are kept"):
        records = await evaluate(...)
    print_results(records)

Ctrl-C, SIGTERM, a limit or a failing engine ends the work inside `resumable` with two lines: why it
stopped, and what was kept with the command that resumes it. The command then ends with exit code 130,
4 or 3; what stands after the block is not reached.
"""

from __future__ import annotations

import asyncio
import io
import json
import re
import shlex
import signal
import sys
import threading
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol, TextIO

import click
from rich.console import Console
from rich.segment import Segment

from memagent.errors import LimitReached, MemagentError, PromptTooLong, UserError

# --- texts of strangers on a terminal -------------------------------------------------------------

_unsafe = re.compile(
    "\r(?!\n)|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f"
    "\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069]"
)
"""Control characters but tab and newline, and marks that change the direction of text."""


def escaped(text: str) -> str:
    """A text whose control characters are shown as `\\u001b`, which JSON reads back as they were."""
    return _unsafe.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def escaped_for(stream: TextIO, text: str) -> str:
    """The text as it may be written to a stream: escaped for a terminal."""
    return escaped(text) if stream.isatty() else text


class OutputLost(Exception):
    """Standard output takes no more, as on a full disk. It is no error of the work that prints."""


class _Output(io.FileIO):
    """Standard output, whose errors are told from those of other files."""

    def write(self, data: Any) -> int | None:  # type: ignore[override]
        try:
            return super().write(data)
        except BrokenPipeError:
            raise
        except OSError as error:
            raise OutputLost(f"standard output cannot be written: {error.strerror}") from None


def protect_output() -> None:
    """From now on escape what is printed to a terminal, and raise OutputLost where nothing can be printed."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        output: Any = _Output(sys.stdout.fileno(), "w", closefd=False)
        sys.stdout = io.TextIOWrapper(
            output if sys.stdout.write_through else io.BufferedWriter(output),
            encoding=sys.stdout.encoding,
            errors="backslashreplace",  # an answer may not fit the terminal
            line_buffering=sys.stdout.line_buffering,
            write_through=sys.stdout.write_through,
        )
    if sys.stdout.isatty():
        sys.stdout = EscapingStream(sys.stdout)


class EscapingStream(io.TextIOBase):
    """A terminal that texts are printed to. It has no `buffer`, which would be a way around."""

    def __init__(self, terminal: TextIO) -> None:
        self.rich_proxied_file = terminal
        """What rich writes to: its consoles escape texts themselves."""

    def write(self, text: str) -> int:
        """Print a text."""
        self.rich_proxied_file.write(escaped(text))
        return len(text)

    def flush(self) -> None:
        """Put on the screen what was printed."""
        self.rich_proxied_file.flush()

    def isatty(self) -> bool:
        """True: others are not wrapped."""
        return self.rich_proxied_file.isatty()

    def fileno(self) -> int:
        """The descriptor of the terminal."""
        return self.rich_proxied_file.fileno()

    def writable(self) -> bool:
        """True."""
        return True

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """The encoding of the terminal."""
        return self.rich_proxied_file.encoding

    @property
    def errors(self) -> str | None:  # type: ignore[override]
        """What is done about characters that the terminal does not have."""
        return self.rich_proxied_file.errors


def print_rendered(text: str) -> None:
    """Print what a `TerminalConsole` rendered, styles included."""
    stream: Any = getattr(sys.stdout, "rich_proxied_file", sys.stdout)
    print(text, end="", file=stream)


# --- settings in messages, written as options -----------------------------------------------------

_setting = re.compile(r"`([a-z_][a-z0-9_]*(?:\.[a-z0-9_-]+)*)(?:=([^`]*))?`")

TABLE_METAVAR = "[NAME=]PATH"
"""The placeholder of options that set entries of a table."""


def with_options(message: str, command: click.Command | None = None) -> str:
    """A message with its settings as options of a command, by default the running one."""
    if command is None:
        context = click.get_current_context(silent=True)
        command = context.command if context else None
    options = _options(command) if command else {}
    return _setting.sub(lambda match: _spelled(match[1], match[2], options), message)


def _options(command: click.Command) -> dict[str, click.Option]:
    """The options of a command by the settings they set: by name, else by flag, else all that `--set` sets."""
    options = [param for param in command.params if isinstance(param, click.Option)]
    by_set = {name: one for one in options for name in getattr(one, "kinds", ())}
    by_name = {option.name: option for option in options if option.name}
    by_flag = {
        flag.lstrip("-").replace("-", "_"): option for option in options for flag in option.opts
    }
    return {**by_set, **by_name, **by_flag}


def _spelled(name: str, value: str | None, options: dict[str, click.Option]) -> str:
    option = options.get(name)
    assignment = name if value is None else f"{name}={value}"
    if option is not None and name in getattr(option, "kinds", ()):
        return f"--set {assignment}"
    if option is None:
        table, _, entry = assignment.partition(".")
        if table in options and entry and options[table].metavar == TABLE_METAVAR:
            return f"{max(options[table].opts, key=len)} {entry}"
        return f"--set {assignment}" if value and "." in name and "set" in options else assignment
    flag = max(option.opts, key=len)
    if not option.is_flag:
        return flag if value is None else f"{flag} {value}"
    is_off = value is not None and value.lower() == "false"
    return option.secondary_opts[0] if is_off and option.secondary_opts else flag


NOTICE_SECONDS = 0.5
"""After this long a step that shows nothing is named; starting Python takes about a second before it."""


def print_json(value: object) -> None:
    """A JSON result on standard output: plain ASCII where the terminal does not use UTF-8."""
    is_utf8 = (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"
    print(json.dumps(value, ensure_ascii=not is_utf8))


def aligned(rows: Sequence[Sequence[str]], *, right: Collection[int] = ()) -> list[str]:
    """Rows as lines in columns; the columns of these numbers to the right."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = enumerate(zip(row, widths, strict=True))
        lines.append("  ".join(c.rjust(w) if n in right else c.ljust(w) for n, (c, w) in cells))
    return [line.rstrip() for line in lines]


class TerminalConsole(Console):
    """A console of rich that escapes texts on a terminal. Styles and movements of rich itself stay."""

    def _render_buffer(self, buffer: Iterable[Segment]) -> str:
        if self.is_terminal:
            buffer = [
                one if one.control else Segment(escaped(one.text), one.style) for one in buffer
            ]
        return super()._render_buffer(buffer)


class CommandConsole:
    """Standard error of a command. Standard output is for results."""

    def __init__(self, *, is_quiet: bool = False) -> None:
        self.is_quiet = is_quiet
        self._num_printed = 0
        self.rich = TerminalConsole(stderr=True)

    def report(self, text: str) -> None:
        """A line about what happens, its settings as options; left out with --quiet."""
        if not self.is_quiet:
            self.print(with_options(text), style="dim")

    @contextmanager
    def notice(self, text: str) -> Iterator[None]:
        """Report what takes longer than half a second and prints nothing meanwhile."""
        num_before = self._num_printed

        def report() -> None:
            if self._num_printed == num_before:
                self.report(text)

        timer = threading.Timer(NOTICE_SECONDS, report)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def busy(self, text: str) -> AbstractContextManager[object]:
        """Show what is being done: moving on a terminal, elsewhere as a line if it takes long."""
        return self.rich.status(text) if self.rich.is_terminal else self.notice(text)

    def print(self, text: str, *, style: str | None = None) -> None:
        """A line as it is, with --quiet too."""
        self._num_printed += 1
        self.rich.print(text, highlight=False, markup=False, soft_wrap=True, style=style)


class KeptRun(Protocol):
    """What can be resumed."""

    @property
    def path(self) -> Path | None:
        """The run directory."""
        ...

    def discard_if_empty(self) -> bool:
        """Remove a run in which nothing was finished; whether that was so."""
        ...


@contextmanager
def resumable(
    run: KeptRun, console: CommandConsole, *, kept: str, command: str | None = None
) -> Iterator[None]:
    """Work whose results are in a run directory; to be entered inside an event loop.

    `kept` says what the run holds, such as "all answers are kept"; `command` resumes it, by default the
    running one. An error of the user is raised again if nothing was finished: there is no run then.
    """
    stop_like_ctrl_c()
    try:
        yield
    except asyncio.CancelledError:
        reason, advice, exit_code = "interrupted", "", INTERRUPTED
    except MemagentError as error:
        if isinstance(error, UserError) and run.discard_if_empty():
            raise
        advice = "raise the limit and " if isinstance(error, LimitReached) else ""
        if isinstance(error, PromptTooLong):  # a run keeps its sizes
            advice = "with a larger window of the server, "
        reason, exit_code = str(error), error.exit_code
    else:
        return
    command = command or click.get_current_context().command_path
    console.print(f"memagent: {with_options(reason)}")
    if run.path is not None and not run.path.exists():
        console.print(f"{run.path} was deleted meanwhile: nothing is kept")
    else:
        path = shlex.quote(str(run.path))
        console.print(f"{kept}; {advice}resume with: {command} --resume {path}")
    raise click.exceptions.Exit(exit_code)


# --- signals that end a command -------------------------------------------------------------------


INTERRUPTED = 130
"""Exit code after Ctrl-C or SIGTERM."""


def stop_like_ctrl_c(number: int = signal.SIGTERM) -> None:
    """Cancel the running task on a signal, as Ctrl-C does."""
    task = asyncio.current_task()
    assert task is not None
    with suppress(NotImplementedError):  # Windows has no signal handlers in its event loop
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
