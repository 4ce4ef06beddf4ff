"""The embedded engine from outside: conversations in, completions with tokens and logprobs out."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
import torch

from memagent.config import LocalConfig
from memagent.engines.local.engine import LocalEngine
from memagent.engines.local.loading import load
from memagent.errors import EngineError, EngineRefused
from memagent.types import Completion, Sampling, StreamedToken
from tests.support.timing import eventually, settle
from tests.support.tiny_models import WINDOW, make_tiny_model

MESSAGES = [{"role": "user", "content": "Where is the red ledger?"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "llama", "llama")


@pytest.fixture
async def engine(folder: Path) -> AsyncIterator[LocalEngine]:
    async with LocalEngine(load(str(folder)), LocalConfig(cache_gb=0.01)) as engine:
        yield engine


def reference(engine: LocalEngine, ids: tuple[int, ...], max_tokens: int) -> list[int]:
    model = engine._loaded.model
    given = torch.tensor([ids])
    out = model.generate(
        given, attention_mask=torch.ones_like(given), max_new_tokens=max_tokens, do_sample=False
    )
    return list(out[0, len(ids) :].tolist())


def broken(*args: Any) -> Any:
    """A model's step that fails."""
    raise RuntimeError("the model is broken")


async def test_a_conversation_uses_the_models_chat_template(engine: LocalEngine) -> None:
    completion = await engine.complete(MESSAGES, Sampling(max_tokens=12))
    prompt = "<|im_start|>user\nWhere is the red ledger?<|im_end|>\n<|im_start|>assistant\n"
    assert completion.prompt_ids is not None
    assert engine._loaded.tokenizer.decode(list(completion.prompt_ids)) == prompt
    assert list(completion.completion_ids or ()) == reference(engine, completion.prompt_ids, 12)
    assert completion.usage is not None
    assert completion.usage.prompt_tokens == len(completion.prompt_ids)
    assert len(completion.logprobs or ()) == len(completion.completion_ids or ())
    assert completion.policy_version == 0


async def test_many_conversations_at_once_get_their_own_answers(engine: LocalEngine) -> None:
    conversations = [[{"role": "user", "content": f"Question {n}? " * n}] for n in range(1, 9)]
    sampling = Sampling(max_tokens=10)
    together = await asyncio.gather(*(engine.complete(c, sampling) for c in conversations))
    for completion in together:
        assert completion.prompt_ids is not None
        assert list(completion.completion_ids or ()) == reference(engine, completion.prompt_ids, 10)


async def test_a_stop_text_ends_the_reply_and_is_not_part_of_it(engine: LocalEngine) -> None:
    whole = await engine.complete(MESSAGES, Sampling(max_tokens=20))
    stop = whole.text[6:9]
    cut = await engine.complete(MESSAGES, Sampling(max_tokens=20, stop=(stop,)))
    assert cut.text == whole.text[: whole.text.index(stop)]
    assert cut.finish_reason == "stop"
    assert len(cut.completion_ids or ()) <= len(whole.completion_ids or ())


async def test_a_cancelled_call_frees_its_slots(engine: LocalEngine) -> None:
    tasks = [
        asyncio.ensure_future(
            engine.complete(MESSAGES, Sampling(max_tokens=400, seed=n, temperature=1))
        )
        for n in range(4)
    ]
    await eventually(lambda: engine.load.num_running == 4)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert all(task.cancelled() for task in tasks)
    completion = await engine.complete(MESSAGES, Sampling(max_tokens=5))
    assert len(completion.completion_ids or ()) == 5
    assert not engine._listeners
    scheduler = engine._generator.scheduler
    scheduler.tree.clear()
    assert scheduler.pool.num_free == scheduler.pool.num_slots


async def test_a_prompt_past_the_window_is_refused(engine: LocalEngine) -> None:
    long = [{"role": "user", "content": "word " * 2000}]
    with pytest.raises(EngineRefused, match=f"more than the {WINDOW} tokens"):
        await engine.complete(long, Sampling(max_tokens=5))
    with pytest.raises(EngineRefused, match="at least 1"):
        await engine.complete(MESSAGES, Sampling(max_tokens=0))


async def test_a_failing_model_fails_its_requests_and_the_engine_keeps_running(
    engine: LocalEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(engine._generator._model, "step", broken)
        with pytest.raises(EngineError, match="the model is broken"):
            await engine.complete(MESSAGES, Sampling(max_tokens=5))
    assert (await engine.complete(MESSAGES, Sampling(max_tokens=5))).completion_ids


async def test_closing_fails_running_requests(folder: Path) -> None:
    engine = LocalEngine(load(str(folder)), LocalConfig(cache_gb=0.01))
    task = asyncio.ensure_future(engine.complete(MESSAGES, Sampling(max_tokens=450)))
    await eventually(lambda: engine.load.num_running == 1)
    await engine.aclose()
    with pytest.raises(EngineError, match="closed"):
        await task
    with pytest.raises(EngineError, match="closed"):
        await engine.complete(MESSAGES, Sampling(max_tokens=5))


def _prompt(engine: LocalEngine) -> tuple[int, ...]:
    return tuple(engine.prompt_ids(MESSAGES))


# --- streaming ------------------------------------------------------------------------------------


async def streamed(
    engine: LocalEngine, sampling: Sampling
) -> tuple[list[StreamedToken], Completion]:
    *tokens, last = [item async for item in engine.stream(_prompt(engine), sampling)]
    assert isinstance(last, Completion)
    return [token for token in tokens if isinstance(token, StreamedToken)], last


@pytest.mark.parametrize("seed", [None, 1, 2, 3])
async def test_a_stream_gives_the_tokens_of_the_completion(
    engine: LocalEngine, seed: int | None
) -> None:
    sampling = Sampling(max_tokens=40, temperature=0 if seed is None else 1, seed=seed)
    tokens, last = await streamed(engine, sampling)
    whole = await engine.complete(MESSAGES, sampling)
    assert last.completion_ids == whole.completion_ids
    assert last.text == whole.text == "".join(token.text for token in tokens)
    assert tuple(token.token_id for token in tokens) == whole.completion_ids
    assert tuple(token.logprob for token in tokens) == last.logprobs
    assert last.finish_reason == whole.finish_reason


async def test_a_stream_ends_before_its_stop_text(engine: LocalEngine) -> None:
    whole = await engine.complete(MESSAGES, Sampling(max_tokens=30))
    stop = whole.text[9:14]
    tokens, last = await streamed(engine, Sampling(max_tokens=30, stop=(stop,)))
    assert last.finish_reason == "stop"
    assert "".join(token.text for token in tokens) == whole.text[: whole.text.index(stop)]


async def test_a_closed_stream_frees_its_slots(engine: LocalEngine) -> None:
    async with aclosing(engine.stream(_prompt(engine), Sampling(max_tokens=400))) as items:
        async for _ in items:
            break
    await engine.complete(MESSAGES, Sampling(max_tokens=2))
    assert not engine._listeners
    engine.weights_changed()  # fails if anything is in use
    assert engine.load.num_used_slots == 0


async def test_a_stream_fails_with_the_model(
    engine: LocalEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(engine._generator._model, "step", broken)
        with pytest.raises(EngineError, match="the model is broken"):
            await streamed(engine, Sampling(max_tokens=5))
    assert (await streamed(engine, Sampling(max_tokens=5)))[1].completion_ids


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": WINDOW}, "more than the 512"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": 0}, "top_k"),
        ({"stop": ("",)}, "stop"),
    ],
)
async def test_wrong_values_are_refused_before_the_first_token(
    engine: LocalEngine, values: dict[str, Any], message: str
) -> None:
    sampling = Sampling(**{"max_tokens": 5, **values})
    with pytest.raises(EngineRefused, match=message):
        engine.stream(_prompt(engine), sampling)
    with pytest.raises(EngineRefused, match=message):
        await engine.generate(_prompt(engine), sampling)


@pytest.mark.parametrize("ids", [[-1, 3], [3, 10**6]])
async def test_tokens_that_do_not_exist_are_refused(engine: LocalEngine, ids: list[int]) -> None:
    with pytest.raises(EngineRefused, match="token ids"):
        await engine.generate(ids, Sampling(max_tokens=5))


# --- holding still --------------------------------------------------------------------------------


async def test_held_requests_start_together(engine: LocalEngine) -> None:
    sampling = Sampling(max_tokens=5)
    with engine.hold():
        calls = [asyncio.ensure_future(engine.complete(MESSAGES, sampling)) for _ in range(3)]
        await settle()
        assert engine.load.num_waiting == 3
        with engine.hold():  # a hold within a hold
            pass
        await asyncio.sleep(0.05)
        assert engine.load.num_waiting == 3
    replies = await asyncio.gather(*calls)
    assert len({reply.completion_ids for reply in replies}) == 1
    num_steps = 5
    prompt = len(replies[0].prompt_ids or ())
    # the prompt once, its last token for each, and then rows of three
    assert engine._generator.num_computed_tokens == prompt - 1 + 3 * num_steps


async def test_a_fresh_hold_drops_cached_prompts(engine: LocalEngine) -> None:
    async def cached() -> int:
        usage = (await engine.complete(MESSAGES, Sampling(max_tokens=2))).usage
        assert usage is not None
        return usage.cached_tokens

    assert await cached() == 0
    assert await cached() > 0
    with engine.hold(fresh=True):
        pass
    assert await cached() == 0
    assert await cached() > 0


async def test_a_fresh_hold_leaves_running_requests_alone(engine: LocalEngine) -> None:
    sampling = Sampling(max_tokens=60)
    expected = await engine.complete(MESSAGES, sampling)
    ids = []
    async with aclosing(engine.stream(engine.prompt_ids(MESSAGES), sampling)) as items:
        async for item in items:
            if isinstance(item, StreamedToken):
                with engine.hold(fresh=True):
                    ids.append(item.token_id)
    assert tuple(ids) == expected.completion_ids


async def test_an_engine_that_is_closed_while_held_ends(folder: Path) -> None:
    engine = LocalEngine(load(str(folder)), LocalConfig(cache_gb=0.01))
    with engine.hold():
        call = asyncio.ensure_future(engine.complete(MESSAGES, Sampling(max_tokens=5)))
        await settle()
        await asyncio.wait_for(engine.aclose(), 60)
    with pytest.raises(EngineError, match="closed"):
        await call
