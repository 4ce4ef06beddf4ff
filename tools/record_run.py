"""Record a run of the command line as an animated SVG: docs/images/ask.svg, from the commands below.

python tools/record_run.py

The commands run in a terminal of their own (a pty), in an empty folder. What they print is drawn as it
is, colours included; progress bars, which change with the clock, are left out. Only the pace at which lines appear is
set here. `recording()` returns the lines, so that a test can run the commands again and compare.
"""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from html import escape
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).resolve().parents[1]
PICTURE = ROOT / "docs" / "images" / "ask.svg"
COMMANDS = (
    "memagent demo --save archive.txt; wc --words archive.txt",
    "memagent ask archive.txt --engine scripted --show-memory --run-dir runs/key \\\n"
    '    -q "Where is the spare key to the clock tower kept?"',
)
COLUMNS = 100
CHAR, LINE, MARGIN, TOP = 8.4, 20, 20, 48  # pixels
TYPING, PAUSE = 0.02, 0.6  # seconds for a character of a command, and before each line it prints
READ_FIRST = 1.0  # seconds to read the first command, which is there from the beginning
COLOURS = {
    1: "#f08080",
    2: "#8fd28a",
    3: "#e5c07b",
    6: "#7fc8d8",
}  # ANSI's red, green, yellow, cyan
TEXT, DIM, PROMPT, SCREEN, FRAME = "#e4e6eb", "#8b919c", "#7aa2f7", "#1d2027", "#2a2e37"

_erased = re.compile(r".*\r?\x1b\[2K", re.S)
_cursor = re.compile(r"\x1b\[\?25[lh]")
_progress = re.compile(r"[━╸╺]")


class Line(NamedTuple):
    """A line on the screen, with its ANSI colours."""

    text: str
    is_typed: bool


def recording() -> list[Line]:
    """Run the commands and return what the screen shows at the end."""
    with tempfile.TemporaryDirectory() as folder:
        return [line for command in COMMANDS for line in _command_lines(command, Path(folder))]


def _command_lines(command: str, folder: Path) -> Iterator[Line]:
    for number, typed in enumerate(command.splitlines()):
        yield Line(typed if number else f"$ {typed}", is_typed=True)
    for printed in _run(command, folder).split("\n"):
        shown = _cursor.sub("", _erased.sub("", printed.rstrip("\r")))
        if shown and not _progress.search(shown):
            yield Line(shown, is_typed=False)


def _run(command: str, folder: Path) -> str:
    """What a command prints on a terminal."""
    ours, theirs = pty.openpty()
    environment = {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "HOME": str(folder),
        "TERM": "xterm-256color",
        "COLUMNS": str(COLUMNS),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    process = subprocess.Popen(
        ["bash", "-euc", command], cwd=folder, env=environment, stdin=theirs, stdout=theirs,
        stderr=theirs,
    )  # fmt: skip
    os.close(theirs)
    printed = bytearray()
    try:
        while piece := os.read(ours, 65536):
            printed += piece
    except OSError:  # Linux ends a pty so when its last writer has gone
        pass
    os.close(ours)
    if process.wait() != 0:
        raise SystemExit(f"{command}\nended with {process.returncode}:\n{printed.decode()}")
    return printed.decode()


def svg(lines: list[Line]) -> str:
    """The lines as an animated picture, which begins with the first command.

    Without animation, or when it has ended, all lines are shown.
    """
    width = round(COLUMNS * CHAR + 2 * MARGIN)
    height = TOP + LINE * len(lines) + MARGIN
    num_first = sum(1 for _ in takewhile(lambda line: line.is_typed, lines))
    body, rules, clock = [], [], READ_FIRST
    for number, line in enumerate(lines):
        if number >= num_first:
            seconds = len(line.text) * TYPING if line.is_typed else 0.0
            clock += 0 if line.is_typed and lines[number - 1].is_typed else PAUSE
            rules.append(_rule(number, line, clock, seconds))
            clock += seconds
        runs = "".join(_runs(line, y=TOP + LINE * number))
        body.append(f'<g class="line l{number}">{runs}</g>')
    lights = "".join(
        f'<circle cx="{MARGIN + 20 * place}" cy="20" r="6" fill="{colour}"/>'
        for place, colour in enumerate(("#e06c60", "#e0b050", "#6cc060"))
    )
    return f"""\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img">
<title>memagent ask reads a text section by section and prints its memory after each</title>
<!-- written by tools/record_run.py from a real run -->
<style>
text {{ font: 14px ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono", monospace; white-space: pre; }}
.bold {{ font-weight: 700; }}
@keyframes appear {{ from {{ opacity: 0; }} to {{ opacity: 1; }} }}
@keyframes type {{ from {{ clip-path: inset(-4px 100% -4px 0); }} to {{ clip-path: inset(-4px 0 -4px 0); }} }}
@media (prefers-reduced-motion: no-preference) {{
{chr(10).join(rules)}
}}
</style>
<rect width="{width}" height="{height}" rx="10" fill="{SCREEN}" stroke="{FRAME}"/>
{lights}
{chr(10).join(body)}
</svg>
"""


def _rule(number: int, line: Line, start: float, seconds: float) -> str:
    if line.is_typed:
        motion = f"type {seconds:.2f}s steps({len(line.text)}) {start:.2f}s backwards"
    else:
        motion = f"appear 0.2s {start:.2f}s backwards"
    return f".l{number} {{ animation: {motion}; }}"


def _runs(line: Line, *, y: int) -> Iterator[str]:
    """The parts of a line that have one style each."""
    console, column = Console(width=1000), 0
    for text, style, _ in Text.from_ansi(line.text).render(console):
        if not text.strip():
            column += len(text)
            continue
        fill = DIM if style and style.dim else TEXT
        if style and style.color:
            fill = COLOURS.get(style.color.number or 0, TEXT)
        weight = ' class="bold"' if style and style.bold else ""
        x, length = MARGIN + column * CHAR, len(text) * CHAR
        yield (
            f'<text x="{x:.1f}" y="{y + 14}" fill="{PROMPT if line.is_typed else fill}"{weight} '
            f'textLength="{length:.1f}" xml:space="preserve">{escape(text)}</text>'
        )
        column += len(text)


if __name__ == "__main__":
    PICTURE.write_text(svg(recording()), encoding="utf-8")
