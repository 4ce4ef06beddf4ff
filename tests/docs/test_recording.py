"""The recording in the README is what its commands print."""

import re
import runpy
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = runpy.run_path(str(ROOT / "tools" / "record_run.py"))
SVG = "{http://www.w3.org/2000/svg}"


def shown(picture: str) -> list[str]:
    """The lines of a recording as text, without the spaces between its parts."""
    groups = ElementTree.fromstring(picture).iter(f"{SVG}g")
    return ["".join(text.text or "" for text in group.iter(f"{SVG}text")) for group in groups]


def test_the_recording_is_what_its_commands_print_now() -> None:
    def timeless(picture: str) -> str:
        return re.sub(r"in \d+ s of calls", "in 0 s of calls", picture)

    recorded = (ROOT / "docs" / "images" / "ask.svg").read_text("utf-8")
    again = SCRIPT["svg"](SCRIPT["recording"]())
    assert timeless(recorded) == timeless(again), "run `make docs`"


def test_the_recording_begins_with_its_first_command() -> None:
    picture = (ROOT / "docs" / "images" / "ask.svg").read_text("utf-8")
    animated = {int(number) for number in re.findall(r"\.l(\d+) \{ animation:", picture)}
    assert animated == set(range(1, len(shown(picture))))


def test_progress_bars_and_erased_lines_are_left_out(tmp_path: Path) -> None:
    command = r"printf 'bar \r\033[2Kfirst\n━━━ 50 %%\n\033[1mlast\033[0m\n'"
    lines = list(SCRIPT["_command_lines"](command, tmp_path))
    assert [line.text for line in lines[1:]] == ["first", "\x1b[1mlast\x1b[0m"]
