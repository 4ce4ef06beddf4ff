"""`memagent report` as a command, and its page in a browser.

The browser is Chromium without a window. It gets the page from disk, with no network to ask.
"""

import json
import re
import subprocess
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest
from PIL import Image

from memagent.eval.report.report import load_report
from memagent.eval.report.rows import RULER_TEN
from memagent.eval.report.tables import interval, rate
from tests.integration.conftest import MEMAGENT, Cli, Outcome
from tests.support.browser import CHROMIUM, needs_chromium
from tests.support.eval_runs import item, lifelike, make_run

Call = Callable[..., Outcome]


class Dom(HTMLParser):
    """What a browser made of a page: tables by caption, text inside plots, what it would fetch."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tables: dict[str, list[list[str]]] = {}
        self.plots: dict[str, list[str]] = {}
        self.addresses: list[str] = []
        self._rows: list[list[str]] = []
        self._caption = self._plot = ""
        self._text: list[str] | None = None
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.addresses += [v for n, v in attrs if n in ("src", "href", "xlink:href") and v]
        if tag == "table":
            self._rows = []
        elif tag == "tr":
            self._rows.append([])
        elif tag == "figure":
            self._plot = values.get("id") or ""
            self.plots[self._plot] = []
        if tag in ("th", "td", "caption", "text"):
            self._text = []

    def handle_data(self, data: str) -> None:
        if self._text is not None:
            self._text.append(data)

    def handle_endtag(self, tag: str) -> None:
        text = "".join(self._text or ())
        if tag in ("th", "td"):
            self._rows[-1].append(text)
        elif tag == "caption":
            self._caption = text
        elif tag == "table":
            self.tables[self._caption] = self._rows
        elif tag == "text":
            self.plots[self._plot].append(text)
        if tag in ("th", "td", "caption", "text"):
            self._text = None


def browse(folder: Path, page: Path, *options: str) -> str:
    """The page's DOM after loading; what Chromium complains about in the page is an error."""
    assert CHROMIUM is not None
    done = subprocess.run(
        [
            CHROMIUM,
            *("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"),
            *("--disable-dev-shm-usage", "--no-first-run", "--enable-logging=stderr"),
            *(f"--user-data-dir={folder / 'profile'}", "--window-size=1300,2600"),
            *options,
            page.resolve().as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "CONSOLE" not in done.stderr, done.stderr
    return done.stdout


def colours(picture: Path) -> tuple[int, tuple[int, ...]]:
    """How many colours a picture has, and the colour of its corner."""
    with Image.open(picture) as image:
        rgb = image.convert("RGB")
        found = rgb.getcolors(maxcolors=1 << 24)
        corner = rgb.getpixel((2, 2))
    assert found is not None
    assert isinstance(corner, tuple)
    return len(found), corner


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    """A finished run of HotpotQA with three methods, and an unfinished one of RULER."""
    questions = lifelike(["hotpotqa"], methods=("reader", "direct", "bm25"), num=12)
    tasks = lifelike(RULER_TEN[:2], num=4, lengths=(8192,))
    return [
        make_run(tmp_path / "questions", questions),
        make_run(tmp_path / "tasks", tasks, num_planned=100),
    ]


@needs_chromium
def test_the_page_opens_in_a_browser_with_its_tables_and_plots(
    here: Call, runs: list[Path], tmp_path: Path
) -> None:
    done = here("report", *runs, "--out", tmp_path / "out", "--title", "Two <runs>")
    assert (done.code, done.stderr) == (0, f"report: {tmp_path / 'out' / 'report.html'}\n")
    page = tmp_path / "out" / "report.html"
    html = browse(tmp_path, page, "--dump-dom")
    dom = Dom(html)
    assert "<h1>Two &lt;runs&gt;</h1>" in html
    assert "Failed items count as wrong: they score 0 and stay in n." in html
    assert "UNFINISHED: tasks has 16 of 100 items" in html

    [caption] = [caption for caption in dom.tables if caption.startswith("Results. Failed items")]
    head, *rows = dom.tables[caption]
    assert head[:6] == ["task", "length", "method", "n", "score in % [95 %]", "failed"]
    assert [row[:4] for row in rows[:4]] == [
        ["hotpotqa", "8K", "reader", "12"],
        ["hotpotqa", "8K", "direct", "12"],
        ["hotpotqa", "8K", "bm25", "12"],
        ["hotpotqa", "32K", "reader", "12"],
    ]
    assert [row[3] for row in rows if row[0].startswith("ruler/")] == ["4*"] * 4
    [beside] = [
        name for name in dom.tables if name.startswith("hotpotqa: score in %, measured here")
    ]
    assert {row[0] for row in dom.tables[beside][1:]} == {"here", "published"}

    assert list(dom.plots)[:3] == [
        "plot-average-ruler",
        "plot-accuracy-hotpotqa",
        "plot-cost-hotpotqa",
    ]
    shown = dom.plots["plot-accuracy-hotpotqa"]
    assert {"reader", "direct", "bm25", "published by others", "RL-MemAgent-14B (v1)"} <= set(shown)
    outside = [a for a in dom.addresses if not a.startswith(("#", "plots/", "data:,"))]
    assert outside == []
    for address in dom.addresses:
        if address.startswith("plots/"):
            assert (page.parent / address).is_file()


@needs_chromium
def test_the_page_is_not_blank_in_light_and_in_dark(
    here: Call, runs: list[Path], tmp_path: Path
) -> None:
    here("report", runs[0], "--out", tmp_path / "out")
    page = tmp_path / "out" / "report.html"
    light, dark = tmp_path / "light.png", tmp_path / "dark.png"
    browse(tmp_path, page, f"--screenshot={light}", "--blink-settings=preferredColorScheme=1")
    browse(tmp_path, page, f"--screenshot={dark}", "--blink-settings=preferredColorScheme=0")
    for picture, corner in ((light, (255, 255, 255)), (dark, (23, 24, 27))):
        num_colours, found = colours(picture)
        assert found == corner
        assert num_colours > 100  # text and lines


def test_tables_are_printed_without_a_folder(here: Call, runs: list[Path]) -> None:
    done = here("report", *runs)
    assert (done.code, done.stderr) == (0, "")
    first = load_report([str(run) for run in runs]).results[0]
    cells = ["hotpotqa", "8K", "reader", "12", interval(first.score), rate((first.num_failed, 12))]
    printed = [re.split(r" {2,}", line.strip()) for line in done.stdout.splitlines()]
    [found] = [line[6:11] for line in printed if line[:6] == cells]
    assert (found[0], found[2:]) == ("0", ["0", "3", "9,692"])
    assert "published-hotpotqa" in done.stdout
    assert "Failed items count as wrong: they score 0 and stay in n." in done.stdout
    assert "UNFINISHED: tasks has 16 of 100 items" in done.stdout


def test_a_closed_pipe_is_no_error(cli: Cli, runs: list[Path]) -> None:
    shell = f"'{MEMAGENT}' report '{runs[0]}' '{runs[1]}' | true; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(
        ["bash", "-c", shell], env=cli.environment(), capture_output=True, text=True, timeout=120
    )
    assert (done.stdout, done.stderr) == ("0\n", "")


def test_json_holds_every_table_by_name(here: Call, runs: list[Path]) -> None:
    report = json.loads(here("report", *runs, "--json").stdout)
    tables = {"runs", "results", "averages", "comparisons", "depth", "published"}
    assert set(report) == {"notes", "unit", *tables}
    assert report["unit"] == "tokens"
    assert [run["state"] for run in report["runs"]] == ["finished", "UNFINISHED"]
    row = report["results"][0]
    assert (row["task"], row["tokens"], row["series"]) == ("hotpotqa", 8192, "reader")
    assert row["low"] < row["score"] < row["high"]


def test_what_an_evaluation_writes_is_what_a_report_reads(here: Call, cli: Cli) -> None:
    asked = ("--task", "ruler/niah_single_1", "--lengths", "2k,4k", "--num", "3", "--seed", "5")
    methods = ("--method", "reader", "--method", "direct", "--engine", "scripted")
    done = here("eval", *asked, *methods, "--set", "length_tokenizer=bytes", "--run-dir", "run")
    assert done.code == 0, done.stderr
    report = json.loads(here("report", "run", "--json").stdout)
    [run] = report["runs"]
    assert (run["run"], run["model"], run["seed"]) == ("run", "scripted", 5)
    assert (run["tokenizer"], run["num_done"], run["state"]) == ("bytes", 12, "finished")
    rows = [(row["series"], row["tokens"], row["num_items"]) for row in report["results"]]
    assert rows == [
        ("reader", 2048, 3),
        ("direct", 2048, 3),
        ("reader", 4096, 3),
        ("direct", 4096, 3),
    ]
    assert [row["score"] for row in report["results"]] == [1.0] * 4
    assert [row["num_items"] for row in report["comparisons"]] == [3, 3, 3]
    assert report["depth"][0]["num_without"] == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nosuch"], "nosuch holds no run: there is no run.json in it"),
        (["run", "run"], "is given twice"),
        (["run", "--anchors", "nosuch"], "there is no file of anchors nosuch; shipped: paper"),
        ([], "Missing argument 'RUN...'"),
    ],
)
def test_mistakes_are_reported_in_one_line(
    here: Call, cli: Cli, arguments: list[str], message: str
) -> None:
    make_run(cli.state / "run", [item("beyond/counting", "reader", 8192, 0)])
    done = here("report", *arguments)
    assert (done.code, done.stdout) == (2, "")
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
