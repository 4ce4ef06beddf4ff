"""Several endpoints as one engine: who is asked, who is set aside, and that nothing is lost."""

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from memagent.engines.addresses import addresses, public_url
from memagent.engines.balance import (
    AFFINITY_SLACK,
    PREFIX_CHARS,
    BalancedEngine,
    Balancer,
    prefix_keys,
)
from memagent.engines.base import open_engine
from memagent.engines.limit import Failure
from memagent.errors import ConfigError, EngineError, EngineRefused
from memagent.types import Completion, Message, Sampling
from tests.support.loopback import Endpoint, messages_sha, running
from tests.support.timing import eventually

SAMPLING = Sampling(max_tokens=50)
GONE = Failure(kind="unreachable", reason="connection refused")
BAD = Failure(kind="failed", reason="HTTP 500")


class Clock:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def asked(number: int) -> list[Message]:
    return [{"role": "user", "content": f"question {number}"}]


def picks(balancer: Balancer, count: int) -> list[int | None]:
    """Choices for calls that do not end."""
    found = []
    for _ in range(count):
        number = balancer.choose()
        assert number is not None
        balancer.begin(number)
        found.append(number)
    return found


# --- the choice -----------------------------------------------------------------------------------


def test_the_least_busy_is_chosen_and_turns_are_taken() -> None:
    balancer = Balancer(3)
    assert picks(balancer, 6) == [0, 1, 2, 0, 1, 2]
    balancer.end(1)
    balancer.end(1)
    assert balancer.choose() == 1


def test_one_after_the_other_all_get_their_share() -> None:
    balancer = Balancer(2)
    found = []
    for _ in range(4):
        found += picks(balancer, 1)
        balancer.end(found[-1])
    assert found == [0, 1, 0, 1]


def test_one_without_a_connection_is_set_aside_for_longer_each_time() -> None:
    clock = Clock()
    balancer = Balancer(2, clock=clock)
    for seconds in (1.0, 2.0, 4.0):
        balancer.failed(0, GONE)
        clock.now += seconds - 0.1
        assert set(picks(balancer, 3)) == {1}
        clock.now += 0.1
        assert balancer.choose() == 0


def test_it_comes_back_with_one_call_and_then_in_full() -> None:
    clock = Clock()
    balancer = Balancer(2, clock=clock)
    picks(balancer, 4)
    balancer.end(0)
    balancer.end(0)
    balancer.failed(0, GONE)
    clock.now += 1.0
    assert picks(balancer, 4) == [0, 1, 1, 1]
    balancer.end(0)
    balancer.succeeded(0)
    assert picks(balancer, 3) == [0, 0, 0]


def test_single_bad_replies_do_not_set_aside_but_three_in_a_row_do() -> None:
    balancer = Balancer(2, clock=Clock())
    for _ in range(5):
        balancer.failed(0, BAD)
        balancer.failed(0, BAD)
        balancer.succeeded(0)
    assert balancer.choose() == 0
    for _ in range(3):
        balancer.failed(0, BAD)
    assert picks(balancer, 3) == [1, 1, 1]


def test_a_wait_that_the_server_asks_for_is_kept() -> None:
    clock = Clock()
    balancer = Balancer(2, clock=clock)
    balancer.failed(0, Failure(kind="busy", reason="HTTP 429", retry_after=50.0))
    clock.now += 49.0
    assert picks(balancer, 2) == [1, 1]
    clock.now += 1.0
    assert balancer.choose() == 0


def test_failures_of_calls_that_left_together_count_once() -> None:
    clock = Clock()
    balancer = Balancer(2, clock=clock)
    for _ in range(20):
        balancer.failed(0, GONE)
    clock.now += 1.0
    assert balancer.choose() == 0


def test_when_all_are_aside_the_one_that_is_due_first_is_asked_and_no_other() -> None:
    clock = Clock()
    balancer = Balancer(3, clock=clock)
    for number in (1, 2, 0):
        balancer.failed(number, GONE)
        clock.now += 0.1
    assert balancer.choose() == 1
    assert balancer.choose(tried={1}) is None


# --- prompts with a common prefix -----------------------------------------------------------------


def long_prompt(start: str, end: str) -> list[Message]:
    return [{"role": "user", "content": start * 2 * PREFIX_CHARS + end}]


def test_prompts_with_a_common_prefix_go_to_the_same_endpoint_while_load_allows() -> None:
    balancer = Balancer(2)
    first, second = (prefix_keys(long_prompt("a", end)) for end in ("x", "y"))
    other = prefix_keys(long_prompt("b", "x"))
    assert first == second != other
    found = []
    for _ in range(AFFINITY_SLACK + 2):
        number = balancer.choose(second)
        assert number is not None
        balancer.begin(number, second)
        found.append(number)
    assert found == [0] * (AFFINITY_SLACK + 1) + [1]
    assert balancer.choose(other) == 1


def test_the_longest_beginning_in_common_counts() -> None:
    balancer = Balancer(2)
    section = "s" * PREFIX_CHARS
    one, two = (
        prefix_keys([{"role": "user", "content": section + text * PREFIX_CHARS}]) for text in "ab"
    )
    assert one[0] == two[0]
    balancer.begin(0, one)
    balancer.begin(1, two)
    assert (balancer.choose(one), balancer.choose(two)) == (0, 1)


def test_a_home_that_is_set_aside_is_left() -> None:
    balancer = Balancer(2, clock=Clock())
    keys = prefix_keys(long_prompt("a", "x"))
    balancer.begin(0, keys)
    balancer.failed(0, GONE)
    assert balancer.choose(keys) == 1


def test_short_prompts_have_no_home() -> None:
    assert prefix_keys(asked(1)) == []
    assert prefix_keys([{"role": "user", "content": "\ud800" * PREFIX_CHARS}]) != []


# --- against endpoints ----------------------------------------------------------------------------


@pytest.fixture
def endpoints(tmp_path: Path) -> Iterator[list[Endpoint]]:
    with ExitStack() as stack:
        yield [
            stack.enter_context(
                running(log=tmp_path / f"{number}.jsonl", reply="echo", latency_ms=20)
            )
            for number in range(3)
        ]


def balanced(endpoints: list[Endpoint], **settings: Any) -> BalancedEngine:
    base_url = ",".join(endpoint.base_url for endpoint in endpoints)
    given = {"base_url": base_url, "patience": 20, **settings}
    engine = open_engine("openai:test-model", **given)
    assert isinstance(engine, BalancedEngine)
    return engine


def num_answered(endpoint: Endpoint) -> int:
    return sum(call["outcome"] == "ok" for call in endpoint.calls())


async def test_calls_are_spread_evenly(endpoints: list[Endpoint]) -> None:
    """All calls leave before the first reply, so which endpoint is quick does not matter."""
    async with balanced(endpoints, concurrency=60) as engine:
        await asyncio.gather(*(engine.complete(asked(n), SAMPLING) for n in range(60)))
    assert [num_answered(endpoint) for endpoint in endpoints] == [20, 20, 20]


async def test_prompts_with_a_common_prefix_stay_together(endpoints: list[Endpoint]) -> None:
    async with balanced(endpoints[:2]) as engine:
        for number in range(8):
            await engine.complete(long_prompt("a", str(number)), SAMPLING)
    assert sorted(num_answered(endpoint) for endpoint in endpoints[:2]) == [0, 8]


async def test_the_limit_of_calls_under_way_holds_for_all_together(tmp_path: Path) -> None:
    with (
        running(log=tmp_path / "a.jsonl", latency_ms=50) as one,
        running(log=tmp_path / "b.jsonl", latency_ms=50) as two,
    ):
        loop = asyncio.get_running_loop()
        async with balanced([one, two], concurrency=2) as engine:
            await engine.complete(asked(0), SAMPLING)
            started = loop.time()
            await asyncio.gather(*(engine.complete(asked(n), SAMPLING) for n in range(12)))
            assert loop.time() - started > 0.05 * 12 / 2 * 0.95


async def test_when_one_dies_on_the_way_nothing_is_lost(endpoints: list[Endpoint]) -> None:
    retries: list[str] = []
    async with balanced(endpoints, concurrency=12) as engine:
        engine.on_retry = lambda failure, delay: retries.append(f"{failure.kind} {delay:.0f}")
        calls = [asyncio.ensure_future(engine.complete(asked(n), SAMPLING)) for n in range(150)]
        await calls[20]
        endpoints[1].kill()
        replies: list[Completion] = await asyncio.gather(*calls)
    answered = Counter(
        call["sha"]
        for endpoint in endpoints
        for call in endpoint.calls()
        if call["outcome"] == "ok"
    )
    assert set(answered) == {messages_sha(asked(n)) for n in range(150)}
    assert answered.total() <= 150 + 12  # no more than were on their way when it died
    # the reply is a digest of the prompt, so a mixed up one would show
    async with balanced(endpoints[:1] + endpoints[2:]) as healthy:
        again = await asyncio.gather(*(healthy.complete(asked(n), SAMPLING) for n in range(150)))
    assert [reply.text for reply in replies] == [reply.text for reply in again]
    assert "unreachable 0" in retries
    assert max(reply.num_attempts for reply in replies) == 2


async def test_one_that_comes_back_is_used_again(endpoints: list[Endpoint]) -> None:
    async with balanced(endpoints[:2], concurrency=4) as engine:
        await engine.complete(asked(0), SAMPLING)
        endpoints[1].kill()
        for number in range(4):
            await engine.complete(asked(number), SAMPLING)
        endpoints[1].restart()
        before = num_answered(endpoints[1])
        for _ in range(60):  # it is set aside for a second
            await asyncio.gather(*(engine.complete(asked(n), SAMPLING) for n in range(20)))
            if num_answered(endpoints[1]) - before > 5:
                break
            await asyncio.sleep(0.1)
        assert num_answered(endpoints[1]) - before > 5


async def test_when_all_are_down_patience_decides(endpoints: list[Endpoint]) -> None:
    async with balanced(endpoints[:2], patience=2) as engine:
        await engine.complete(asked(0), SAMPLING)
        for endpoint in endpoints[:2]:
            endpoint.kill()
        with pytest.raises(
            EngineError, match=r"http.*/v1, http.*/v1 failed for \d s \(\d+ attempts"
        ):
            await engine.complete(asked(1), SAMPLING)


async def test_an_outage_of_all_is_outlasted(endpoints: list[Endpoint]) -> None:
    async with balanced(endpoints[:2]) as engine:
        await engine.complete(asked(0), SAMPLING)
        for endpoint in endpoints[:2]:
            endpoint.kill()
        retries: list[float] = []
        engine.on_retry = lambda failure, delay: retries.append(delay)
        call = asyncio.ensure_future(engine.complete(asked(1), SAMPLING))
        await eventually(lambda: len(retries) >= 3)
        endpoints[0].restart()
        reply = await call
    assert reply.num_attempts > 2


async def test_a_refusal_is_reported_at_once(endpoints: list[Endpoint], tmp_path: Path) -> None:
    with running(log=tmp_path / "key.jsonl", api_key="secret-key") as locked:
        async with balanced([locked, locked], api_key="wrong-key") as engine:
            with pytest.raises(EngineRefused, match="refused the key"):
                await engine.complete(asked(0), SAMPLING)
        assert len(locked.calls()) == 1


async def test_faults_of_all_kinds_are_worked_around(tmp_path: Path) -> None:
    faults = "500=0.1,reset=0.1,malformed=0.05,429=0.05"
    with ExitStack() as stack:
        endpoints = [
            stack.enter_context(
                running(log=tmp_path / f"{n}.jsonl", reply="echo", faults=faults, seed=n)
            )
            for n in range(2)
        ]
        async with balanced(endpoints, concurrency=8) as engine:
            replies = await asyncio.gather(
                *(engine.complete(asked(n), SAMPLING) for n in range(100))
            )
        clean = stack.enter_context(running(reply="echo"))
        async with open_engine("openai:test-model", base_url=clean.base_url) as reference:
            for number, reply in enumerate(replies):
                expected = await reference.complete(asked(number), SAMPLING)
                assert reply.text == expected.text
        num_requests = sum(len(endpoint.calls()) for endpoint in endpoints)
        assert sum(reply.num_attempts for reply in replies) == num_requests


async def test_a_call_that_is_cancelled_frees_its_place(endpoints: list[Endpoint]) -> None:
    async with balanced(endpoints[:2], concurrency=1) as engine:
        call = asyncio.ensure_future(engine.complete(asked(0), SAMPLING))
        await asyncio.sleep(0.005)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        assert (await engine.complete(asked(1), SAMPLING)).text


# --- what they serve ------------------------------------------------------------------------------


async def test_the_model_and_the_smallest_window_are_found(tmp_path: Path) -> None:
    with (
        running(max_model_len=9000, root=str(tmp_path)) as one,
        running(max_model_len=8000, root=str(tmp_path)) as two,
    ):
        urls = f"{one.base_url}, {two.base_url},"
        async with open_engine("openai:", base_url=urls) as engine:
            assert isinstance(engine, BalancedEngine)
            assert (engine.model, engine.tokenizer, engine.served_window) == (
                "test-model",
                str(tmp_path),
                8000,
            )
            assert (await engine.complete(asked(0), SAMPLING)).text


async def test_one_that_is_down_at_the_start_may_join_later(endpoints: list[Endpoint]) -> None:
    endpoints[0].kill()
    base_url = ",".join(endpoint.base_url for endpoint in endpoints[:2])
    async with open_engine("openai:", base_url=base_url) as engine:
        assert isinstance(engine, BalancedEngine)
        assert engine.model == "test-model"
        endpoints[0].restart()
        await asyncio.gather(*(engine.complete(asked(n), SAMPLING) for n in range(10)))
    assert num_answered(endpoints[0]) == 5


def test_different_models_are_not_mixed() -> None:
    with (
        running(model="model-a") as one,
        running(model="model-b") as two,
        pytest.raises(ConfigError, match=r"model-a at http.*, model-b at http"),
    ):
        open_engine("openai:", base_url=f"{one.base_url},{two.base_url}")


# --- addresses ------------------------------------------------------------------------------------


def test_addresses_are_separated_by_commas() -> None:
    assert addresses("http://a/v1, http://b/v1,") == ("http://a/v1", "http://b/v1")
    assert addresses(None) == ()
    shown = public_url("http://a/v1?key=x,https://user:pw@b/v1")
    assert shown == "http://a/v1,https://b/v1"


@pytest.mark.parametrize("url", ["http://a/v1,localhost:8000", ",", "http://a/v1,ftp://b"])
def test_every_address_is_checked(url: str) -> None:
    with pytest.raises(ConfigError, match="address"):
        open_engine("openai:m", base_url=url)


def test_one_address_needs_no_balance() -> None:
    engine = open_engine("openai:m", base_url="http://a/v1,")
    assert not isinstance(engine, BalancedEngine)
