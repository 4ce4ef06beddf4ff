"""Evidence, continued readings and watched files from outside."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path

from memagent.agent.trace import Trace
from tests.integration.conftest import (
    FACT,
    QUESTION,
    SMALL_SECTIONS,
    Cli,
    Outcome,
    finish,
    story,
)

Call = Callable[..., Outcome]
ASK = ("ask", "--engine", "scripted", *SMALL_SECTIONS, "--quote-tokens", "300")


def test_the_answer_is_followed_by_its_sources_with_file_line_and_words(
    here: Call, book: Path
) -> None:
    outcome = here(*ASK, book, "-q", QUESTION, "--evidence")
    answer, blank, source = outcome.stdout.splitlines()
    assert (answer, blank) == (FACT, "")
    number, _, cited = source.partition(" ")
    assert number[1:-1].isdigit()
    assert cited.startswith(f"{book} line 1 [")
    assert cited.endswith(f'"{FACT}"')


def test_json_has_the_citations_with_their_offsets(here: Call, book: Path) -> None:
    outcome = here(*ASK, book, "-q", QUESTION, "--evidence", "--json", "--quiet")
    result = json.loads(outcome.stdout)
    [citation] = result["citations"]
    assert book.read_text()[citation["start"] : citation["end"]] == FACT == citation["text"]
    assert citation["places"][0]["first_line"] == 1
    assert result["answer"] == FACT
    plain = json.loads(here(*ASK, book, "-q", QUESTION, "--json", "--quiet").stdout)
    assert "citations" not in plain


def test_options_that_contradict_each_other_are_refused_in_one_line(here: Call, book: Path) -> None:
    outcome = here(*ASK, book, "-q", QUESTION, "--items", "--stop-early")
    assert (outcome.code, outcome.said) == (
        2,
        ["memagent: items are counted over the whole text; leave out --stop-early or --items"],
    )
    outcome = here("ask", "-", "-q", QUESTION, "--watch")
    assert outcome.code == 2
    assert "--watch follows files on disk" in outcome.stderr


def test_a_run_is_continued_after_its_file_has_grown(here: Call, cli: Cli, book: Path) -> None:
    first, second = cli.state / "first", cli.state / "second"
    assert here(*ASK, book, "-q", QUESTION, "--run-dir", first).code == 0
    with book.open("a") as file:
        file.write(story(900, seed=9))
    outcome = here("ask", "--continue", first, book, "--run-dir", second)
    assert outcome.stdout == f"{FACT}\n"
    assert f"continuing {first}: 4 sections are not read again" in outcome.stderr
    [trace] = Trace.load(second)
    assert [("carried" in step.flags) for step in trace.steps[:5]] == [True] * 4 + [False]
    again = here("ask", "--continue", second, "--run-dir", cli.state / "third")
    assert (again.code, again.stdout) == (0, f"{FACT}\n")
    assert "0 calls, " in again.stderr


def test_a_continued_run_needs_a_reading_and_is_not_resumed_at_the_same_time(
    here: Call, cli: Cli, book: Path
) -> None:
    assert here("ask", "--continue", cli.state / "none", book).code == 2
    outcome = here("ask", "--continue", "a", "--resume", "b")
    assert (outcome.code, outcome.said) == (
        2,
        [
            "memagent: give --resume for the same text or --continue for one that has changed, "
            "not both"
        ],
    )


def test_a_watched_file_is_read_on_when_it_grows(cli: Cli, tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    log.write_text(story(1500, seed=2))
    run = cli.state / "log"
    watch = ("--watch", "--watch-seconds", "0.2", "--run-dir", run)
    with cli.started(*ASK, log, "-q", QUESTION, *watch) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"The text does not tell.\n"
        with log.open("a") as file:
            file.write(FACT)
        assert process.stdout.readline().decode() == f"{FACT}\n"
        outcome = finish(process, number=signal.SIGINT)
    assert outcome.code == 130
    assert "Traceback" not in outcome.stderr
    [trace] = Trace.load(cli.state / "log-2")
    assert trace.answer == FACT
