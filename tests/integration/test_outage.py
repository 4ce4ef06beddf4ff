"""An endpoint that goes away and comes back costs the time it was away, and no answered call."""

import asyncio
import re
import shlex
import socket
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from memagent.agent.reader import Reader
from memagent.agent.trace import Trace
from memagent.engines import limit
from memagent.engines.openai import EndpointEngine, open_endpoint
from memagent.errors import EngineError
from memagent.types import Completion, Sampling
from tests.integration.conftest import (
    CODE,
    FACT,
    QUESTION,
    SMALL_SECTIONS,
    Cli,
    finish,
    num_lines,
    story,
    wait_until,
)
from tests.support.loopback import Endpoint, running
from tests.support.sizes import IS_LARGE

LATENCY_MS = 20
TEXT = story(8000, seed=3, fact=FACT)


SHORT = 1.0 if IS_LARGE else 0.05
"""The minute of outage takes a minute with `make test-hostile`, else three seconds: all waits are scaled."""


def scale_waits(scale: float, monkeypatch: pytest.MonkeyPatch) -> None:
    longest = {kind: seconds * scale for kind, seconds in limit.LONGEST_DELAYS.items()}
    monkeypatch.setattr(limit, "LONGEST_DELAYS", longest)
    monkeypatch.setattr(limit, "FIRST_DELAY", limit.FIRST_DELAY * scale)
    monkeypatch.setattr(limit, "FIRST_CONTACT_PATIENCE", limit.FIRST_CONTACT_PATIENCE * scale)


@pytest.mark.parametrize(("minutes", "scale"), [(0.1, 1.0), (1.0, SHORT)])
async def test_an_outage_costs_no_more_than_its_length_and_a_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, minutes: float, scale: float
) -> None:
    outage, spare = minutes * 60 * scale, 6.0
    scale_waits(scale, monkeypatch)
    with running(log=tmp_path / "whole.jsonl", latency_ms=LATENCY_MS) as endpoint:
        whole = await read(endpoint, tmp_path / "whole", patience=120 * scale)
    with running(log=tmp_path / "calls.jsonl", latency_ms=LATENCY_MS) as endpoint:
        struck_run = read(endpoint, tmp_path / "struck", patience=120 * scale)
        reading = asyncio.create_task(struck_run)
        while num_lines(tmp_path / "struck" / "steps.jsonl") < 8:
            await asyncio.sleep(0.01)
        endpoint.kill()
        num_done = num_lines(tmp_path / "struck" / "steps.jsonl")
        await asyncio.sleep(outage)
        returning = time.monotonic()
        await asyncio.to_thread(endpoint.start)
        endpoint_seconds = time.monotonic() - returning
        struck = await reading
        calls = endpoint.calls()

    assert CODE in str(struck.answer)
    assert replies(struck) == replies(whole)
    assert 8 <= num_done < len(whole.steps) - 3
    assert outage <= span(struck) - span(whole)
    waited = [step for step in struck.steps if step.num_attempts > 1]
    assert len(waited) == 1
    assert waited[0].seconds <= outage + spare + endpoint_seconds
    answered = Counter(call["sha"] for call in calls if call["outcome"] == "ok")
    assert answered.total() == len(answered) == len(whole.steps)


def test_without_patience_the_reading_stops_with_code_3_and_resumes_later(
    cli: Cli, tmp_path: Path
) -> None:
    text, run = tmp_path / "book.txt", tmp_path / "run"
    text.write_text(TEXT)
    with running(log=tmp_path / "calls.jsonl", latency_ms=LATENCY_MS) as endpoint:
        address = ("--base-url", endpoint.base_url, "--set", "patience=2")
        begin = ("ask", text, "-q", QUESTION, *SMALL_SECTIONS, *address, "--run-dir", run)
        with cli.started(*begin) as process:
            wait_until(lambda: num_lines(run / "steps.jsonl") >= 5)
            endpoint.kill()
            stopped = finish(process)
        num_done = num_lines(run / "steps.jsonl")
        endpoint.start()
        command = stopped.stderr.splitlines()[-1].partition("resume with: ")[2]
        going_on = cli(*shlex.split(command)[1:])
        calls = endpoint.calls()

    assert (stopped.code, stopped.stdout) == (3, "")
    assert f"memagent: {endpoint.base_url} failed for " in stopped.stderr
    assert command == f"memagent ask --resume {run}"
    assert 1 <= seconds_failed(stopped.stderr) <= 10  # patience is 2, by default 600
    trace = Trace.load(run)[0]
    assert 5 <= num_done < len(trace.steps)
    assert (going_on.code, going_on.stdout) == (0, f"{trace.final_answer}\n")
    assert CODE in going_on.stdout
    answered = Counter(call["sha"] for call in calls if call["outcome"] == "ok")
    assert answered.total() == len(answered), "none was asked twice"
    assert len(answered) >= len(trace.steps) - 1, "it may be killed before it notes a reply"


def test_an_address_where_nothing_listens_ends_with_code_3(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text(TEXT)
    begin = ("ask", tmp_path / "book.txt", "-q", QUESTION, *SMALL_SECTIONS, "--model", "any")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    outcome = cli(*begin, "--base-url", f"http://127.0.0.1:{port}/v1", "--set", "patience=1")

    assert (outcome.code, outcome.stdout) == (3, "")
    assert f"memagent: http://127.0.0.1:{port}/v1 failed for " in outcome.stderr
    assert "Connect call failed" in outcome.stderr
    assert seconds_failed(outcome.stderr) <= 10


@pytest.mark.parametrize("listens", [False, True], ids=["nobody listens", "nobody answers"])
async def test_an_address_that_never_answered_fails_before_patience_ends(
    monkeypatch: pytest.MonkeyPatch, listens: bool
) -> None:
    assert limit.FIRST_CONTACT_PATIENCE == 20.0
    monkeypatch.setattr(limit, "FIRST_CONTACT_PATIENCE", 1.0)  # only to be quick
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        if not listens:
            server.close()
        with pytest.raises(EngineError, match=r"failed for \d s"):
            await complete(f"http://127.0.0.1:{port}/v1", timeout=0.3, patience=600)


async def test_an_endpoint_that_has_answered_is_waited_for_with_full_patience(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limit, "FIRST_CONTACT_PATIENCE", 0.5)
    with running() as endpoint:
        engine = open_endpoint("test-model", base_url=endpoint.base_url, patience=600)
        try:
            await ask(engine)
            endpoint.kill()
            second = asyncio.create_task(ask(engine))
            await asyncio.sleep(2)
            assert not second.done()
            await asyncio.to_thread(endpoint.start)
            completion = await asyncio.wait_for(second, timeout=60)
        finally:
            await engine.aclose()

    assert completion.num_attempts >= 3


async def read(endpoint: Endpoint, run: Path, *, patience: float) -> Trace:
    engine = open_endpoint("test-model", base_url=endpoint.base_url, patience=patience)
    settings = {"window": 4096, "chunk_tokens": 400, "memory_tokens": 400, "answer_tokens": 200}
    try:
        return await Reader(engine, tokenizer="bytes", **settings).aask(QUESTION, TEXT, run_dir=run)
    finally:
        await engine.aclose()


async def complete(base_url: str, **settings: Any) -> Completion:
    engine = open_endpoint("test-model", base_url=base_url, **settings)
    try:
        return await ask(engine)
    finally:
        await engine.aclose()


async def ask(engine: EndpointEngine) -> Completion:
    return await engine.complete([{"role": "user", "content": "hello"}], Sampling(max_tokens=9))


def replies(trace: Trace) -> list[tuple[str, str]]:
    return [(step.reply, step.memory) for step in trace.steps]


def seconds_failed(errors: str) -> int:
    """What the error says of how long an endpoint failed."""
    found = re.search(r" failed for (\d+) s", errors)
    assert found, errors
    return int(found[1])


def span(trace: Trace) -> float:
    """Seconds from the first call to the answer."""
    last = trace.steps[-1]
    return last.started + last.seconds - trace.steps[0].started
