"""Modes of reading on the command line: killed and resumed, planned, and asked from files of questions."""

import json
import signal
import subprocess
from pathlib import Path

import pytest

from memagent.agent.trace import Trace
from tests.integration.conftest import (
    FACT,
    QUESTION,
    SMALL_SECTIONS,
    Cli,
    finish,
    num_lines,
    story,
    wait_until,
)
from tests.support.loopback import running

IS_FORKED = True
AT_ONCE = 4
PARALLEL = ("--mode", "parallel", "--set", "rounds=2")


def said_by(process: subprocess.Popen[bytes], words: str) -> None:
    """Wait for a line on standard error."""
    assert process.stderr is not None
    while (line := process.stderr.readline()) and words.encode() not in line:
        pass
    assert line


def steps_of(trace: Trace) -> list[tuple[str, int, int, str]]:
    return sorted(
        (step.kind, step.round or 0, step.section.start if step.section else -1, step.memory)
        for step in trace.steps
    )


def test_a_killed_reading_resumes_and_repeats_at_most_what_was_in_flight(
    cli: Cli, tmp_path: Path
) -> None:
    text = tmp_path / "long.txt"
    text.write_text(story(9000, seed=5))
    run = tmp_path / "run"
    command = (
        "ask",
        text,
        "-q",
        QUESTION,
        *SMALL_SECTIONS,
        *PARALLEL,
        "--set",
        f"concurrency={AT_ONCE}",
    )
    with running(log=tmp_path / "calls.jsonl", reply="echo", latency_ms=30) as endpoint:
        command = (*command, "--base-url", endpoint.base_url)
        cli.as_users_start_it(*command, "--run-dir", tmp_path / "whole")
        num_before = endpoint.num_calls()
        with cli.started(*command, "--run-dir", run) as process:
            wait_until(lambda: num_lines(run / "steps.jsonl") >= 9)
            finish(process, number=signal.SIGKILL)
        num_kept = num_lines(run / "steps.jsonl")
        resumed = cli("ask", "--resume", run, "--json")
        num_calls = endpoint.num_calls() - num_before
    (whole,), (trace,) = Trace.load(tmp_path / "whole"), Trace.load(run)
    assert json.loads(resumed.stdout)["answer"] == whole.final_answer
    assert steps_of(trace) == steps_of(whole)
    assert num_kept < len(trace.steps)
    assert len(trace.steps) <= num_calls <= len(trace.steps) + AT_ONCE


def test_questions_come_from_a_file_after_those_of_the_command_line(
    cli: Cli, book: Path, tmp_path: Path
) -> None:
    questions = tmp_path / "questions.jsonl"
    questions.write_text('"Who keeps the ledger?"\n\n{"question": "Where?", "id": 7}\n')
    command = ("ask", book, "-q", QUESTION, "--questions", questions, *SMALL_SECTIONS)
    with running(log=tmp_path / "calls.jsonl", reply="keyword") as endpoint:
        outcome = cli(*command, "--mode", "parallel", "--base-url", endpoint.base_url, "--json")
    results = json.loads(outcome.stdout)
    asked = [result["question"] for result in results]
    assert asked == [QUESTION, "Who keeps the ledger?", "Where?"]
    assert results[0]["answer"] == FACT.partition(" is ")[2].removesuffix(".")
    assert results[0]["num_chunks"] == 5


def test_a_plan_of_parallel_reading_has_the_least_and_the_most_calls(cli: Cli, book: Path) -> None:
    command = ("ask", book, "-q", QUESTION, *SMALL_SECTIONS, "--engine", "scripted", "--dry-run")
    outcome = cli(*command, "--mode", "parallel", "--json")
    plan = json.loads(outcome.stdout)
    assert (plan["num_chunks"], plan["num_calls"]) == (5, 6)
    assert plan["max_calls"] == 3 * (5 + 1) + 1
    assert "6 to 19" in cli(*command, "--mode", "parallel").stdout


def test_a_plan_of_a_reading_that_goes_on_has_only_the_calls_that_are_left(
    cli: Cli, book: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    cli("ask", book, "-q", QUESTION, *SMALL_SECTIONS, "--engine", "scripted", "--run-dir", run)
    for going_on in ("--resume", "--continue"):
        plan = json.loads(cli("ask", going_on, run, "--dry-run", "--json").stdout)
        assert (plan["num_chunks"], plan["num_calls"], plan["max_calls"]) == (5, 0, 0)


def test_watching_goes_on_where_the_file_was_emptied_and_reads_only_what_is_new(
    cli: Cli, tmp_path: Path
) -> None:
    log, run = tmp_path / "log.txt", tmp_path / "run"
    log.write_text("Pump 3 ran all night.\n")
    command = ("ask", log, "-q", "Which pump failed?", "--engine", "scripted", "--run-dir", run)
    with cli.started(*command, "--watch", "--set", "watch_seconds=0.05") as process:
        for text in ("", "Pump 7 failed at noon.\n", ""):
            said_by(process, "watching")
            log.write_text(text)
            if not text:
                said_by(process, "not read: ")
        said_by(process, "watching")
        outcome = finish(process, number=signal.SIGINT)
    assert outcome.code == 130
    assert outcome.stdout == "Pump 3 ran all night.\nPump 7 failed at noon.\n"
    assert [path.name for path in sorted(tmp_path.glob("run*"))] == ["run", "run-2"]


def test_standard_input_of_an_earlier_run_cannot_be_watched(cli: Cli, tmp_path: Path) -> None:
    run = tmp_path / "run"
    text = b"Pump 3 ran all night."
    cli("ask", "-", "-q", "Who?", "--engine", "scripted", "--run-dir", run, stdin=text)
    outcome = cli("ask", "--resume", run, "--watch")
    assert (outcome.code, outcome.stdout) == (2, "")
    assert "--watch follows files on disk" in outcome.stderr


@pytest.mark.parametrize(
    ("option", "needed"),
    [
        (("--set", "rounds=2"), "--mode parallel"),
        (("--set", "notes=memories"), "--mode parallel"),
        (("--set", "quotes=copied"), "--evidence"),
        (("--set", "quote_tokens=64"), "--items"),
        (
            ("--set", "ledger_tokens=64", "--evidence", "--set", "quotes=copied"),
            "--set quotes=asked",
        ),
    ],
)
def test_an_option_that_would_have_no_effect_is_refused(
    option: tuple[str, ...], needed: str, cli: Cli, book: Path
) -> None:
    outcome = cli("ask", book, "-q", QUESTION, "--engine", "scripted", *option)
    assert (outcome.code, outcome.stdout) == (2, "")
    assert f"--set {option[1].partition('=')[0]} has no effect without" in outcome.stderr
    assert needed in outcome.stderr


@pytest.mark.parametrize("command", [("serve", "--reader", "--port", "0"), ("mcp",)])
def test_servers_refuse_an_option_that_would_have_no_effect(
    command: tuple[str, ...], cli: Cli
) -> None:
    outcome = cli(*command, "--engine", "scripted", "--set", "rounds=2")
    assert (outcome.code, outcome.stdout) == (2, "")
    assert "--set rounds has no effect without --mode parallel" in outcome.stderr
