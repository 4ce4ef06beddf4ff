"""Every page of `memagent view` in a browser: Chromium without a window."""

from __future__ import annotations

import json
import signal
import subprocess
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest

from memagent.agent.trace import journal_line
from memagent.documents.document import Document
from memagent.eval.records import regrade
from memagent.run_files import LineFile
from memagent.viewer.api import ViewerApi
from memagent.viewer.app import viewing
from memagent.viewer.export import export_page
from memagent.viewer.library import Library, Texts
from tests.integration.conftest import MEMAGENT, Cli
from tests.support.browser import Browser, Page, needs_chromium
from tests.support.eval_runs import item, make_run
from tests.support.viewer_runs import (
    ANSWER,
    FACTS,
    QUESTION,
    make_evaluation,
    make_reading,
    make_training,
    memories,
    read_story,
    steps,
    story,
    trace_of,
    wondering_reply,
)

pytestmark = needs_chromium
HOSTILE = '<img src=x onerror="window.hit=1"><script>window.hit=1</script>&amp;<b>bold</b>'


class Viewer(NamedTuple):
    """A running viewer and a browser."""

    url: str
    folder: Path
    browser: Browser

    def open(self, address: str = "#/", **options: object) -> Page:
        """A page that has loaded."""
        page = self.browser.open(f"{self.url}/{address}", **options)  # type: ignore[arg-type]
        page.wait_for("document.querySelector('main h1')")
        return page

    @contextmanager
    def beside(self, *paths: Path, texts: Sequence[Path] = ()) -> Iterator[Viewer]:
        """Another viewer in the same browser."""
        with viewing(ViewerApi(Library(paths), Texts(texts))) as url:
            yield Viewer(url, self.folder, self.browser)

    def id_of(self, name: str) -> str:
        with urllib.request.urlopen(f"{self.url}/api/runs") as response:
            runs = json.load(response)["runs"]
        return next(str(run["id"]) for run in runs if run["name"] == name)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("browser")) as browser:
        yield browser


@pytest.fixture(scope="module")
def viewer(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Viewer]:
    folder = tmp_path_factory.mktemp("runs")
    text = tmp_path_factory.mktemp("texts") / "valley.txt"
    text.write_text(story(24))
    make_reading(folder / "reading")
    make_reading(folder / "two-questions", questions=(QUESTION, "When was the school opened?"))
    make_evaluation(folder / "evaluation", num=3)
    make_evaluation(folder / "other", num=3, seed=5)
    make_training(folder / "training", num_steps=10, planned=20)
    with viewing(ViewerApi(Library([folder]), Texts([text]))) as url:
        yield Viewer(url, folder, browser)


def close(page: Page) -> None:
    """No script failed, nothing was refused, and no other host was asked."""
    assert page.problems == []
    hosts = {address.split("/")[2] for address in page.requests if address.startswith("http")}
    assert all(host.startswith("127.0.0.1:") for host in hosts)
    page.call("Page.close")


def test_runs_are_listed_and_filtered(viewer: Viewer) -> None:
    page = viewer.open()
    assert len(page.texts("tr.row")) == 5
    page.click(".chips button", 3)
    assert [text.splitlines()[1] for text in page.texts("tr.row td.main")] == ["training"]
    page.click(".chips button", 0)
    page.press("/")
    for letter in "bell":
        page.press(letter)
    page.wait_for("document.querySelectorAll('tr.row').length === 2")
    assert page.text(".heading p") == "2 of 5 runs"
    close(page)


def test_a_list_is_used_with_keys_alone(viewer: Viewer) -> None:
    page = viewer.open()
    page.press("j")
    page.press("j")
    page.press("k")
    first = page.texts("tr.row .what")[0]
    assert page.value("document.activeElement.innerText") == first
    page.press("Enter")
    page.wait_for("location.hash.startsWith('#/run/') && document.querySelector('.trail .here')")
    page.press("Backspace")
    page.wait_for("document.querySelectorAll('tr.row').length === 5")
    page.press("?")
    assert "the full prompt" in page.text("dialog")
    close(page)


def test_a_reading_shows_each_memory_and_what_changed(viewer: Viewer) -> None:
    page = viewer.open(f"#/run/{viewer.id_of('reading')}?step=9")
    page.wait_for("document.querySelector('.detail ins')")
    assert page.text("h1") == QUESTION
    assert page.text(".answer-card .prose") == ANSWER
    assert len(page.texts(".steps li")) == 25
    assert page.texts("del") == [f"{FACTS[1]} "]
    assert page.texts("ins") == [f". {FACTS[3]}"[:-1]]
    page.press("d")
    page.wait_for("!document.querySelector('.detail ins')")
    assert page.text(".memory") == memories(24)[9]
    page.press("j")
    page.wait_for("document.querySelector('.detail h2').innerText === 'Section 11'")
    assert page.value("location.hash").endswith("?step=10")
    page.press("d")
    page.click(".strip .column rect", 0)
    page.wait_for("document.querySelector('.detail h2').innerText === 'Section 1'")
    close(page)


def test_the_prompt_and_the_section_are_shown_on_demand(viewer: Viewer) -> None:
    page = viewer.open(f"#/run/{viewer.id_of('reading')}?step=3")
    page.wait_for("document.querySelector('details.prompt')")
    assert not any("/prompt" in address for address in page.requests)
    page.press("p")
    page.wait_for("document.querySelector('details.prompt pre')")
    prompt = page.text("details.prompt pre")
    assert prompt.startswith("You are reading a long text one section at a time")
    assert QUESTION in prompt
    assert FACTS[1] in prompt
    page.press("s")
    page.wait_for("document.querySelector('details.section .prose')")
    assert FACTS[1] in page.text("details.section .prose")
    close(page)


def test_quotes_lead_to_their_place_in_the_text(viewer: Viewer, tmp_path: Path) -> None:
    kept = {"evidence": True, "quote_tokens": 100, "ledger_tokens": 400}
    read = read_story(tmp_path, question="Who cast the bell herself?", **kept)
    with viewer.beside(read.run, texts=[read.text]) as here:
        page = here.open(f"#/run/{here.id_of('run')}")
        page.wait_for("document.querySelector('.answer-card .quotes button')")
        quote = page.texts(".answer-card .quotes q")[0]
        assert quote == FACTS[6]
        assert "valley.txt line" in page.text(".answer-card .quotes button")
        page.click(".answer-card .quotes button")
        page.wait_for("document.querySelector('details.section mark')")
        assert page.text("details.section mark") == quote
        assert page.texts(".detail .quotes q")[0] == quote
        close(page)


def test_parallel_rounds_are_a_tree(viewer: Viewer, tmp_path: Path) -> None:
    with viewer.beside(read_story(tmp_path, mode="parallel").run) as here:
        page = here.open(f"#/run/{here.id_of('run')}")
        page.wait_for("document.querySelector('.tree .node.merge')")
        num_nodes = len(page.texts(".steps li"))
        assert page.value("document.querySelectorAll('.tree .node').length") == num_nodes
        assert page.value("document.querySelectorAll('.tree .edge').length") >= 2
        page.click(".tree .node.merge circle")
        page.wait_for("document.querySelector('.inputs .chip')")
        page.press("p")
        page.wait_for("document.querySelector('details.prompt pre')")
        assert '<note sections="1' in page.text("details.prompt pre")
        page.click(".inputs .chip")
        page.wait_for("document.querySelector('.detail h2').innerText.startsWith('Section')")
        assert page.text(".strip-holder h2") == "Rounds"
        assert page.texts(".steps .where")[0].startswith("valley.txt line")
        assert "7 sections" in page.text(".facts")
        close(page)


def test_prompts_of_a_later_round_show_what_was_missing(viewer: Viewer, tmp_path: Path) -> None:
    read = read_story(tmp_path, mode="parallel", script=wondering_reply)
    second = next(step.index for step in read.trace.steps if step.round == 2)
    with viewer.beside(read.run, texts=[read.text]) as here:
        page = here.open(f"#/run/{here.id_of('run')}?step={second}")
        page.wait_for("document.querySelector('details.prompt')")
        page.press("p")
        page.wait_for("document.querySelector('details.prompt pre')")
        prompt = page.text("details.prompt pre")
        assert "Missing: who paid for the bell" in prompt
        assert prompt.strip() in [text.strip() for text in read.sent]
        assert "7 sections" in page.text(".facts")
        close(page)


def test_questions_of_one_reading_are_listed(viewer: Viewer) -> None:
    page = viewer.open(f"#/run/{viewer.id_of('two-questions')}")
    assert page.texts(".cards .what") == [QUESTION, "When was the school opened?"]
    page.click(".cards a", 1)
    page.wait_for("document.querySelector('h1.question')")
    assert page.text("h1") == "When was the school opened?"
    close(page)


def test_a_cell_of_an_evaluation_leads_to_its_items_and_traces(viewer: Viewer) -> None:
    run = viewer.id_of("evaluation")
    page = viewer.open(f"#/run/{run}")
    assert page.texts("table.cells tbody th")[0] == "hotpotqa"
    assert len(page.texts("td.cell")) == 12
    assert len(page.texts("figure.chart")) == 4
    page.click("td.cell a", 0)
    page.wait_for("document.querySelectorAll('table.items tr.row').length === 3")
    assert page.text("h1") == "hotpotqa, reader, 8K"
    scores = page.texts("table.items .score")
    right = scores.index("1")
    assert "1" not in scores[:right]
    page.click("table.items a.go", right)
    page.wait_for("document.querySelector('h1.question')")
    assert page.text(".answer-card .prose") == ANSWER
    assert "Score\n1 by lenient" in page.text(".verdict")
    assert len(page.texts(".steps li")) == 4
    close(page)


def test_scores_of_a_later_grader_are_chosen_above_the_table(
    viewer: Viewer, tmp_path: Path
) -> None:
    path = make_evaluation(tmp_path / "graded", num=3)
    regrade(path, ["exact"])
    with viewer.beside(path) as here:
        page = here.open(f"#/run/{here.id_of('graded')}")
        assert page.texts(".tools .chips button") == ["as evaluated", "by exact"]
        before = page.texts("td.cell b")
        page.click(".tools .chips button", 1)
        page.wait_for("document.querySelector('caption').innerText.includes('by exact')")
        assert page.value("location.hash").endswith("?grader=exact")
        assert page.texts("td.cell b") != before
        page.click("td.cell a", 0)
        page.wait_for("document.querySelector('table.items tr.row')")
        assert page.text("h1") == "hotpotqa, reader, 8K, by exact"
        page.click("table.items a.go", 0)
        page.wait_for("document.querySelector('.verdict')")
        assert "By exact" in page.text(".verdict")
        close(page)


def test_two_evaluations_are_chosen_and_compared(viewer: Viewer) -> None:
    page = viewer.open()
    page.click("table.runs input[type=checkbox]", 0)
    page.click("table.runs input[type=checkbox]", 1)
    page.click(".compare-bar a")
    page.wait_for("document.querySelector('h1')?.innerText === 'Comparison'")
    assert len(page.texts("table.cells tbody tr")) == 12
    assert page.text("table.cells caption") == "Score in % on the 36 items that both have."
    rows = page.texts("table.items tr.row")
    assert rows[0].split("\t")[0] == "1"
    assert rows[0].split("\t")[1] in ("0", "failed")
    close(page)


def test_a_training_run_has_curves_and_groups_side_by_side(viewer: Viewer) -> None:
    page = viewer.open(f"#/run/{viewer.id_of('training')}")
    page.wait_for("document.querySelector('.rollout')")
    captions = page.texts("figcaption")
    assert captions[:3] == ["Reward", "KL to the start", "Sampled tokens per rollout"]
    assert "Throughput, tokens per second" in captions
    assert len(page.texts(".group")) == 2
    assert len(page.texts(".rollout")) == 8
    rewards = [float(text) for text in page.texts(".group:first-of-type .reward")]
    advantages = page.texts(".group:first-of-type .advantage")
    assert len(set(rewards)) == 2
    assert {text[0] for text in advantages} == {"+", "\N{MINUS SIGN}"}
    page.press("k")
    page.wait_for("location.hash.endsWith('step=5')")
    page.click(".rollout header a")
    page.wait_for("document.querySelector('h1.question')")
    assert "Advantage" in page.text(".verdict")
    close(page)


def test_a_validation_shows_its_items(viewer: Viewer) -> None:
    page = viewer.open(f"#/run/{viewer.id_of('training')}/items?validation=0")
    page.wait_for("document.querySelectorAll('table.items tr.row').length === 18")
    page.click("table.items a.go")
    page.wait_for("document.querySelector('.verdict')")
    assert "validation 0" in page.text(".trail")
    close(page)


def test_steps_appear_while_a_run_goes_on(viewer: Viewer) -> None:
    path = make_reading(viewer.folder / "running", num_sections=4, is_complete=False)
    page = viewer.open(f"#/run/{viewer.id_of('running')}")
    page.wait_for("document.querySelectorAll('.steps li').length === 4")
    assert page.text("#live") == "live"
    last = steps(Document.from_text(story(4)), 4)[-1]
    with LineFile(path / "steps.jsonl", checksums=True) as journal:
        journal.append(journal_line(0, last))
    page.wait_for("document.querySelectorAll('.steps li').length === 5")
    page.wait_for("document.querySelector('.answer-card .prose')")
    assert page.text(".answer-card .prose") == ANSWER
    close(page)


def test_html_and_script_in_texts_are_shown_as_text(viewer: Viewer, tmp_path: Path) -> None:
    text = f"{HOSTILE} {story(2)}"
    document = Document.from_text(text, source=HOSTILE)
    path = make_reading(
        tmp_path / "hostile", num_sections=2, questions=(HOSTILE,), is_complete=False, text=text
    )
    (path / "steps.jsonl").unlink()
    with LineFile(path / "steps.jsonl", checksums=True) as journal:
        for step in steps(document, 2, answer=HOSTILE):
            told = replace(step, memory=HOSTILE, reply=HOSTILE, reasoning=HOSTILE)
            journal.append(journal_line(0, told))
    trace = trace_of(2, HOSTILE, question=HOSTILE)
    made = item(
        HOSTILE, HOSTILE, 8192, 0, answer=HOSTILE, answers=(HOSTILE,), score=0.0, trace=trace
    )
    make_run(tmp_path / "evaluation", [made], suite=HOSTILE, model=HOSTILE)
    with viewer.beside(tmp_path) as here:
        reading, evaluation = here.id_of("hostile"), here.id_of("evaluation")
        for address, shown in {
            "#/": ".what",
            f"#/run/{reading}?step=0": "h1",
            f"#/run/{reading}?step=2": ".answer-card .prose",
            f"#/run/{evaluation}": "h1",
            f"#/run/{evaluation}/items": "a.go",
            f"#/run/{evaluation}/trace/i0": "h1",
        }.items():
            page = here.open(address)
            assert HOSTILE in page.text(shown)
            page.press("p")
            assert page.value("window.hit === undefined")
            assert (
                page.value(
                    "document.querySelectorAll('main img, main script, main b:not(.cell b):not(.delta b)').length"
                )
                == 0
            )
            close(page)

    (tmp_path / "page.html").write_text(export_page(ViewerApi(Library([tmp_path]))).html)
    page = viewer.browser.open((tmp_path / "page.html").as_uri() + f"#/run/{reading}")
    page.wait_for("document.querySelector('.detail .prose')")
    assert page.text(".answer-card .prose") == HOSTILE
    assert page.value("window.hit === undefined")
    close(page)


def test_the_policy_refuses_scripts_and_html_in_the_page(viewer: Viewer) -> None:
    page = viewer.open()
    page.value(
        "document.head.append(Object.assign(document.createElement('style'), {textContent: 'h1{color:red}'}))"
    )
    refused = page.value(
        "(() => { try { document.body.innerHTML = '<b>x</b>'; return false } catch { return true } })()"
    )
    assert refused
    blocked = page.value("fetch('http://127.0.0.2:9/').then(() => false).catch(() => true)")
    assert blocked
    assert any("Content Security Policy" in problem for problem in page.problems)
    page.call("Page.close")


@pytest.mark.parametrize("name", ["reading", "evaluation", "training", "evaluation/items"])
def test_a_narrow_screen_needs_no_sideways_scrolling(viewer: Viewer, name: str) -> None:
    name, _, part = name.partition("/")
    page = viewer.open(f"#/run/{viewer.id_of(name)}/{part}", width=380, height=800)
    assert page.value("document.documentElement.scrollWidth") <= 380
    if part:
        page.wait_for("document.querySelector('table.items tr.row')")
        assert page.value("document.querySelector('.scroll').scrollWidth") <= 380
    close(page)


def test_light_and_dark_follow_the_system_and_can_be_set(viewer: Viewer) -> None:
    page = viewer.open(dark=True)
    colour = "getComputedStyle(document.documentElement).backgroundColor"
    assert page.value(colour) == "rgb(22, 23, 25)"
    page.press("t")
    assert page.value(colour) == "rgb(255, 255, 255)"
    page.press("t")
    assert page.value(colour) == "rgb(22, 23, 25)"
    page.press("t")
    close(page)


@pytest.mark.parametrize(
    ("name", "shown"),
    [("reading", ".detail .prose"), ("evaluation", "table.cells"), ("training", ".rollout")],
)
def test_an_exported_page_needs_no_server(
    viewer: Viewer, cli: Cli, tmp_path: Path, name: str, shown: str
) -> None:
    done = cli("view", viewer.folder / name, "--export", tmp_path / "page.html")
    assert (done.code, done.stdout, done.stderr) == (0, f"{tmp_path / 'page.html'}\n", "")
    page = viewer.browser.open((tmp_path / "page.html").as_uri())
    page.wait_for(f"document.querySelector('{shown}')")
    if name == "reading":
        page.press("p")
        page.wait_for("document.querySelector('details.prompt pre')")
    if name == "evaluation":
        page.click("td.cell a")
        page.wait_for("document.querySelector('table.items a.go')")
        page.click("table.items a.go")
        page.wait_for("document.querySelector('.verdict')")
    assert [
        address for address in page.requests if not address.startswith(("file:", "data:"))
    ] == []
    close(page)


def test_the_command_serves_a_folder_until_it_is_interrupted(viewer: Viewer, cli: Cli) -> None:
    process = subprocess.Popen(
        [MEMAGENT, "view", str(viewer.folder), "--port", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=cli.environment(),
    )
    assert process.stdout is not None
    try:
        page = viewer.browser.open(process.stdout.readline().strip())
        page.wait_for("document.querySelectorAll('tr.row').length >= 5")
        close(page)
    finally:
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=30)
    assert process.returncode == 0
    assert stderr == "showing runs to this machine only; Ctrl-C ends it\n"
