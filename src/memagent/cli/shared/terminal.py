"""Text of strangers on a terminal: control characters and bidirectional marks are shown, not obeyed.

An answer, a document or the name of a file may hold sequences that set the title of a terminal, write to
the clipboard or overwrite what was printed. Where standard output or standard error is a terminal they
are written as `\\u001b`; to a file or a pipe every byte is written as it is.

    protect_output()     # print and click.echo, from now on

What rich prints is escaped by `TerminalConsole` in `run_command.py`.
"""

from __future__ import annotations

import io
import re
import sys
from typing import Any, TextIO

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
