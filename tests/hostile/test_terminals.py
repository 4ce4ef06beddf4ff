"""Texts of strangers on terminals and in reports: shown, not obeyed; other outputs keep every byte."""

import csv
import io
import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.table import Table
from rich.text import Text

from memagent.cli.shared.console import EscapingStream, TerminalConsole, escaped
from memagent.data.example import Example, Passage
from memagent.data.formats.files import write_examples
from memagent.eval.report.anchors import read_anchors
from memagent.eval.report.plots import Plot
from memagent.eval.report.report import load_report, markdown_report, notes, report_tables
from memagent.eval.report.tables import csv_text
from tests.hostile.terminal_texts import FORMULAS, MARKDOWN, SEQUENCES, hostile_line
from tests.support.eval_runs import item, make_run

STYLE = re.compile(r"\x1b\[[0-9;]*m")
COUNT = 200
MAIN = "from memagent.cli.main import main; main()"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def is_harmless(text: str) -> bool:
    """Whether nothing is left that a terminal obeys, newlines and tabs apart."""
    return escaped(text) == text


@pytest.mark.parametrize("seed", range(COUNT))
def test_what_is_printed_on_a_terminal_is_escaped(seed: int) -> None:
    line = hostile_line(seed)
    terminal = Terminal()
    print(line, file=EscapingStream(terminal))
    printed = terminal.getvalue()
    assert is_harmless(printed)
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", printed)
    assert json.loads(f'"{_for_json(printed)}"') == line + "\n"


def _for_json(printed: str) -> str:
    whole = re.sub(r"\\(?!u[0-9a-f]{4})", r"\\\\", printed)
    return whole.replace('"', '\\"').replace("\n", "\\n").replace("\t", "\\t")


@pytest.mark.parametrize(
    "text", ["plain\n", "a\tb\r\n", "漢字 é 👩\u200d🚀", "\u200d\u200c", "x" * 9]
)
def test_ordinary_text_is_not_changed(text: str) -> None:
    assert escaped(text) == text


@pytest.mark.parametrize("seed", range(0, COUNT, 10))
def test_consoles_keep_their_own_styles_and_escape_texts(seed: int) -> None:
    line = hostile_line(seed)
    terminal = Terminal()
    console = TerminalConsole(
        file=terminal, force_terminal=True, color_system="standard", width=300
    )
    console.print(line, markup=False, highlight=False, style="red")
    table = Table(box=None)
    table.add_column(Text(line))
    table.add_row(Text(line, style="bold"))
    console.print(table)
    printed = terminal.getvalue()
    assert STYLE.search(printed)
    assert is_harmless(STYLE.sub("", printed))


def test_a_console_that_is_no_terminal_keeps_every_byte() -> None:
    file = io.StringIO()
    console = TerminalConsole(file=file, width=300)
    console.print("a \x1b]0;t b\u202e", markup=False, highlight=False)
    assert file.getvalue() == "a \x1b]0;t b\u202e\n"


def on_terminal(*arguments: str) -> str:
    """What `memagent` prints on a terminal, both streams."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", MAIN, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=theirs,
        stderr=theirs,
        env={**os.environ, "TERM": "xterm-256color", "COLUMNS": "200"},
    )
    os.close(theirs)
    printed = b""
    try:
        while piece := os.read(ours, 65536):
            printed += piece
    except OSError:  # how Linux says that the other side is closed
        pass
    process.wait()
    os.close(ours)
    return printed.decode()


def piped(*arguments: str) -> bytes:
    return subprocess.run(
        [sys.executable, "-c", MAIN, *arguments], capture_output=True, check=True
    ).stdout


def test_an_answer_sets_no_title_and_a_pipe_gets_it_as_it_is(tmp_path: Path) -> None:
    answer = "The code is\x1b]0;owned\x07 12\u202e34."
    replies = tmp_path / "replies.json"
    replies.write_text(json.dumps(["\x1b[2Jmemory", answer]))
    text = tmp_path / "a\x1b]0;name\x07.txt"
    text.write_text("The code is 1234.")
    ask = ("ask", str(text), "-q", "What?", "--engine", f"scripted:{replies}", "--show-memory")
    sizes = ("--tokenizer", "bytes", "--set", "window=4096", "--set", "chunk_tokens=400")
    limits = ("--set", "memory_tokens=400", "--set", "answer_tokens=200")
    shown = on_terminal(*ask, *sizes, *limits)
    assert "The code is\\u001b]0;owned\\u0007 12\\u202e34." in shown
    assert "\\u001b[2Jmemory" in shown
    assert "\x1b]0;" not in shown
    assert "\u202e" not in shown
    assert piped(*ask, *sizes, *limits, "--quiet") == f"{answer}\n".encode()


def test_data_inspect_and_errors_are_escaped_on_a_terminal(tmp_path: Path) -> None:
    evil = "\x1b]52;c;b3duZWQ=\x07\u202e"
    path = tmp_path / "data.jsonl"
    example = Example(
        id=f"1{evil}",
        task="t",
        question=f"What{evil}?",
        documents=(Passage(title=f"t{evil}", text=f"text{evil}"),),
        answers=(f"a{evil}",),
    )
    write_examples(path, [example])
    shown = on_terminal("data", "inspect", str(path))
    assert "What\\u001b]52;c;b3duZWQ=\\u202e?" in shown  # rich leaves the bell out
    assert "\x1b]" not in shown
    assert "\u202e" not in shown
    missing = on_terminal("data", "inspect", str(tmp_path / f"no{evil}.jsonl"))
    assert "no\\u001b]52" in missing
    assert "\x1b]" not in missing


def run_named(folder: Path, name: str) -> Path:
    items = [item("ruler/vt", name, 7000, index, score=0.5) for index in range(2)]
    return make_run(folder, items, suite=name)


@pytest.mark.parametrize("name", SEQUENCES[:8])
def test_reports_are_escaped_on_a_terminal(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from memagent.cli import report as command
    from memagent.cli.main import run

    run_named(tmp_path / "run", f"m{name}")
    terminal = Terminal()
    monkeypatch.setattr(
        command, "TerminalConsole", lambda **given: TerminalConsole(force_terminal=True, **given)
    )
    monkeypatch.setattr(sys, "stdout", EscapingStream(terminal))
    assert run(["report", str(tmp_path / "run"), "--anchors", "none"]) == 0
    printed = STYLE.sub("", terminal.getvalue())
    assert is_harmless(printed)
    assert "ruler/vt" in printed


def written(tmp_path: Path, name: str) -> dict[str, str]:
    """The tables of a report of one run, as `write_report` writes them."""
    report = load_report([str(run_named(tmp_path / "run", name))], anchors=read_anchors("paper"))
    tables = report_tables(report)
    remarks = [*notes(report), f"from {name}"]
    plots = [Plot(name="x", title=name, description="", svg=b"", png=b"")]
    page = markdown_report("Evaluation", remarks, tables, plots)
    return {"report.md": page, **{f"{table.name}.csv": csv_text(table) for table in tables}}


@pytest.mark.parametrize("name", FORMULAS)
def test_no_cell_of_a_csv_file_is_computed(name: str, tmp_path: Path) -> None:
    contents = written(tmp_path, name)
    rows = list(csv.DictReader(io.StringIO(contents["results.csv"])))
    assert {row["series"] for row in rows} == {f"'{name}"}
    assert {float(row["score"]) for row in rows} == {0.5}
    for text in contents.values():
        for cells in csv.reader(io.StringIO(text)) if "," in text.split("\n")[0] else ():
            assert not any(_is_formula(cell) for cell in cells)


def _is_formula(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return cell.lstrip().startswith(("=", "+", "-", "@"))
    return False


@pytest.mark.parametrize("name", MARKDOWN)
def test_names_stay_in_their_cells_of_the_markdown(name: str, tmp_path: Path) -> None:
    page = written(tmp_path, name)["report.md"]
    assert not re.search(r"<[A-Za-z/!?]", page)
    assert "](http" not in page
    assert "](javascript" not in page
    for table in re.findall(r"(?:^\|.*\n)+", page, re.M):
        assert len({_num_cells(line) for line in table.splitlines()}) == 1
    assert page.count("\n| task |") == 1
    assert not re.search(r"^(```|# heading)", page, re.M)


def _num_cells(line: str) -> int:
    """As GitHub splits a row: a backslash and the character after it are one."""
    return re.sub(r"\\[!-/:-@\[-`{-~]", "", line).count("|")


def test_ordinary_reports_keep_their_bytes(tmp_path: Path) -> None:
    contents: dict[str, Any] = written(tmp_path, "reader")
    assert "&#" not in contents["report.md"]
    assert "'" not in contents["results.csv"]
