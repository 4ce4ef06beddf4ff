"""Calls within limits, and calls of which all succeed or none counts."""

import asyncio

import pytest

from memagent.agent.model_call import Limits, ModelCall, all_or_none, call_model
from memagent.config import EngineConfig
from memagent.engines.limit import Failure
from memagent.engines.openai import EndpointEngine
from memagent.engines.scripted import ScriptedEngine
from memagent.errors import LimitReached
from memagent.tokens.tokenizers import ByteTokenizer
from memagent.types import Message, Prices, Sampling, Usage
from tests.support.chat_servers import chat_server, each_second, said

MESSAGES: list[Message] = [{"role": "user", "content": "Who?"}]
SAMPLING = Sampling(max_tokens=5)


async def test_a_usage_that_is_not_reported_is_estimated_and_counted() -> None:
    limits = Limits(prices=Prices(prompt=1e6, completion=2e6))
    engine = ScriptedEngine(["Hedda"])
    call = await call_model(engine, ByteTokenizer(), limits, MESSAGES, SAMPLING, prompt_tokens=9)
    usage = call.usage
    assert call.completion.text == "Hedda"
    assert (usage.calls, limits.num_calls) == (1, 1)
    assert limits.cost == usage.prompt_tokens + 2 * usage.completion_tokens
    assert call.step("answer").usage is usage


async def test_a_call_that_could_exceed_the_cost_is_not_made_and_its_prompt_is_counted() -> None:
    num_prompt = ByteTokenizer().count_messages(MESSAGES)
    limits = Limits(max_cost=num_prompt + 4, prices=Prices(prompt=1e6, completion=1e6))
    with pytest.raises(LimitReached):
        await call_model(ScriptedEngine(["x"]), ByteTokenizer(), limits, MESSAGES, SAMPLING)
    assert (limits.num_calls, limits.cost) == (0, 0.0)


async def called(engine: EndpointEngine, limits: Limits) -> ModelCall:
    async with engine:
        return await call_model(engine, ByteTokenizer(), limits, MESSAGES, SAMPLING)


def engine_at(base_url: str) -> EndpointEngine:
    return EndpointEngine(EngineConfig(model="test-model", base_url=base_url))


async def test_an_empty_reply_is_requested_again_and_both_requests_are_calls() -> None:
    heard: list[Failure] = []
    limits = Limits(prices=Prices(prompt=1e6, completion=1e6))
    with chat_server(each_second(lambda request: said("Anna"))) as server:
        engine = engine_at(server.base_url)
        engine.on_retry = lambda failure, delay: heard.append(failure)
        call = await called(engine, limits)
    assert (call.completion.text, call.completion.num_attempts) == ("Anna", 2)
    assert call.usage == Usage(calls=2, prompt_tokens=2000, completion_tokens=100)
    assert (limits.num_calls, limits.cost) == (2, 2100)
    assert [failure.reason for failure in heard] == ["an empty reply"]


async def test_an_always_empty_reply_is_believed_in_the_end() -> None:
    limits = Limits()
    with chat_server(lambda request: said("")) as server:
        call = await called(engine_at(server.base_url), limits)
    assert call.completion.text == ""
    assert call.usage.calls == limits.num_calls == len(server.chats) == 4


async def test_in_training_an_empty_reply_is_data_and_not_requested_again() -> None:
    with chat_server(lambda request: said("")) as server:
        engine = engine_at(server.base_url)
        engine.sample_plainly()
        call = await called(engine, Limits())
    assert call.completion.num_attempts == len(server.chats) == 1


async def test_when_one_call_fails_the_others_are_cancelled() -> None:
    cancelled: list[int] = []

    async def wait(number: int) -> int:
        try:
            await asyncio.sleep(60 if number else 0)
        except asyncio.CancelledError:
            cancelled.append(number)
            raise
        raise ValueError("the first fails")

    with pytest.raises(ValueError, match="the first fails"):
        await all_or_none([wait(number) for number in range(3)])
    await asyncio.sleep(0)
    assert cancelled == [1, 2]


async def test_at_a_limit_calls_in_flight_end_before_it_is_raised() -> None:
    ended: list[int] = []

    async def call(number: int) -> int:
        if number == 1:
            raise LimitReached("stopped")
        for _ in range(5):
            await asyncio.sleep(0)
        ended.append(number)
        return number

    with pytest.raises(LimitReached):
        await all_or_none([call(number) for number in range(3)])
    assert ended == [0, 2]
