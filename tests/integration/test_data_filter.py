"""`memagent data filter` as a process: an endpoint with faults, outages, kills, and what is written.

The loopback endpoint answers every bare question with `\\boxed{unknown}`, so the questions whose
answer is "unknown" are the ones it knows.
"""

import json
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from memagent.data.example import Example, Passage
from memagent.data.formats.files import read_examples, write_examples
from memagent.eval.prompts import CLOSED_BOOK, messages
from tests.integration.conftest import Cli, Outcome, finish, num_lines, on_a_small_disk, wait_until
from tests.support.loopback import messages_sha, running

Call = Callable[..., Outcome]
IS_FORKED = True
FAULTS = "500=0.1,429=0.05,reset=0.05,malformed=0.05,empty=0.05,cut=0.05"


def make_examples(num: int) -> list[Example]:
    """Every third question is one that the endpoint knows."""
    return [
        Example(
            id=f"e{number}",
            task="known" if number % 3 == 0 else "hidden",
            question=f"What is the code of box {number}?",
            answers=("unknown",) if number % 3 == 0 else (f"code-{number}",),
            documents=(Passage(text=f"The code of box {number} is code-{number}."),),
        )
        for number in range(num)
    ]


def hidden(examples: list[Example]) -> list[Example]:
    return [example for example in examples if example.task == "hidden"]


@pytest.fixture
def examples(tmp_path: Path) -> list[Example]:
    made = make_examples(30)
    write_examples(tmp_path / "in.jsonl", made)
    return made


def test_what_the_endpoint_knows_is_dropped_and_the_rest_is_written_as_it_was(
    cli: Cli, tmp_path: Path, examples: list[Example]
) -> None:
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    with running(log=tmp_path / "calls.jsonl") as endpoint:
        outcome = cli.as_users_start_it(
            *("data", "filter", source, "--out", out, "--base-url", endpoint.base_url),
            *("--set", "price_in=1", "--set", "price_out=2"),
        )
        calls = endpoint.calls()
    assert outcome.code == 0, outcome.stderr
    lines = source.read_text().splitlines(keepends=True)
    assert out.read_text() == "".join(line for n, line in enumerate(lines) if n % 3)
    assert len(calls) == 2 * 30
    printed = [line.split() for line in outcome.stdout.splitlines()]
    assert printed[:5] == [
        *(["questions", "30"], ["screened", "30"], ["kept", "20"], ["dropped", "10"]),
        ["strict", "and", "contains:", "10"],
    ]
    assert printed[5:7] == [
        ["known:", "kept", "0,", "dropped", "10,", "failed", "0"],
        ["hidden:", "kept", "20,", "dropped", "0,", "failed", "0"],
    ]
    assert printed[7][:2] == ["60", "calls,"]
    assert ["kept", "examples:", f"{out};"] == outcome.stderr.splitlines()[-1].split()[:3]
    shown = cli("report", cli.runs[0])
    assert "closed_book" in shown.stdout


def test_faults_change_nothing_but_the_number_of_attempts(
    cli: Cli, tmp_path: Path, examples: list[Example]
) -> None:
    out = tmp_path / "out.parquet"
    with running(log=tmp_path / "calls.jsonl", faults=FAULTS, seed=3, retry_after=0.05) as endpoint:
        outcome = cli(
            *("data", "filter", tmp_path / "in.jsonl", "--out", out, "--json"),
            *("--base-url", endpoint.base_url, "--set", "patience=60", "--set", "concurrency=8"),
        )
        calls = Counter(call["outcome"] for call in endpoint.calls())
    assert outcome.code == 0, outcome.stderr
    assert list(read_examples(out)) == hidden(examples)
    report = json.loads(outcome.stdout)
    assert (report["num_kept"], report["num_failed"]) == (20, 0)
    assert 60 <= report["usage"]["calls"] <= calls.total()
    assert calls["ok"] == 60
    assert calls.total() > 65


def test_kills_leave_the_same_file_and_nothing_journalled_is_asked_again(
    cli: Cli, tmp_path: Path, examples: list[Example]
) -> None:
    source, out, run = tmp_path / "in.jsonl", tmp_path / "out.jsonl", tmp_path / "run"
    journal = run / "steps.jsonl"
    with running(log=tmp_path / "calls.jsonl", latency_ms=60) as endpoint:
        begin = ("data", "filter", source, "--out", out, "--base-url", endpoint.base_url)
        journalled: list[int] = []
        for number in range(3):
            command = (
                (*begin, "--run-dir", run, "--set", "concurrency=3")
                if number == 0
                else ("data", "filter", "--out", out, "--resume", run)
            )
            before = num_lines(journal)
            with cli.started(*command) as process:
                wait_until(lambda least=before + 7: num_lines(journal) >= least)
                finish(process, number=signal.SIGKILL)
            assert not out.exists()
            journalled.append(num_lines(journal))
        outcome = cli("data", "filter", "--out", out, "--resume", run, "--json")
        calls = endpoint.calls()
    assert outcome.code == 0, outcome.stderr
    assert list(read_examples(out)) == hidden(examples)
    report = json.loads(outcome.stdout)
    assert (report["num_kept"], report["num_dropped"]) == (20, 10)
    assert report["usage"]["calls"] == 60 == num_lines(journal)
    answered = Counter(call["sha"] for call in calls if call["outcome"] == "ok")
    # at most three were under way at a kill
    expected = Counter(
        {messages_sha(messages(CLOSED_BOOK, question=one.question)): 2 for one in examples}
    )
    assert expected <= answered
    assert (answered - expected).total() <= 3 * 3
    assert journalled == sorted(set(journalled))


def test_a_full_disk_stops_the_screening_and_it_resumes_when_there_is_room(
    cli: Cli, tmp_path: Path, examples: list[Example]
) -> None:
    source, out, run = tmp_path / "in.jsonl", tmp_path / "out.jsonl", tmp_path / "run"
    with running(log=tmp_path / "calls.jsonl") as endpoint:
        begin = ("data", "filter", source, "--out", out, "--base-url", endpoint.base_url)
        with cli.started(
            *begin, "--run-dir", run, "--set", "concurrency=3", via=on_a_small_disk(12)
        ) as process:
            full = finish(process)
        num_kept = num_lines(run / "steps.jsonl")
        done = cli("data", "filter", "--out", out, "--resume", run, "--json")
        calls = endpoint.calls()
    assert full.code == 2, full.stderr
    assert "File too large" in full.stderr
    assert "Traceback" not in full.stderr
    assert 1 <= num_kept < 60
    assert done.code == 0, done.stderr
    assert list(read_examples(out)) == hidden(examples)
    assert num_lines(run / "steps.jsonl") == 60
    assert len(calls) <= 60 + 5  # in flight, or whose line did not fit


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_screening_prints_how_to_resume(
    cli: Cli, tmp_path: Path, examples: list[Example], number: signal.Signals
) -> None:
    out, run = tmp_path / "out.jsonl", tmp_path / "my run"
    with running(latency_ms=60) as endpoint:
        begin = ("data", "filter", tmp_path / "in.jsonl", "--out", out, "--set", "concurrency=2")
        with cli.started(*begin, "--base-url", endpoint.base_url, "--run-dir", run) as process:
            wait_until(lambda: num_lines(run / "steps.jsonl") >= 3)
            stopped = finish(process, number=number)
        again = ("data", "filter", "--out", out, "--resume", run)
        resumed = cli(*again, "--set", "concurrency=30", "--quiet")
    assert stopped.code == 130
    assert stopped.stderr.splitlines()[-1].endswith(
        f"memagent data filter --out {out} --resume '{run}'"
    )
    assert "Traceback" not in stopped.stderr
    assert (resumed.code, resumed.stderr) == (0, "")
    assert list(read_examples(out)) == hidden(examples)


def test_an_endpoint_that_goes_down_ends_the_run_which_is_resumed_later(
    cli: Cli, tmp_path: Path, examples: list[Example]
) -> None:
    out, run = tmp_path / "out.jsonl", tmp_path / "run"
    with running(log=tmp_path / "calls.jsonl", latency_ms=40) as endpoint:
        begin = ("data", "filter", tmp_path / "in.jsonl", "--out", out, "--set", "patience=0.2")
        with cli.started(*begin, "--base-url", endpoint.base_url, "--run-dir", run) as process:
            wait_until(lambda: num_lines(run / "steps.jsonl") >= 5)
            endpoint.kill()
            failed = finish(process)
        num_done = num_lines(run / "steps.jsonl")
        assert not out.exists()
        endpoint.restart()
        resumed = cli("data", "filter", "--out", out, "--resume", run, "--json")
    assert failed.code == 3
    assert f"all replies are kept; resume with: memagent data filter --out {out}" in failed.stderr
    assert (resumed.code, num_done < 60) == (0, True)
    assert list(read_examples(out)) == hidden(examples)


# --- what is refused ------------------------------------------------------------------------------


def assert_refused(outcome: Outcome, reason: str) -> None:
    assert (outcome.code, outcome.stdout) == (2, "")
    assert reason in outcome.stderr
    assert outcome.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("--out", "o.txt", "--engine", "scripted"), "a dataset ends in"),
        (("--out", "there.jsonl", "--engine", "scripted"), "there.jsonl exists"),
        (("--out", "in.jsonl", "--engine", "scripted", "--force"), "--out is the file that is"),
        (("--out", "o.jsonl", "--engine", "scripted", "--set", "tasks.0.no=1"), "no"),
        (("--out", "o.jsonl", "--resume", "x", "--run-dir", "y"), "not both"),
        (("--out", "o.jsonl", "--resume", "nowhere"), "nowhere holds no run"),
    ],
)
def test_what_cannot_be_done_is_one_line(
    here: Call,
    cli: Cli,
    tmp_path: Path,
    examples: list[Example],
    options: tuple[str, ...],
    reason: str,
) -> None:
    (tmp_path / "there.jsonl").touch()
    before = sorted(tmp_path.iterdir())
    assert_refused(here("data", "filter", "in.jsonl", *options, cwd=tmp_path), reason)
    assert sorted(tmp_path.iterdir()) == before
    assert cli.runs == []


def test_a_wrong_key_is_refused_and_leaves_no_run(
    here: Call, cli: Cli, tmp_path: Path, examples: list[Example]
) -> None:
    with running(api_key="right") as endpoint:
        outcome = here(
            *("data", "filter", tmp_path / "in.jsonl", "--out", tmp_path / "out.jsonl"),
            *(
                "--base-url",
                endpoint.base_url,
                "--set",
                "api_key=wrong-key",
                "--model",
                "test-model",
            ),
            "--quiet",
        )
    assert_refused(outcome, "refused the key")
    assert "wrong-key" not in outcome.stderr
    assert cli.runs == []


def test_an_output_that_cannot_be_written_costs_no_reply(
    here: Call, cli: Cli, tmp_path: Path, examples: list[Example]
) -> None:
    (tmp_path / "file").touch()
    with running() as endpoint:
        address = ("--base-url", endpoint.base_url)
        blocked = here(
            *("data", "filter", tmp_path / "in.jsonl", "--out", tmp_path / "file" / "out.jsonl"),
            *address,
        )
        resumed = here("data", "filter", "--resume", cli.runs[0], "--out", tmp_path / "out.jsonl")
        num_calls = endpoint.num_calls()
    assert blocked.code == 2
    assert "all replies are kept; resume with" in blocked.stderr
    assert (resumed.code, num_calls) == (0, 60)
    assert list(read_examples(tmp_path / "out.jsonl")) == hidden(examples)
