"""A killed reading resumes where it stopped: same trace, and no finished call is repeated.

Replies are digests of their whole prompts (`echo`), so a difference in any step changes all that follow.
"""

from __future__ import annotations

import asyncio
import json
import random
import shlex
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import tokenizers

from memagent.agent.prompts import open_prompts
from memagent.agent.reader import Reader
from memagent.agent.trace import Step, Trace
from memagent.documents.document import Document
from memagent.engines.openai import open_endpoint
from memagent.replies import REPLIES
from memagent.run_files import read_lines, sealed
from tests.integration.conftest import (
    CODE,
    FACT,
    QUESTION,
    SMALL_SECTIONS,
    Cli,
    Outcome,
    finish,
    num_lines,
    story,
    wait_until,
)
from tests.support.loopback import Endpoint, messages_sha, running
from tests.support.sizes import sized

IS_FORKED = True
Call = Callable[..., Outcome]
NUM_KILLS = sized(8, 20)
OTHER_QUESTIONS = ("Who keeps the ledger?", "Where does the journey end?")
TIMING_FIELDS = ("started", "seconds", "num_attempts")
ON_A_SMALL_DISK = """
import os, resource, sys
os.environ["PYTHONDONTWRITEBYTECODE"] = "1"  # or its cached files would be cut off
resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000))
os.execv(sys.argv[1], sys.argv[1:])
"""
TEMPLATES = """\
read = "<question>{question}</question> <section>{section}</section> <memory>{memory}</memory> Note."
answer = "<memory>{memory}</memory> <question>{question}</question> Answer."
"""


# --- kill -9 --------------------------------------------------------------------------------------


def test_many_kills_cost_at_most_a_call_each_and_leave_the_trace_as_it_was(
    cli: Cli, tmp_path: Path
) -> None:
    text = tmp_path / "long.txt"
    text.write_text(story(22_500, seed=5))
    command = ("ask", text, "-q", QUESTION, "--json", *SMALL_SECTIONS)
    with running(log=tmp_path / "whole.jsonl", reply="echo") as endpoint:
        whole = one_trace(cli.as_users_start_it(*command, "--base-url", endpoint.base_url))
    assert 55 <= whole.num_chunks <= 65

    run = tmp_path / "run"
    with running(log=tmp_path / "calls.jsonl", reply="echo", latency_ms=40) as endpoint:
        begin = (*command, "--base-url", endpoint.base_url, "--run-dir", run)
        kills = kill_again_and_again(
            cli, begin, run, num_kills=NUM_KILLS, num_steps=len(whole.steps)
        )
        resumed = one_trace(cli("ask", "--resume", run, "--json"))
        calls = endpoint.calls()

    assert without_clock(resumed) == without_clock(whole)
    assert Trace.load(run) == [resumed]
    assert len({kill[0] for kill in kills}) == NUM_KILLS, "each process finished something"
    assert_nothing_journalled_was_asked_again(calls, [resumed], text.read_text(), kills)
    answered = Counter(call["sha"] for call in calls if call["outcome"] == "ok")
    assert len(answered) == len(whole.steps)
    assert max(answered.values()) <= 2
    assert answered.total() <= len(whole.steps) + NUM_KILLS


def test_several_questions_resume_each_where_it_was_killed(cli: Cli, tmp_path: Path) -> None:
    text = tmp_path / "book.txt"
    text.write_text(story(5000, seed=6))
    questions = (QUESTION, *OTHER_QUESTIONS)
    whole = [reading(tmp_path / f"{n}.jsonl", text, q) for n, q in enumerate(questions)]

    run = tmp_path / "run"
    asked = [part for question in questions for part in ("-q", question)]
    with running(log=tmp_path / "calls.jsonl", reply="echo", latency_ms=40) as endpoint:
        begin = ("ask", text, *asked, "--base-url", endpoint.base_url, *SMALL_SECTIONS)
        num_steps = sum(len(trace.steps) for trace in whole)
        kills = kill_again_and_again(
            cli, (*begin, "--run-dir", run), run, num_kills=3, num_steps=num_steps
        )
        outcome = cli("ask", "--resume", run, "--json")
        calls = endpoint.calls()

    results = json.loads(outcome.stdout)
    assert [result["question"] for result in results] == list(questions)
    resumed = Trace.load(run)
    assert [result["answer"] for result in results] == [trace.answer for trace in whole]
    assert [without_clock(trace) for trace in resumed] == [without_clock(trace) for trace in whole]
    assert_nothing_journalled_was_asked_again(calls, resumed, text.read_text(), kills)
    assert sum(call["outcome"] == "ok" for call in calls) <= num_steps + 3 * len(questions)


# --- signals --------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_reading_prints_the_command_that_resumes_it(
    cli: Cli, tmp_path: Path, base: Base, number: signal.Signals
) -> None:
    run = tmp_path / "my run"
    with running(log=tmp_path / "calls.jsonl", reply="echo", latency_ms=40) as endpoint:
        begin = ("ask", base.text, "-q", QUESTION, "--prompts", base.prompts, *SMALL_SECTIONS)
        with cli.started(*begin, "--base-url", endpoint.base_url, "--run-dir", run) as process:
            wait_until(lambda: num_lines(run / REPLIES) >= 3)
            stopped = finish(process, number=number)
        num_done = num_lines(run / REPLIES)
        command = stopped.stderr.splitlines()[-1].partition("resume with: ")[2]
        going_on = cli(*shlex.split(command)[1:])
        calls = endpoint.calls()

    assert (stopped.code, stopped.stdout) == (130, "")
    assert "memagent: interrupted" in stopped.stderr
    assert "Traceback" not in stopped.stderr
    assert command == f"memagent ask --resume {shlex.quote(str(run))}"
    assert 3 <= num_done < len(base.whole.steps)
    assert going_on.stdout == f"{base.whole.answer}\n"
    assert len(calls) <= len(base.whole.steps) + 1


# --- damage ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "tail",
    [b'{"scope":"0","call":"f3a8', b'{"scope":"0","ca\n', b"\0" * 300],
    ids=["half a line", "half a line and a newline", "zeros"],
)
def test_a_torn_last_line_is_dropped_and_its_call_made_again(
    here: Call, base: Base, partial: Path, tail: bytes
) -> None:
    replies = partial / REPLIES
    before = replies.read_bytes()
    replies.write_bytes(before + tail)
    num_calls = base.endpoint.num_calls()

    outcome = here("ask", "--resume", partial, "--quiet")

    assert outcome == Outcome(0, f"{base.whole.answer}\n", "")
    assert replies.read_bytes().startswith(before)
    assert without_clock(Trace.load(partial)[0]) == without_clock(base.whole)
    assert base.endpoint.num_calls() - num_calls == len(base.whole.steps) - base.num_done


def test_steps_follow_from_replies(here: Call, base: Base, partial: Path) -> None:
    (partial / "steps.jsonl").write_bytes(b"{}\n17\n")
    assert here("ask", "--resume", partial).stdout == f"{base.whole.answer}\n"
    assert without_clock(Trace.load(partial)[0]) == without_clock(base.whole)


@pytest.mark.parametrize(
    "damage",
    [
        b'{"scope":"0","call":"f3a8',
        b"17",
        b"{}",
        b'{"scope":"0","call":"f3a8"}',
        {"usage": {"calls": -1}},
        {"usage": {"calls": "many"}},
        {"usage": {"x": 1}},
        {"seconds": -1},
        {"text": None},
        {"scope": 7},
    ],
    ids=str,
)
def test_a_damaged_line_in_the_middle_is_refused(
    here: Call, partial: Path, damage: bytes | dict[str, Any]
) -> None:
    replies = partial / REPLIES
    lines = replies.read_bytes().split(b"\n")
    if isinstance(damage, dict):  # sealed by whoever changed it
        record = {**json.loads(lines[1]), **damage}
        del record["crc"]
        damage = sealed(json.dumps(record).encode())
    lines[1] = damage
    replies.write_bytes(b"\n".join(lines))

    outcome = here("ask", "--resume", partial)

    assert_refused(outcome, f"{replies}, line 2, is damaged")
    assert replies.read_bytes() == b"\n".join(lines)


def test_a_full_disk_stops_the_reading_and_it_resumes_when_there_is_room(
    cli: Cli, base: Base, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    begin = ("ask", base.text, "-q", QUESTION, "--prompts", base.prompts, *SMALL_SECTIONS)
    with cli.started(
        *(*begin, "--base-url", base.endpoint.base_url, "--run-dir", run),
        via=(sys.executable, "-c", ON_A_SMALL_DISK),
    ) as process:
        full = finish(process)
    num_done = num_lines(run / REPLIES)
    num_calls = base.endpoint.num_calls()
    going_on = cli("ask", "--resume", run)

    assert (full.code, full.stdout) == (2, "")
    assert f"cannot write to {run / 'steps.jsonl'}: File too large" in full.stderr
    assert "Traceback" not in full.stderr
    assert 1 <= num_done < len(base.whole.steps)
    assert going_on.stdout == f"{base.whole.answer}\n"
    assert base.endpoint.num_calls() - num_calls == len(base.whole.steps) - num_done


# --- one process, and the same reading ------------------------------------------------------------


def test_of_four_processes_that_resume_a_run_one_continues_it(
    cli: Cli, base: Base, partial: Path, tmp_path: Path
) -> None:
    with running(log=tmp_path / "calls.jsonl", reply="echo") as endpoint, ExitStack() as stack:
        assert endpoint.process is not None
        endpoint.process.send_signal(signal.SIGSTOP)  # whoever calls it, waits
        command = ("ask", "--resume", partial, "--base-url", endpoint.base_url)
        processes = [stack.enter_context(cli.started(*command)) for _ in range(4)]
        wait_until(lambda: sum(process.poll() is not None for process in processes) == 3)
        endpoint.process.send_signal(signal.SIGCONT)
        outcomes = sorted(map(finish, processes))
        calls = endpoint.calls()

    assert [outcome.code for outcome in outcomes] == [0, 2, 2, 2]
    assert outcomes[0].stdout == f"{base.whole.answer}\n"
    for refused in outcomes[1:]:
        assert_refused(refused, f"{partial} is in use by another memagent process")
    assert without_clock(Trace.load(partial)[0]) == without_clock(base.whole)
    assert len(calls) == len(base.whole.steps) - base.num_done


def edit_text(base: Base) -> None:
    base.text.write_text(base.text.read_text().replace("harbour", "Harbour", 1))


def edit_prompts(base: Base) -> None:
    base.prompts.write_text(TEMPLATES.replace("Note.", "Take notes."))


@pytest.mark.parametrize(
    ("edit", "options", "reason"),
    [
        (edit_text, (), "the text has changed since"),
        (edit_prompts, (), "the wording of the prompts has changed"),
        (None, ("--prompts", "paper"), "the wording of the prompts has changed"),
        (None, ("--model", "other-model"), "model was 'test-model', now 'other-model'"),
        (None, ("-q", "Who is it?"), f"questions was {QUESTION!r}, now 'Who is it?'"),
        (None, ("-q", QUESTION, "-q", "Who?"), f"now {QUESTION + '; Who?'!r}"),
        (None, ("--chunk-tokens", "300"), "chunk_tokens was 400, now 300"),
        (None, ("--set", "temperature=0.5"), "temperature was None, now 0.5"),
        (None, ("--tokenizer", "estimate"), "tokenizer was 'bytes', now 'estimate'"),
    ],
)
def test_a_run_is_not_continued_as_another_reading(
    here: Call,
    base: Base,
    partial: Path,
    edit: Callable[[Base], None] | None,
    options: tuple[str, ...],
    reason: str,
) -> None:
    journal = (partial / "steps.jsonl").read_bytes()
    num_calls = base.endpoint.num_calls()
    if edit:
        edit(base)
    try:
        outcome = here("ask", "--resume", partial, *options)
    finally:
        base.restore()

    assert_refused(outcome, reason)
    assert (partial / "steps.jsonl").read_bytes() == journal
    assert base.endpoint.num_calls() == num_calls


def test_a_run_resumes_at_another_address_and_from_another_folder(
    cli: Cli, base: Base, partial: Path, tmp_path: Path
) -> None:
    with running(log=tmp_path / "calls.jsonl", reply="echo") as endpoint:
        elsewhere = (
            "--base-url",
            endpoint.base_url,
            "--set",
            "concurrency=3",
            "--set",
            "patience=5",
        )
        outcome = cli("ask", "--resume", partial, *elsewhere, cwd=Path("/"))
        num_calls = endpoint.num_calls()

    assert outcome.stdout == f"{base.whole.answer}\n"
    assert num_calls == len(base.whole.steps) - base.num_done


def test_a_tokenizer_named_by_a_relative_path_is_found_from_another_folder(
    here: Call, base: Base, tmp_path: Path
) -> None:
    (tmp_path / "tok").mkdir()
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"?": 0}, unk_token="?"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    words.save(str(tmp_path / "tok" / "tokenizer.json"))
    begin = (
        "ask",
        base.text,
        "-q",
        QUESTION,
        "--tokenizer",
        "./tok",
        "--run-dir",
        tmp_path / "run",
    )
    sizes = ("--window", "2048", "--chunk-tokens", "100", "--set", "memory_tokens=400")
    address = ("--base-url", base.endpoint.base_url)
    stopped = here(*begin, *sizes, *address, "--max-calls", "2", cwd=tmp_path)
    finished = here("ask", "--resume", tmp_path / "run", "--max-calls", "99", cwd=Path("/"))

    assert stopped.code == 4
    assert (finished.code, len(finished.stdout.split())) == (0, 24)
    sections = [step.section for step in Trace.load(tmp_path / "run")[0].steps if step.section]
    assert max(section.num_tokens for section in sections) <= 100


@pytest.mark.parametrize("lost", ["stdin", "folder"])
def test_a_run_whose_text_is_lost_is_refused_in_one_line(
    here: Call, base: Base, tmp_path: Path, lost: str
) -> None:
    folder, run = tmp_path / "begun here", tmp_path / "run"
    folder.mkdir()
    (folder / "book.txt").write_text("Some text.")
    begin = ("ask", "book.txt", "-q", QUESTION, *SMALL_SECTIONS, "--run-dir", run)
    assert here(*begin, "--base-url", base.endpoint.base_url, cwd=folder).code == 0
    if lost == "folder":
        shutil.rmtree(folder)
    else:
        manifest = json.loads((run / "run.json").read_text())
        manifest["command"]["paths"] = ["-"]
        (run / "run.json").write_text(json.dumps(manifest))

    outcome = here("ask", "--resume", run)

    remedy = {
        "stdin": f"{run / 'stdin'}, the text that came in on standard input, cannot be read",
        "folder": f"the folder {folder}, where the run was begun, is gone; name its files again",
    }
    assert_refused(outcome, remedy[lost])


# --- what the tests share -------------------------------------------------------------------------


class Base(NamedTuple):
    """A short text, how it reads in one go, and a run over it that was stopped half way."""

    endpoint: Endpoint
    text: Path
    prompts: Path
    whole: Trace
    run: Path
    num_done: int

    def restore(self) -> None:
        self.text.write_text(story(3000, seed=7))
        self.prompts.write_text(TEMPLATES)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Base]:
    folder = tmp_path_factory.mktemp("base")
    text, prompts, run, num_done = folder / "book.txt", folder / "own.toml", folder / "run", 4
    text.write_text(story(3000, seed=7))
    prompts.write_text(TEMPLATES)
    whole = reading(folder / "whole.jsonl", text, QUESTION, prompts=str(prompts))
    with running(log=folder / "calls.jsonl", reply="echo") as endpoint:
        stopped = Cli(folder)(
            *("ask", text, "-q", QUESTION, "--prompts", prompts, *SMALL_SECTIONS),
            *("--base-url", endpoint.base_url, "--run-dir", run, "--max-calls", str(num_done)),
        )
        assert stopped.code == 4
        manifest = json.loads((run / "run.json").read_text())
        del manifest["command"]["limits"]["max_calls"]
        (run / "run.json").write_text(json.dumps(manifest))
        yield Base(endpoint, text, prompts, whole, run, num_done)


@pytest.fixture
def partial(base: Base, cli: Cli, tmp_path: Path) -> Path:
    """A copy of the half-way run, whose endpoint the user of `cli` has named before."""
    shutil.copytree(base.text.parent / "memagent", cli.state / "memagent")
    return shutil.copytree(base.run, tmp_path / "partial")


def reading(log: Path, text: Path, question: str, prompts: str = "default") -> Trace:
    """The trace of an uninterrupted reading against an endpoint of its own."""

    async def read(endpoint: Endpoint) -> Trace:
        engine = open_endpoint("test-model", base_url=endpoint.base_url)
        settings = {"window": 4096, "chunk_tokens": 400, "memory_tokens": 400, "answer_tokens": 200}
        try:
            reader = Reader(engine, tokenizer="bytes", prompts=prompts, **settings)
            return await reader.aask(question, Document.load(text))
        finally:
            await engine.aclose()

    with running(log=log, reply="echo") as endpoint:
        return asyncio.run(read(endpoint))


def kill_again_and_again(
    cli: Cli, begin: tuple[str | Path, ...], run: Path, *, num_kills: int, num_steps: int
) -> list[tuple[int, ...]]:
    """Begin, kill, resume, kill ... spread over the reading; how many replies each question had on disk at each kill."""
    rng = random.Random(1)
    journal = run / REPLIES
    num_questions = begin.count("-q")
    kills: list[tuple[int, ...]] = []
    for number in range(num_kills):
        command = begin if number == 0 else ("ask", "--resume", run)
        num_before = num_lines(journal)
        share = (num_steps - num_before) / (num_kills - number + 1)
        num_more = rng.randint(1, max(1, round(2 * share) - 1))
        with cli.started(*command) as process:
            wait_until(lambda wanted=num_before + num_more: num_lines(journal) >= wanted)
            time.sleep(rng.uniform(0, 0.045))
            assert process.poll() is None, "the reading was over before it could be killed"
            finish(process, number=signal.SIGKILL)
        kept = Counter(line.record["scope"] for line in read_lines(journal))
        kills.append(tuple(kept[str(number)] for number in range(num_questions)))
    return kills


def assert_nothing_journalled_was_asked_again(
    calls: list[dict[str, Any]], traces: list[Trace], text: str, kills: list[tuple[int, ...]]
) -> None:
    """A step is asked for once, and once more for each kill that struck while it was under way."""
    asked = Counter(call["sha"] for call in calls)
    assert {call["outcome"] for call in calls} <= {"ok", "client_left"}
    for number, trace in enumerate(traces):
        for step, sha in zip(trace.steps, prompt_shas(trace, text), strict=True):
            num_struck = sum(kill[number] == step.index for kill in kills)
            assert 1 <= asked.pop(sha) <= 1 + num_struck, f"step {step.index}"
    assert not asked, "prompts that belong to no step"


def prompt_shas(trace: Trace, text: str) -> Iterator[str]:
    """The prompts that must have led to a trace, as the endpoint's log names them."""
    prompts = open_prompts(trace.prompts)
    memory = ""
    for step in trace.steps:
        if step.section is not None:
            messages = prompts.section_messages(
                question=trace.question,
                section=text[step.section.start : step.section.end],
                memory=memory,
                section_number=step.index + 1,
                memory_tokens=400,
            )
        else:
            messages = prompts.answer_messages(
                question=trace.question, memory=memory, num_sections=step.index, answer_tokens=200
            )
        yield messages_sha(messages)
        memory = step.memory


def without_clock(trace: Trace) -> list[dict[str, Any]]:
    """Everything in a trace's steps that is not a matter of when and how fast."""
    return [_step_without_clock(step) for step in trace.steps]


def _step_without_clock(step: Step) -> dict[str, Any]:
    values = json.loads(step.to_json())
    for place in (values["section"] or {}).get("places", ()):
        place.pop("source")  # as the user wrote it
    return {name: value for name, value in values.items() if name not in TIMING_FIELDS}


def one_trace(outcome: Outcome) -> Trace:
    assert outcome.code == 0, outcome.stderr
    result = json.loads(outcome.stdout)
    trace = Trace.from_json(json.dumps(result["trace"]))
    assert trace.answer == result["answer"]
    return trace


def assert_refused(outcome: Outcome, reason: str) -> None:
    assert outcome.code == 2
    assert outcome.stdout == ""
    assert len(outcome.said) == 1, outcome.stderr
    assert outcome.said[0].startswith("memagent: ")
    assert reason in outcome.stderr


@pytest.mark.parametrize("kind", ["ask", "eval", "data filter"])
def test_a_run_whose_folder_is_deleted_shows_what_was_paid_for_and_ends_with_an_error(
    cli: Cli, tmp_path: Path, kind: str
) -> None:
    text, data = tmp_path / "long.txt", tmp_path / "data.jsonl"
    text.write_text(story(4_000, seed=5, fact=FACT))
    build = ("data", "build", "ruler/niah_single_1", "--tokens", "2000", "--num", "12", "--quiet")
    commands = {
        "ask": ("ask", text, "-q", QUESTION, *SMALL_SECTIONS),
        "eval": ("eval", "--file", data, "--method", "direct", "--set", "tokenizer=bytes"),
        "data filter": ("data", "filter", data, "--out", tmp_path / "kept.jsonl"),
    }
    if kind != "ask":
        assert cli(*build, "--out", data, "--tokenizer", "bytes", "--processes", "1").code == 0
    run = tmp_path / "run"
    with running(log=tmp_path / "calls.jsonl", latency_ms=150) as endpoint:
        to = ("--base-url", endpoint.base_url, "--run-dir", run, "--set", "concurrency=1")
        with cli.started(*commands[kind], *to) as process:
            wait_until(lambda: num_lines(run / "steps.jsonl") >= 2)
            shutil.rmtree(run)
            shown, said = process.communicate(timeout=60)
    assert process.returncode == 2
    assert {"ask": CODE, "eval": "direct", "data filter": "kept"}[kind] in shown.decode()
    last = said.decode().splitlines()[-1]
    assert (
        last
        == f"memagent: {run} was deleted or replaced while it was written to: nothing of this run is kept"
    )
    assert not run.exists()
