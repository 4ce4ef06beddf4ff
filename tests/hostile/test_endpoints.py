"""Endpoints are not trusted: whatever they answer is bounded, retried or refused, and never a traceback."""

import itertools
import resource
import time
from collections.abc import Iterator
from typing import Any

import pytest

from memagent.agent.model_call import Limits, call_model
from memagent.config import EngineConfig
from memagent.engines import openai as endpoint_module
from memagent.engines.openai import EndpointEngine
from memagent.errors import EngineError, EngineRefused
from memagent.tokens.tokenizers import open_tokenizer
from memagent.types import Completion, Message, Prices, Sampling
from tests.hostile import replies
from tests.hostile.endpoints import BROKEN, DEEP, USAGES, hostile, reply, response, with_usage
from tests.hostile.harness import tried

MESSAGES: list[Message] = [{"role": "user", "content": "hello"}]


def engine_at(base_url: str, **settings: Any) -> EndpointEngine:
    given = {"model": "m", "base_url": base_url, "patience": 0, "timeout": 5, **settings}
    return EndpointEngine(EngineConfig.parse(given))


async def complete(base_url: str, **settings: Any) -> Completion:
    async with engine_at(base_url, **settings) as engine:
        return await engine.complete(MESSAGES, Sampling(max_tokens=50))


@pytest.mark.parametrize("name", BROKEN)
async def test_a_broken_reply_is_an_error_in_one_line(name: str) -> None:
    async with hostile(lambda request: [BROKEN[name]]) as server:
        with pytest.raises(EngineError) as caught:
            await complete(server.base_url)
    assert len(str(caught.value)) < 500
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("name", BROKEN)
async def test_a_broken_reply_is_retried(name: str) -> None:
    replies = iter([BROKEN[name], reply()])
    async with hostile(lambda request: [next(replies)]) as server:
        completion = await complete(server.base_url, patience=5)
    assert (completion.text, completion.num_attempts) == ("fine", 2)


@pytest.mark.parametrize("name", USAGES)
async def test_a_usage_that_cannot_be_is_counted_here_and_never_lowers_a_cost(name: str) -> None:
    limits = Limits(max_calls=None, max_cost=1.0, prices=Prices(prompt=1.0, completion=1.0))
    async with (
        hostile(lambda request: [with_usage(USAGES[name])]) as server,
        engine_at(server.base_url) as engine,
    ):
        before = limits.cost
        sampling = Sampling(max_tokens=50)
        call = await call_model(engine, open_tokenizer("bytes"), limits, MESSAGES, sampling)
    assert call.completion.text == "fine"
    assert before < limits.cost < 0.001
    assert 0 <= call.usage.cached_tokens <= call.usage.prompt_tokens < 1000
    assert 0 <= call.usage.completion_tokens < 1000


@pytest.mark.parametrize("length", ["", "Content-Length: 96000000\r\n"], ids=["unsaid", "said"])
async def test_a_reply_without_end_is_cut_off(monkeypatch: pytest.MonkeyPatch, length: str) -> None:
    monkeypatch.setattr(endpoint_module, "MAX_REPLY_BYTES", 4_000_000, raising=False)
    head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n{length}\r\n".encode()
    num_sent = 0

    def endless(request: bytes) -> Iterator[bytes]:
        nonlocal num_sent
        yield head
        for _ in range(1500):  # 96 MB
            num_sent += 1
            yield b'{"a": "' + b"x" * 64_000

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    async with hostile(endless) as server:
        with pytest.raises(EngineError, match="longer than"):
            await complete(server.base_url)
    assert num_sent < 300
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 60_000  # kilobytes


async def test_a_compressed_bomb_is_not_unpacked() -> None:
    import gzip

    bomb = gzip.compress(b" " * 50_000_000)
    async with hostile(
        lambda request: [response(bomb, headers="Content-Encoding: gzip\r\n")]
    ) as server:
        with pytest.raises(EngineError, match="compressed"):
            await complete(server.base_url)
    assert b"gzip" not in server.requests[0].lower()


@pytest.mark.parametrize("part", ["head", "body"])
async def test_a_reply_that_drips_ends_with_the_timeout(part: str) -> None:
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
    start = head if part == "head" else head + b"\r\n"

    def drip(request: bytes) -> Iterator[bytes]:
        yield start
        yield from itertools.repeat(b"x")

    began = time.monotonic()
    async with hostile(drip, pause=0.05) as server:
        with pytest.raises(EngineError, match=r"no reply within 0.5 s"):
            await complete(server.base_url, timeout=0.5)
    assert time.monotonic() - began < 20  # without the limit it never ends


async def test_patience_bounds_a_call_whose_replies_drip() -> None:
    began = time.monotonic()
    async with hostile(lambda request: itertools.repeat(b" "), pause=0.05) as server:
        with pytest.raises(EngineError):
            await complete(server.base_url, timeout=0.3, patience=0.6)
    assert time.monotonic() - began < 20  # without the limit it never ends


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "1e-9", "0", "-5", "9" * 400, "Mon, 99"])
@pytest.mark.parametrize("header", ["Retry-After", "retry-after-ms"])
async def test_whatever_retry_after_says_the_call_ends_after_few_attempts(
    header: str, value: str
) -> None:
    busy = response(b"{}", status="429 Busy", headers=f"{header}: {value}\r\n")
    began = time.monotonic()
    async with hostile(lambda request: [busy]) as server:
        with pytest.raises(EngineError) as caught:
            await complete(server.base_url, patience=1)
    assert time.monotonic() - began < 20  # without the limit it never ends
    assert len(server.requests) <= 5
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("status", ["301 M", "302 F", "303 S", "307 T", "308 P"])
async def test_text_is_not_sent_to_another_host_on_a_redirect(status: str) -> None:
    async with hostile(lambda request: [reply()]) as other:
        headers = f"Location: {other.base_url}/chat/completions\r\n"
        async with hostile(
            lambda request: [response(b"", status=status, headers=headers)]
        ) as server:
            with pytest.raises(EngineRefused, match="redirects to another host"):
                await complete(server.base_url, patience=5)
        assert len(server.requests) == 1
    assert other.requests == []


async def test_a_redirect_on_the_same_host_is_followed() -> None:
    def behaviour(request: bytes) -> list[bytes]:
        if b"/new/" in request.split(b"\r\n")[0]:
            return [reply()]
        headers = "Location: /new/chat/completions\r\n"
        return [response(b"", status="307 T", headers=headers)]

    async with hostile(behaviour) as server:
        assert (await complete(server.base_url)).text == "fine"


async def test_a_redirect_without_end_is_refused() -> None:
    headers = "Location: /v1/chat/completions\r\n"
    async with hostile(lambda request: [response(b"", status="307 T", headers=headers)]) as server:
        with pytest.raises(EngineError):
            await complete(server.base_url)


LISTINGS: dict[str, bytes] = {
    "deep": response(DEEP),
    "no list": response(b'{"data": 7}'),
    "strange ids": response(b'{"data": [{"id": {"a": 1}}, {"id": 7}, 3]}'),
    "strange window": response(
        b'{"data": [{"id": "m", "max_model_len": -5, "root": 7}, {"id": "m", "max_model_len": true}]}'
    ),
    "huge window": response(b'{"data": [{"id": "m", "max_model_len": 1e999}]}'),
    "garbage": b"\x00\xff\r\n\r\n",
    "nothing": b"",
}


@pytest.mark.parametrize("name", LISTINGS)
async def test_a_strange_list_of_models_is_no_error(name: str) -> None:
    async with (
        hostile(lambda request: [LISTINGS[name]]) as server,
        engine_at(server.base_url) as engine,
    ):
        await engine.inspect()
        assert (engine.model, engine.tokenizer, engine.served_window) == ("m", "m", None)


def test_control_characters_of_an_endpoint_do_not_reach_a_message() -> None:
    engine = engine_at("http://127.0.0.1:9/v1")
    assert engine._clean("a\x1b]0;title\x07 \u202eb\n c") == "a?]0;title? ?b c"


def test_hostile_replies_are_taken_retried_or_refused() -> None:
    assert tried(replies.complaint, 8, 1) == []
