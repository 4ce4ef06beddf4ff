"""`memagent ask` from outside: what it prints, what it calls, what it keeps to itself."""

import gzip
import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from memagent.agent.trace import Trace
from tests.integration.conftest import (
    CODE,
    FACT,
    MEMAGENT,
    QUESTION,
    SMALL_SECTIONS,
    Cli,
    Outcome,
    finish,
    num_lines,
    story,
    wait_until,
)
from tests.support.handlers import Handler, listening
from tests.support.loopback import NOTHING_FOUND, Endpoint, running

Call = Callable[..., Outcome]
IS_FORKED = True
UNANSWERABLE = 'What is the code of "opal-1"?'
KEY = "sk-a-very-distinctive-secret-4711"
TEMPLATE_TOKENS = 64
"""What is allowed for a chat template that the tokenizer does not know."""


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoint]:
    """An endpoint for all tests here that need no other; reads by keyword."""
    with running(log=tmp_path_factory.mktemp("endpoint") / "calls.jsonl") as running_endpoint:
        yield running_endpoint


@pytest.fixture
def ask(endpoint: Endpoint) -> tuple[str, ...]:
    """The beginning of a command that reads in small sections; the model is left to the endpoint."""
    return ("ask", "--base-url", endpoint.base_url, *SMALL_SECTIONS)


# --- what is printed ------------------------------------------------------------------------------


def test_the_answer_is_alone_on_standard_output_and_the_rest_on_standard_error(
    cli: Cli, ask: tuple[str, ...], book: Path
) -> None:
    outcome = cli.as_users_start_it(*ask, book, "-q", QUESTION)

    assert (outcome.code, outcome.stdout) == (0, f"{CODE}\n")
    [run] = cli.runs
    reading, usage, where = outcome.said
    assert reading == f"reading {book}; the run is kept in {run}"
    assert usage.startswith("6 calls, ")
    assert where == f"run: {run}"


def test_quiet_leaves_standard_error_empty(cli: Cli, ask: tuple[str, ...], book: Path) -> None:
    outcome = cli.as_users_start_it(*ask, book, "-q", QUESTION, "--quiet")

    assert outcome == (0, f"{CODE}\n", "")


def test_json_has_the_answer_the_question_the_usage_and_the_trace(
    cli: Cli, ask: tuple[str, ...], book: Path, endpoint: Endpoint
) -> None:
    num_before = endpoint.num_calls()
    outcome = cli(*ask, book, "-q", QUESTION, "--json")
    calls = endpoint.calls()[num_before:]

    result = json.loads(outcome.stdout)
    assert set(result) == {"answer", "question", "trace", "usage", "num_chunks"}
    assert result["answer"] == CODE
    assert result["question"] == QUESTION
    assert result["num_chunks"] == 5
    assert result["usage"]["calls"] == len(calls) == 6
    assert result["usage"]["prompt_tokens"] == sum(call["prompt_chars"] // 4 for call in calls)
    trace = Trace.from_json(json.dumps(result["trace"]))
    assert [trace] == Trace.load(cli.runs[0])
    assert "".join(section_texts(trace, book.read_text())) == book.read_text()
    assert trace.memory == FACT


def test_several_answers_stand_under_their_questions(
    cli: Cli, ask: tuple[str, ...], book: Path
) -> None:
    outcome = cli(*ask, book, "-q", UNANSWERABLE, "-q", QUESTION)

    expected = f"{UNANSWERABLE}\nunknown\n\n{QUESTION}\n{CODE}\n"
    assert outcome.stdout == expected


def test_show_memory_shows_each_change_on_standard_error(
    cli: Cli, ask: tuple[str, ...], book: Path
) -> None:
    outcome = cli(*ask, book, "-q", QUESTION, "--show-memory")

    assert outcome.stdout == f"{CODE}\n"
    lines = outcome.said
    headings = [line for line in lines if line.startswith("memory after section ")]
    assert [heading.split()[3] for heading in headings] == ["1", "5"]
    assert headings[0].startswith(f"memory after section 1 ({book} line 1 [0:")
    assert lines.count(f"+ {FACT}") == 1
    assert lines.count(f"- {NOTHING_FOUND}") == lines.count(f"+ {NOTHING_FOUND}") == 1


@pytest.mark.parametrize("options", [(), ("--json",), ("--dry-run",)], ids=str)
def test_a_reader_that_leaves_early_causes_no_traceback(
    cli: Cli, ask: tuple[str, ...], book: Path, options: tuple[str, ...]
) -> None:
    readable, writable = os.pipe()
    os.close(readable)
    try:
        done = subprocess.run(
            [MEMAGENT, *ask, book, "-q", QUESTION, "--quiet", *options],
            stdout=writable,
            stderr=subprocess.PIPE,
            env=cli.environment(),
            timeout=60,
        )
    finally:
        os.close(writable)

    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.parametrize("environment", [{}, {"PYTHONUNBUFFERED": "1"}], ids=["buffered", "not"])
def test_a_full_output_is_one_line_after_the_place_of_the_answer(
    cli: Cli, ask: tuple[str, ...], book: Path, tmp_path: Path, environment: dict[str, str]
) -> None:
    run = tmp_path / "run"
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [MEMAGENT, *ask, book, "-q", QUESTION, "--run-dir", run],
            stdout=full,
            stderr=subprocess.PIPE,
            env=cli.environment(environment),
            timeout=60,
        )
    assert done.returncode == 1
    assert done.stderr.decode().splitlines()[-2:] == [
        f"run: {run}",
        "memagent: standard output cannot be written: No space left on device",
    ]
    shown = cli("runs", "show", run)
    assert CODE in shown.stdout


def test_a_closed_output_is_refused_before_the_first_call(
    cli: Cli, endpoint: Endpoint, ask: tuple[str, ...], book: Path
) -> None:
    num_before = endpoint.num_calls()
    done = subprocess.run(
        ["sh", "-c", '"$@" >&-', "sh", MEMAGENT, *ask, book, "-q", QUESTION],
        capture_output=True,
        env=cli.environment(),
        timeout=60,
    )
    assert (done.returncode, done.stderr.decode().splitlines()) == (
        2,
        ["memagent: standard output is closed; redirect it, to /dev/null if need be"],
    )
    assert endpoint.num_calls() == num_before


def test_an_answer_is_printed_where_the_terminal_lacks_its_letters(
    cli: Cli, ask: tuple[str, ...], tmp_path: Path
) -> None:
    (tmp_path / "book.txt").write_text('The code of "amber-17" is 漢.')
    command = (*ask, tmp_path / "book.txt", "-q", QUESTION)

    outcome = cli.as_users_start_it(*command, env={"PYTHONIOENCODING": "ascii"})

    assert (outcome.code, outcome.stdout) == (0, "\\u6f22\n")


# --- what it will cost, and limits ----------------------------------------------------------------


def test_a_dry_run_calls_nothing_and_counts_what_the_real_run_sends(
    cli: Cli, book: Path, tmp_path: Path
) -> None:
    # a memory of 7 bytes takes the place of "(empty)", so that all prompts keep their planned size
    with running(log=tmp_path / "calls.jsonl", reply="fixed", reply_chars=7) as endpoint:
        command = ("ask", book, "-q", QUESTION, "-q", "Who?", *SMALL_SECTIONS)
        command = (*command, "--base-url", endpoint.base_url, "--json")
        prices = ("--set", "price_in=2", "--set", "price_out=10")
        dry = cli(*command, "--dry-run", *prices)
        num_dry_calls = endpoint.num_calls()
        real = cli(*command)
        calls = endpoint.calls()

    assert num_dry_calls == 0
    assert len(json.loads(real.stdout)) == 2
    plan = json.loads(dry.stdout)
    prompt_tokens = sum(call["prompt_chars"] + TEMPLATE_TOKENS for call in calls)
    assert plan == {
        "num_questions": 2,
        "num_chunks": 5,
        "num_calls": len(calls),
        "max_calls": len(calls),
        "calls_at_once": 2,
        "prompt_tokens": prompt_tokens,
        "max_memory_tokens": 2 * 5 * 400,
        "max_completion_tokens": 2 * (5 * 400 + 200),
        "is_exact": False,
        "min_cost": pytest.approx(2e-6 * prompt_tokens),
        "max_cost": pytest.approx(2e-6 * (prompt_tokens + 4000) + 10e-6 * 4400),
    }


def test_a_dry_run_prints_its_numbers_and_keeps_no_run(
    cli: Cli, ask: tuple[str, ...], book: Path, endpoint: Endpoint
) -> None:
    num_before = endpoint.num_calls()
    outcome = cli(*ask, book, "-q", QUESTION, "--dry-run")

    numbers = dict(line.rsplit(maxsplit=1) for line in outcome.stdout.splitlines()[:2])
    assert numbers == {"sections": "5", "calls": "6"}
    assert outcome.said == []
    assert cli.runs == []
    assert endpoint.num_calls() == num_before


def test_a_limit_on_calls_stops_there_and_a_higher_one_finishes(
    cli: Cli, ask: tuple[str, ...], book: Path, endpoint: Endpoint
) -> None:
    num_before = endpoint.num_calls()
    stopped = cli(*ask, book, "-q", QUESTION, "--max-calls", "3")
    num_first = endpoint.num_calls() - num_before
    [run] = cli.runs
    still = cli("ask", "--resume", run)
    finished = cli("ask", "--resume", run, "--max-calls", "6")
    num_all = endpoint.num_calls() - num_before

    assert (stopped.code, stopped.stdout) == (4, "")
    assert "memagent: stopped after 3 calls: --max-calls 3" in stopped.stderr
    assert f"raise the limit and resume with: memagent ask --resume {run}" in stopped.stderr
    assert num_first == 3
    assert still.code == 4, "the limit holds over resumptions"
    assert (finished.code, finished.stdout) == (0, f"{CODE}\n")
    assert num_all == 6


def test_a_limit_on_calls_holds_for_all_questions_together(
    here: Call, ask: tuple[str, ...], book: Path, endpoint: Endpoint, cli: Cli
) -> None:
    num_before = endpoint.num_calls()
    questions = ("-q", QUESTION, "-q", UNANSWERABLE, "-q", "Who?")
    stopped = here(*ask, book, *questions, "--max-calls", "7")
    num_first = endpoint.num_calls() - num_before
    finished = here("ask", "--resume", cli.runs[0], "--max-calls", "18", "--json")

    assert (stopped.code, stopped.stdout, num_first) == (4, "", 7)
    assert sum(len(trace.steps) for trace in Trace.load(cli.runs[0])) == 18
    assert [result["answer"] for result in json.loads(finished.stdout)] == [
        CODE,
        "unknown",
        "unknown",
    ]
    assert endpoint.num_calls() - num_before == 18


def test_a_limit_on_cost_is_not_passed_even_by_the_longest_reply(
    cli: Cli, ask: tuple[str, ...], book: Path, endpoint: Endpoint
) -> None:
    # one unit per completion token; a reply is NOTHING_FOUND (4 tokens) and could be 400
    prices = ("--set", "price_in=0", "--set", "price_out=1000000")
    num_before = endpoint.num_calls()
    stopped = cli(*ask, book, "-q", UNANSWERABLE, "--max-cost", "410", *prices)
    num_first = endpoint.num_calls() - num_before
    finished = cli("ask", "--resume", cli.runs[0], "--max-cost", "500")

    assert (stopped.code, stopped.stdout) == (4, "")
    assert num_first == 3  # 0 + 400, 4 + 400 and 8 + 400 are within 410; 12 + 400 is not
    assert "stopped at a cost of 12.0000" in stopped.stderr
    assert "--max-cost 410" in stopped.stderr
    assert (finished.code, finished.stdout) == (0, "unknown\n")
    assert "cost 23.0000" in finished.stderr  # five times 4, and 3 for the answer


def test_the_advice_after_a_prompt_that_is_too_long_for_the_server_can_be_followed(
    cli: Cli, tmp_path: Path
) -> None:
    """A server that counts more tokens than we do refuses a section in the middle of the text."""
    text = tmp_path / "book.txt"
    text.write_text(story(20_000, seed=1) + "a b c d e f g h. " * 2000 + FACT)
    run = tmp_path / "run"
    with running(log=tmp_path / "narrow.jsonl", context_window=5000) as narrow:
        begin = ("ask", text, "-q", QUESTION, "--base-url", narrow.base_url)
        refused = cli(*begin, "--run-dir", run)
        again = cli(*begin, "--window", "5000")
    assert refused.code == 2
    why, what = refused.stderr.splitlines()[-2:]
    assert why.startswith(
        "memagent: the prompt is too long for test-model (HTTP 400: This model's max"
    )
    assert why.endswith(
        "); raise the window of the server, or begin a new run with a smaller --window"
    )
    assert what == (
        "what was read is kept; with a larger window of the server, resume with: "
        f"memagent ask --resume {run}"
    )
    assert (again.code, again.stdout) == (0, f"{CODE}\n")
    with running(log=tmp_path / "wide.jsonl") as wide:
        resumed = cli("ask", "--resume", run, "--base-url", wide.base_url)
    assert (resumed.code, resumed.stdout) == (0, f"{CODE}\n")


# --- what is read ---------------------------------------------------------------------------------


def test_a_text_from_standard_input_is_kept_for_resuming(
    cli: Cli, book: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    with running(log=tmp_path / "calls.jsonl", latency_ms=60) as endpoint:
        begin = ("ask", "-", "-q", QUESTION, "--base-url", endpoint.base_url, *SMALL_SECTIONS)
        with (
            book.open("rb") as stdin,
            cli.started(*begin, "--run-dir", run, stdin=stdin) as process,
        ):
            wait_until(lambda: num_lines(run / "steps.jsonl") >= 2)
            finish(process, number=signal.SIGKILL)
        num_done = num_lines(run / "steps.jsonl")
        outcome = cli("ask", "--resume", run)
        num_calls = endpoint.num_calls()

    assert num_done < 6
    elsewhere = cli("ask", "--resume", run.relative_to(tmp_path), cwd=tmp_path)
    assert (elsewhere.code, elsewhere.stdout) == (0, f"{CODE}\n")
    assert (outcome.code, outcome.stdout) == (0, f"{CODE}\n")
    assert num_calls <= 6 + 1
    assert (run / "stdin").read_bytes() == book.read_bytes()
    private = [path.name for path in run.iterdir() if path.stat().st_mode & 0o077]
    assert private == [], "others may not read what was piped in"


def test_several_files_a_folder_and_a_gzipped_file_are_read_as_one_text(
    cli: Cli, ask: tuple[str, ...], tmp_path: Path
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "a.txt").write_text(story(300, seed=1))
    (folder / "b.md").write_text(story(300, seed=2, fact='The code of "opal-1" is 7.'))
    (folder / "c.bin").write_bytes(b"\0\1\2\3" * 50)
    (tmp_path / "d.txt.gz").write_bytes(gzip.compress(story(300, seed=3, fact=FACT).encode()))
    (tmp_path / "e.txt").write_text(story(300, seed=4))

    command = (*ask, "folder", "d.txt.gz", "e.txt", "-q", QUESTION, "-q", UNANSWERABLE, "--json")
    outcome = cli(*command, cwd=tmp_path)

    first, second = json.loads(outcome.stdout)
    assert (first["answer"], second["answer"]) == (CODE, "7")
    steps = first["trace"]["steps"][:-1]
    sources = [place["source"] for step in steps for place in step["section"]["places"]]
    assert list(dict.fromkeys(sources)) == ["folder/a.txt", "folder/b.md", "d.txt.gz", "e.txt"]
    assert "skipped folder/c.bin: is binary" in outcome.stderr


# --- where it is sent, and with which key ---------------------------------------------------------


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoint]:
    """An endpoint that wants KEY."""
    log = tmp_path_factory.mktemp("guarded") / "calls.jsonl"
    with running(log=log, api_key=KEY) as running_endpoint:
        yield running_endpoint


@pytest.fixture
def note(tmp_path: Path) -> Path:
    """A text of one section."""
    path = tmp_path / "note.txt"
    path.write_text(FACT)
    return path


def test_the_key_is_nowhere_in_what_is_printed_or_kept(
    cli: Cli, guarded: Endpoint, note: Path
) -> None:
    command = ("ask", note, "-q", QUESTION, *SMALL_SECTIONS, "--base-url", guarded.base_url)
    outcome = cli(*command, "--set", f"api_key={KEY}", "--json", "--show-memory")

    assert json.loads(outcome.stdout)["answer"] == CODE
    [run] = cli.runs
    kept = "".join(path.read_text() for path in run.iterdir())
    assert {path.name for path in run.iterdir()} >= {"run.json", "steps.jsonl"}
    assert KEY not in outcome.stdout + outcome.stderr + kept
    assert guarded.base_url in kept


@pytest.mark.parametrize(
    ("status", "code", "words"),
    [
        (401, 2, "refused the key (HTTP 401: bad key Bearer ***)"),
        (400, 2, "refused the request (HTTP 400: bad key Bearer ***)"),
        (500, 3, "HTTP 500: bad key Bearer ***"),
    ],
)
def test_an_endpoint_that_repeats_the_key_in_its_errors_does_not_make_us_print_it(
    here: Call, cli: Cli, note: Path, status: int, code: int, words: str
) -> None:
    with echoing_endpoint(status) as base_url:
        command = ("ask", note, "-q", QUESTION, *SMALL_SECTIONS, "--set", "patience=1.5")
        outcome = here(
            *command, "--base-url", base_url, "--set", f"api_key={KEY}", "--model", "any"
        )
        unnamed = here(*command, "--base-url", base_url, "--set", f"api_key={KEY}")

    assert (outcome.code, outcome.stdout) == (code, "")
    assert words in outcome.stderr
    assert (unnamed.code, unnamed.stdout) == (2, "")
    assert f"(HTTP {status}: bad key Bearer ***)" in unnamed.stderr
    kept = "".join(path.read_text() for run in cli.runs for path in run.iterdir())
    assert KEY not in outcome.stderr + unnamed.stderr + kept


@contextmanager
def echoing_endpoint(status: int) -> Iterator[str]:
    """An endpoint that fails every call and tells the caller its own key."""

    class Echo(Handler):
        def do_GET(self) -> None:
            self.body()
            message = f"bad key {self.headers['Authorization']}"
            self.reply({"error": {"message": message}}, status)

        do_POST = do_GET

    with listening(Echo) as url:
        yield f"{url}/v1"


def section_texts(trace: Trace, text: str) -> list[str]:
    sections = [step.section for step in trace.steps if step.section is not None]
    return [text[section.start : section.end] for section in sections]


def test_a_run_inside_the_folder_that_it_reads_resumes(cli: Cli, tmp_path: Path) -> None:
    texts = tmp_path / "texts"
    texts.mkdir()
    (texts / "a.txt").write_text(story(600, seed=1, fact=FACT))
    reading = ("ask", ".", "-q", QUESTION, "--engine", "scripted", *SMALL_SECTIONS)

    stopped = cli(*reading, "--max-calls", "1", "--run-dir", "runs/a", cwd=texts)
    resumed = cli("ask", "--resume", "runs/a", "--max-calls", "100", cwd=texts)

    assert (stopped.code, resumed.code) == (4, 0), resumed.stderr
    assert CODE in resumed.stdout
