"""Hundreds of readings through an endpoint that fails in every way it can: nothing lost, nothing twice."""

import asyncio
import random
import resource
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from memagent.agent.reader import Reader
from memagent.agent.trace import Trace
from memagent.engines.openai import open_endpoint
from tests.integration.conftest import story
from tests.support.loopback import running
from tests.support.sizes import sized

NUM_READINGS = sized(400, 1000)
FAULTS = "500=0.05,429=0.03,reset=0.02,stall=0.01,malformed=0.02,empty=0.02,cut=0.01"
TIMEOUT_SECONDS = 6.0
"""Past any delay of a busy machine: a call that is aborted too early would be answered twice."""


@pytest.fixture
def many_open_files() -> Iterator[None]:
    """Each open run holds a lock and a journal."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = 2 * NUM_READINGS + 500
    if soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(needed, hard), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("many_open_files")
async def test_many_readings_survive_every_fault_and_repeat_no_answered_call(
    tmp_path: Path,
) -> None:
    rng = random.Random(0)
    codes = {f"amber-{number}": str(rng.randint(10_000, 99_999)) for number in range(NUM_READINGS)}
    with running(
        log=tmp_path / "calls.jsonl", faults=FAULTS, retry_after=0.2, stall_seconds=30
    ) as endpoint:
        engine = open_endpoint(
            "test-model",
            base_url=endpoint.base_url,
            timeout=TIMEOUT_SECONDS,
            patience=60,
            concurrency=64,
        )
        reader = Reader(
            engine,
            tokenizer="bytes",
            window=4096,
            chunk_tokens=400,
            memory_tokens=200,
            answer_tokens=100,
        )
        texts = [
            story(rng.randint(400, 1000), seed=seed, fact=f'The code of "{name}" is {code}.')
            for seed, (name, code) in enumerate(codes.items())
        ]
        try:
            traces = await asyncio.gather(
                *(
                    reader.aask(
                        f'What is the code of "{name}"?', text, run_dir=tmp_path / "runs" / name
                    )
                    for name, text in zip(codes, texts, strict=True)
                )
            )
        finally:
            await engine.aclose()
        calls = endpoint.calls()

    wrong = [
        trace
        for trace, code in zip(traces, codes.values(), strict=True)
        if code not in str(trace.answer)
    ]
    assert wrong == []

    for name, trace in zip(codes, traces, strict=True):
        assert Trace.load(tmp_path / "runs" / name) == [trace]
        assert trace.status == "answered"

    outcomes = Counter(call["outcome"] for call in calls)
    assert set(outcomes) == {"ok", *(item.partition("=")[0] for item in FAULTS.split(","))}
    num_steps = sum(len(trace.steps) for trace in traces)
    assert num_steps > 2.5 * NUM_READINGS
    assert outcomes["ok"] == num_steps
    answered = Counter(call["sha"] for call in calls if call["outcome"] == "ok")
    assert {sha: count for sha, count in answered.items() if count > 1} == {}
    # an attempt that reached no endpoint before its time was over counts too
    assert sum(step.num_attempts for trace in traces for step in trace.steps) >= len(calls)
