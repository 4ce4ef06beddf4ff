"""Replies of vLLM that go on over new weights: every token has the version that sampled it."""

import asyncio
import sys
from collections.abc import AsyncIterator
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from memagent.engines.base import open_engine
from memagent.engines.vllm import engine as vllm_engine
from memagent.engines.vllm.engine import (
    HANDLE_VARIABLES,
    VllmEngine,
    can_continue,
    joined,
    parse_continuation,
)
from memagent.errors import EngineError
from memagent.rl.distributed.vllm_replica import TRANSFER_ARGUMENTS, update_request
from memagent.rl.distributed.weights import Bucket, TensorSpec
from memagent.types import Completion, Sampling, Usage
from tests.support import fake_vllm

MESSAGES = [{"role": "user", "content": "Where is the ledger?"}]
NUM_TOKENS = 40
SAMPLING = Sampling(max_tokens=NUM_TOKENS, seed=3)


@pytest.fixture
async def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[VllmEngine]:
    """Its replies take about a second."""
    fake_vllm.install(tmp_path / "site", monkeypatch)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    for name, value in HANDLE_VARIABLES.items():
        monkeypatch.setenv(name, value)
    opened = open_engine(
        "vllm:some/model",
        vllm_python=sys.executable,
        vllm_args=f"--fake-token-seconds 0.02 {TRANSFER_ARGUMENTS}",
        vllm_log_dir=str(tmp_path / "logs"),
        start_seconds=30,
    )
    assert isinstance(opened, VllmEngine)
    async with opened:
        opened.switch_model(opened.model, 0)
        yield opened


def weights(folder: Path, version: int) -> Path:
    path = folder / f"weights-{version}"
    path.mkdir()
    (path / "version").write_text(str(version))
    return path


def versions(reply: Completion) -> list[int]:
    """The versions of a reply, in order; its tokens must be those that were sampled by them."""
    assert reply.completion_ids is not None
    assert [token % 1000 for token in reply.completion_ids] == list(range(NUM_TOKENS))
    sampled_by = tuple(token // 1000 for token in reply.completion_ids)
    assert reply.logprobs == tuple(-token / 1000 for token in reply.completion_ids)
    assert reply.text.split() == [str(token) for token in reply.completion_ids]
    assert (reply.policy_version, reply.finish_reason) == (min(sampled_by), "length")
    assert reply.token_versions == (sampled_by if len(set(sampled_by)) > 1 else None)
    assert reply.prompt_ids == tuple(fake_vllm.PROMPT)
    assert reply.usage == Usage(calls=1, prompt_tokens=4, completion_tokens=NUM_TOKENS)
    return [version for version, _ in groupby(sampled_by)]


async def test_replies_in_progress_go_on_with_new_weights_and_mark_every_token(
    engine: VllmEngine, tmp_path: Path
) -> None:
    running = [asyncio.ensure_future(engine.complete(MESSAGES, SAMPLING)) for _ in range(3)]
    await asyncio.sleep(0.3)
    await engine.load_weights(weights(tmp_path, 5), 5)
    later = asyncio.ensure_future(engine.complete(MESSAGES, SAMPLING))
    await asyncio.sleep(0.2)
    await engine.load_weights(weights(tmp_path, 6), 6)
    assert [versions(await one) for one in running] == [[0, 5, 6]] * 3
    assert versions(await later) == [5, 6]
    assert versions(await engine.complete(MESSAGES, SAMPLING)) == [6]


async def transferred(*buckets: int) -> AsyncIterator[dict[str, Any]]:
    """Requests for buckets of weights, whose versions are given."""
    bucket = Bucket((TensorSpec("norm", "float32", (4,)), TensorSpec("bias", "float32", ())))
    for version in buckets:
        yield update_request(bucket, {"GPU-0": (version,)})


async def test_weights_that_are_transferred_are_taken_between_a_pause_and_a_resume(
    engine: VllmEngine, tmp_path: Path
) -> None:
    running = asyncio.ensure_future(engine.complete(MESSAGES, SAMPLING))
    await asyncio.sleep(0.2)
    await engine.update_weights(transferred(5, 5, 5), 5)
    await asyncio.sleep(0.2)
    await engine.update_weights(transferred(6), 6)
    assert versions(await running) == [0, 5, 6]
    await engine.load_weights(weights(tmp_path, 7), 7)
    assert versions(await engine.complete(MESSAGES, SAMPLING)) == [7]


async def test_a_transfer_that_vllm_refuses_is_an_error_of_one_line(engine: VllmEngine) -> None:
    async def wrong() -> AsyncIterator[dict[str, Any]]:
        async for update in transferred(5):
            yield {**update, "shapes": []}

    with pytest.raises(EngineError, match=r"^vLLM refuses /update_weights \(HTTP 500: .*shapes"):
        await engine.update_weights(wrong(), 5)


async def test_a_request_that_the_pause_kept_from_starting_belongs_to_the_new_weights(
    engine: VllmEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_engine, "SETTLE_SECONDS", 0.2)
    await engine._control("/pause?mode=abort")
    waiting = asyncio.ensure_future(engine.complete(MESSAGES, SAMPLING))
    await asyncio.sleep(0.2)
    assert engine._sent, "it is in the queue of the server"
    await engine.load_weights(weights(tmp_path, 5), 5)
    assert versions(await waiting) == [5]


async def test_a_call_that_is_cancelled_leaves_its_place(
    engine: VllmEngine, tmp_path: Path
) -> None:
    running = asyncio.ensure_future(engine.complete(MESSAGES, SAMPLING))
    await asyncio.sleep(0.2)
    running.cancel()
    await asyncio.wait([running])
    assert running.cancelled()
    assert not engine._sent
    await asyncio.wait_for(engine.load_weights(weights(tmp_path, 5), 5), 30)


def part(**values: object) -> Completion:
    given = {"text": "ab", "prompt_ids": (1,), "completion_ids": (2, 3), "policy_version": 4}
    return Completion(**{**given, **values})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("begun", "stop", "expected"),
    [
        (part(), (), True),
        (part(completion_ids=()), (), False),
        (part(prompt_ids=None), (), False),
        (part(reasoning="so"), (), False),
        (part(), ("bc",), False),
        (part(), ("c", "ac"), True),
    ],
)
def test_what_can_be_continued(begun: Completion, stop: tuple[str, ...], *, expected: bool) -> None:
    assert can_continue(begun, Sampling(max_tokens=9, stop=stop)) == expected


def test_parts_of_one_version_have_no_marks_and_missing_counts_stay_missing() -> None:
    whole = joined([part(logprobs=(-1.0, -2.0)), part(text="c", completion_ids=(5,))])
    assert (whole.text, whole.completion_ids) == ("abc", (2, 3, 5))
    assert (whole.policy_version, whole.token_versions) == (4, None)
    assert (whole.logprobs, whole.usage) == (None, None)


@pytest.mark.parametrize("data", [{}, {"choices": []}, {"choices": [{"message": {}}]}, []])
def test_a_reply_without_text_is_not_one(data: object) -> None:
    with pytest.raises(ValueError, match="no text in it"):
        parse_continuation(data)
