"""What commands with a run have in common: messages on the side, and an orderly stop.

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
import json
import shlex
import signal
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Protocol

import click
from rich.console import Console
from rich.segment import Segment

from memagent.cli.shared.messages import with_options
from memagent.cli.shared.terminal import escaped
from memagent.errors import LimitReached, MemagentError, PromptTooLong, UserError

NOTICE_SECONDS = 0.5
"""After this long a step that shows nothing is named; starting Python takes about a second before it."""


def print_json(value: object) -> None:
    """A JSON result on standard output: plain ASCII where the terminal does not use UTF-8."""
    is_utf8 = (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"
    print(json.dumps(value, ensure_ascii=not is_utf8))


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
