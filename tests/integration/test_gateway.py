"""The reading gateway with OpenAI's own client: short and long requests, files, keys, interruptions."""

import asyncio
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncGenerator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from fastapi import Request

from memagent.agent.reader import Reader
from memagent.config import EngineConfig, GatewayConfig, KeyLimits, LocalConfig
from memagent.engines.local.engine import LocalEngine
from memagent.engines.local.loading import load
from memagent.engines.openai import EndpointEngine
from memagent.errors import RunError
from memagent.serve.keys import KeyHolder, KeyStore
from memagent.serve.reading import gateway as gateways
from memagent.serve.reading.files import FileStore
from memagent.serve.reading.requests import GatewayChat
from memagent.serve.reading.state import GatewayState
from memagent.serve.wire import parse
from tests.conftest import prose
from tests.hostile import requests as hostile
from tests.hostile.harness import tried
from tests.support.chat_servers import Json, chat_server, prompt_of, said
from tests.support.gateways import (
    FACT,
    MODEL,
    QUESTION,
    SMALL,
    Gateway,
    PatientEngine,
    asking,
    chat_request,
    connected,
    novel,
    readings_of,
    serving_gateway,
)
from tests.support.timing import wait_until
from tests.support.tiny_models import WINDOW, make_tiny_model

MEMAGENT = Path(sys.executable).parent / "memagent"
HELLO: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello?"}]


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    with serving_gateway(tmp_path_factory.mktemp("secret-state")) as gateway:
        yield gateway


@pytest.fixture
def client(gateway: Gateway) -> Iterator[openai.OpenAI]:
    with gateway.client() as client:
        yield client


def num_calls(gateway: Gateway) -> int:
    return len(gateway.engine.prompts)  # type: ignore[attr-defined]


def asking_about(*file_ids: str, question: str = QUESTION) -> Any:
    content = [{"type": "file", "file": {"file_id": file_id}} for file_id in file_ids]
    return [{"role": "user", "content": [*content, {"type": "text", "text": question}]}]


def chat(client: openai.OpenAI, messages: Any, **options: Any) -> Any:
    return client.chat.completions.create(model=MODEL, messages=messages, **options)


# --- short and long -------------------------------------------------------------------------------


def test_a_short_conversation_reaches_the_engine_as_it_is(
    gateway: Gateway, client: openai.OpenAI
) -> None:
    before = num_calls(gateway)
    reply = chat(client, HELLO, max_tokens=20, temperature=0.5)
    assert num_calls(gateway) == before + 1
    assert gateway.engine.prompts[-1] == HELLO  # type: ignore[attr-defined]
    assert reply.choices[0].message.content == "The text does not tell."
    assert (reply.model, reply.choices[0].finish_reason) == (MODEL, "stop")
    assert reply.usage.model_dump(
        include={"prompt_tokens", "completion_tokens", "total_tokens"}
    ) == {"prompt_tokens": 3, "completion_tokens": 5, "total_tokens": 8}
    assert reply._request_id.startswith("req_")


def test_300k_tokens_through_a_window_of_8k_give_the_right_answer(tmp_path: Path) -> None:
    text = novel(29_000)
    with serving_gateway(tmp_path, reading={}) as gateway, gateway.client() as client:
        reply = chat(client, [{"role": "user", "content": f"{text}\n\n{QUESTION}"}])
        longest = max(
            sum(len(message["content"]) for message in prompt)
            for prompt in gateway.engine.prompts  # type: ignore[attr-defined]
        )
    assert reply.choices[0].message.content == FACT
    assert reply.usage.prompt_tokens > 300_000
    assert reply.usage.completion_tokens_details.reasoning_tokens < reply.usage.completion_tokens
    assert longest < 8192 * 4


def test_the_usage_counts_every_call(gateway: Gateway, client: openai.OpenAI) -> None:
    before = num_calls(gateway)
    reply = chat(client, asking(novel(190)))
    made = gateway.engine.prompts[before:]  # type: ignore[attr-defined]
    words = [len(message["content"].split()) for prompt in made for message in prompt]
    assert reply.reading["calls"] == len(made) == reply.reading["sections"] + 1
    assert reply.usage.prompt_tokens >= sum(words)


def test_a_stream_of_responses_has_the_events_that_the_client_expects(
    client: openai.OpenAI,
) -> None:
    with client.responses.stream(model=MODEL, input=f"{novel(230)}\n\n{QUESTION}") as stream:
        events = list(stream)
        final = stream.get_final_response()
    kinds = [event.type for event in events]
    assert kinds[0] == "response.created"
    assert kinds[-1] == "response.completed"
    assert kinds.index("response.reasoning_summary_text.delta") < kinds.index(
        "response.output_text.delta"
    )
    numbers = [event.sequence_number for event in events if hasattr(event, "sequence_number")]
    assert numbers == sorted(numbers)
    assert final.output_text == FACT


def test_settings_of_the_reader_come_with_the_request_or_the_name_of_the_model(
    client: openai.OpenAI,
) -> None:
    plain = chat(client, asking(novel(240)))
    fine = chat(client, asking(novel(240)), extra_body={"reading": {"chunk_tokens": 200}})
    named = client.chat.completions.create(
        model="memagent:chunk_tokens=200", messages=asking(novel(240))
    )
    assert fine.reading["sections"] > 1.5 * plain.reading["sections"]
    assert named.reading == {**fine.reading, "calls": 0, "stored_steps": fine.reading["calls"]}  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("fields", "status", "code"),
    [
        ({"reading": {"prompts": "/etc/passwd"}}, 400, "invalid_value"),
        ({"reading": {"prompts": ["default"]}}, 400, "invalid_value"),
        ({"reading": {"window": 9000}}, 400, "invalid_value"),
        ({"reading": {"rounds": 2}}, 400, "invalid_value"),
        ({"messages": [{"role": "user", "content": [{"type": "file", "file": {}}]}]}, 400, None),
        (
            {"messages": [{"role": "user", "content": [{"type": "input_file", "file_id": "x"}]}]},
            404,
            "not_found",
        ),
    ],
)
def test_errors_are_those_that_clients_know(
    gateway: Gateway, fields: dict[str, Any], status: int, code: str | None
) -> None:
    body = {"model": MODEL, "messages": HELLO, **fields}
    reply = gateway.send("POST", "/v1/chat/completions", json=body)
    assert (reply.status_code, reply.json()["error"]["code"]) == (status, code)
    assert "secret-state" not in reply.text
    streamed = gateway.send("POST", "/v1/chat/completions", json={**body, "stream": True})
    assert streamed.status_code == status


@contextmanager
def local_gateway(tmp_path: Path) -> Iterator[Gateway]:
    """A gateway over a tiny model in this process."""
    folder = make_tiny_model(tmp_path / "tiny", "llama")
    reading = {"window": WINDOW, "chunk_tokens": 64, "memory_tokens": 16, "answer_tokens": 16}
    with (
        LocalEngine(load(str(folder)), LocalConfig(cache_gb=0.01)) as engine,
        serving_gateway(
            tmp_path / "state", engine, reading={**reading, "prompts": "compact"}
        ) as gateway,
    ):
        yield gateway


def test_a_local_model_streams_short_replies_token_by_token(tmp_path: Path) -> None:
    with local_gateway(tmp_path) as it, it.client() as client:
        whole = chat(client, HELLO, max_tokens=20)
        chunks = list(chat(client, HELLO, max_tokens=20, stream=True))
        used = it.state.used("anyone").usage
    texts = [chunk.choices[0].delta.content for chunk in chunks if chunk.choices[0].delta.content]
    assert "".join(texts) == whole.choices[0].message.content
    assert len(texts) > 5
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason == "length"
    assert (used.calls, used.completion_tokens) == (2, 40)


def test_the_command_serves_until_it_is_told_to_end(tmp_path: Path) -> None:
    key = KeyStore(tmp_path / "keys.json").add("anna")
    command = [*("serve", "--reader", "--engine", "scripted", "--port", "0")]
    server = subprocess.Popen(
        [MEMAGENT, *command, "--state-dir", tmp_path],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert server.stdout is not None
        base_url = server.stdout.readline().strip()
        with openai.OpenAI(base_url=base_url, api_key=key, max_retries=0) as client:
            assert chat(client, HELLO).choices[0].message.content == "The text does not tell."
    finally:
        server.terminate()
        _, said = server.communicate(timeout=60)
    assert server.returncode in (0, -signal.SIGTERM)
    assert "reading with scripted through a window of 8,192 tokens" in said
    assert "POST /v1/chat/completions 200, 3 + 5 tokens" in said
    assert key not in said
    assert "Traceback" not in said


# --- files ----------------------------------------------------------------------------------------


def test_a_file_is_sent_once_and_asked_many_times(gateway: Gateway, client: openai.OpenAI) -> None:
    text = novel(300)
    file = client.files.create(file=("../../novel.txt", text.encode()), purpose="user_data")
    assert (file.filename, file.bytes) == ("novel.txt", len(text.encode()))

    def asked(question: str) -> Any:
        content = [
            {"type": "file", "file": {"file_id": file.id}},
            {"type": "text", "text": question},
        ]
        return chat(client, [{"role": "user", "content": content}])

    assert asked(QUESTION).choices[0].message.content == FACT
    assert asked("Who has the house?").choices[0].message.content == FACT
    again = asked(QUESTION)
    assert again.choices[0].message.content == FACT
    assert again.usage.total_tokens == 0
    assert client.files.content(file.id).read() == text.encode()
    assert [each.id for each in client.files.list()] == [file.id]
    assert client.files.delete(file.id).deleted
    with pytest.raises(openai.NotFoundError):
        asked(QUESTION)


def test_deleting_a_file_deletes_the_readings_of_it(tmp_path: Path) -> None:
    with serving_gateway(tmp_path) as gateway, gateway.client() as client:
        files = [
            client.files.create(file=(name, novel(size).encode()), purpose="user_data").id
            for name, size in (("a.txt", 300), ("b.txt", 310))
        ]
        for file in files:
            chat(client, asking_about(file))
        chat(client, asking_about(*files))
        first, second, both = readings_of(gateway.state)[::-1]
        damaged = gateway.state.readings / f"{first}-damaged"
        damaged.mkdir()
        client.files.delete(files[0])
        assert readings_of(gateway.state) == [second]
        assert [path.name for path in gateway.state.readings.iterdir()] == [second]
        with pytest.raises(openai.NotFoundError):
            chat(client, asking_about(files[0]))
    del both
    words = b"Line 7 of the 300 lines"
    assert [
        path for path in tmp_path.rglob("*") if path.is_file() and words in path.read_bytes()
    ] == []


def test_a_file_that_is_deleted_while_it_is_read_leaves_nothing(tmp_path: Path) -> None:
    engine = PatientEngine(0.03)
    with serving_gateway(tmp_path, engine) as gateway, gateway.client() as client:
        file = client.files.create(file=("a.txt", novel(300).encode()), purpose="user_data").id
        with chat(client, asking_about(file), stream=True) as stream:
            next(iter(stream))
            client.files.delete(file)
            words = [chunk.choices[0].delta.content or "" for chunk in stream]
        assert "".join(words) == FACT
        wait_until(lambda: not any(gateway.state.readings.iterdir()))
        assert readings_of(gateway.state) == []
        assert gateway.state.texts_of_deleted() == []


def test_deleting_a_file_drops_what_is_cached_of_prompts(tmp_path: Path) -> None:
    reading = {"window": 1024, "chunk_tokens": 200, "memory_tokens": 16, "answer_tokens": 8}
    apart = {"mode": "parallel", "rounds": 1, "prompts": "compact", "temperature": 0.0}
    folder = make_tiny_model(tmp_path / "tiny", "llama", max_position_embeddings=1024)
    with (
        LocalEngine(load(str(folder)), LocalConfig(cache_gb=0.01)) as engine,
        serving_gateway(tmp_path / "state", engine, reading={**reading, **apart}) as gateway,
        gateway.client() as client,
    ):
        content = prose(150, 1).encode()
        file = client.files.create(file=("a.txt", content), purpose="user_data").id
        chat(client, asking_about(file))
        assert engine.load.num_used_slots > 0
        client.files.delete(file)
        assert engine.load.num_used_slots == 0


def test_concurrent_files_keep_to_the_limit_too(tmp_path: Path) -> None:
    with GatewayState(tmp_path) as state, ThreadPoolExecutor(8) as pool:
        added = pool.map(
            lambda n: state.add_file("anna", f"{n}.txt", "user_data", b"x" * 100, max_bytes=250),
            range(40),
        )
        assert sum(one is not None for one in added) == len(state.files_of("anna")) == 2
        assert len(list((tmp_path / "files").iterdir())) == 2


def test_what_a_killed_server_left_of_files_is_deleted(tmp_path: Path) -> None:
    with GatewayState(tmp_path) as state:
        kept = state.add_file("anna", "a.txt", "user_data", b"x", max_bytes=10)
        assert kept is not None
        half = f"file-{'0' * 24}"
        for name in (half, f".{half}.1-2.part", "mine.txt"):
            (tmp_path / "files" / name).write_bytes(b"secret")
    with GatewayState(tmp_path) as state:
        left = {path.name for path in (tmp_path / "files").iterdir()}
        assert left == {kept.id, "mine.txt"}


def test_the_bytes_of_a_file_are_sent_in_pieces(tmp_path: Path) -> None:
    """Many clients that read slowly do not fill the memory of the server."""
    sizes: list[int] = []
    data = b"x" * 3_000_000
    with GatewayState(tmp_path) as state:
        stored = state.add_file("anyone", "a.txt", "user_data", data, max_bytes=len(data))
        assert stored is not None

        async def forgets(owner: str) -> None: ...

        async def receive() -> Any:
            await asyncio.Event().wait()

        async def send(message: Any) -> None:
            sizes.append(len(message.get("body", b"")))

        async def fetched() -> None:
            files = FileStore(state, max_stored_bytes=1, max_request_bytes=1000, on_delete=forgets)
            scope = {"type": "http", "method": "GET", "headers": [], "state": {}}
            request = Request(scope)
            request.state.holder = KeyHolder()
            response = await files.content(request, stored.id)
            await response(scope, receive, send)

        asyncio.run(fetched())
    assert sum(sizes) == len(data)
    assert max(sizes) <= 1_000_000


def test_pages_of_listed_files_join(gateway: Gateway, client: openai.OpenAI) -> None:
    sent = [client.files.create(file=(f"{n}.txt", b"Rain."), purpose="user_data") for n in range(3)]
    listed = [file.id for file in client.files.list(limit=2)]
    assert listed == [file.id for file in reversed(sent)]
    for file in sent:
        client.files.delete(file.id)


def test_files_of_a_key_have_a_common_limit(tmp_path: Path) -> None:
    with serving_gateway(tmp_path, max_stored_bytes=1000) as gateway, gateway.client() as client:
        client.files.create(file=("a.txt", b"x" * 900), purpose="user_data")
        with pytest.raises(openai.APIStatusError) as caught:
            client.files.create(file=("b.txt", b"x" * 900), purpose="user_data")
        assert caught.value.status_code == 413


# --- interruptions --------------------------------------------------------------------------------


def test_a_client_that_disconnects_stops_the_work_which_is_continued_later(tmp_path: Path) -> None:
    engine = PatientEngine(0.05)
    with serving_gateway(tmp_path, engine) as gateway, gateway.client() as client:
        with chat(client, asking(novel(250)), stream=True) as stream:
            for number, _ in enumerate(stream):
                if number == 4:
                    break
        wait_until(lambda: engine.num_running == 0)
        num_before = len(engine.prompts)
        time.sleep(0.2)
        assert len(engine.prompts) == num_before
        assert len(readings_of(gateway.state)) == 1
        engine.seconds = 0.0
        reply = chat(client, asking(novel(250)))
        assert reply.choices[0].message.content == FACT
        assert reply.reading["stored_steps"] >= 3
        prompts = [json.dumps(prompt) for prompt in engine.prompts]
        assert len(set(prompts)) == len(prompts)  # no finished call is repeated


def test_a_request_that_does_not_stream_is_cancelled_too(tmp_path: Path) -> None:
    engine = PatientEngine(5.0)
    with serving_gateway(tmp_path, engine) as gateway:
        for messages in (HELLO, asking()):
            with suppress(httpx.TimeoutException):
                httpx.post(
                    f"{gateway.base_url}/chat/completions",
                    json={"model": MODEL, "messages": messages},
                    timeout=0.5,
                )
            wait_until(lambda: engine.num_running == 0)
        assert engine.num_cancelled == 2


def test_a_shutdown_keeps_unfinished_readings_for_the_next_server(tmp_path: Path) -> None:
    engine = PatientEngine(0.05)
    failed: list[Exception] = []

    def ask(gateway: Gateway) -> None:
        try:
            with gateway.client() as client:
                chat(client, asking(novel(260)))
        except openai.APIError as error:
            failed.append(error)

    with serving_gateway(tmp_path, engine) as gateway:
        asked = threading.Thread(target=ask, args=[gateway])
        asked.start()
        wait_until(lambda: len(engine.prompts) >= 3)
    asked.join()
    assert getattr(failed[0], "status_code", None) == 503
    num_before = len(engine.prompts)
    engine.seconds = 0.0
    with serving_gateway(tmp_path, engine) as gateway, gateway.client() as client:
        reply = chat(client, asking(novel(260)))
    assert reply.choices[0].message.content == FACT
    assert reply.reading["stored_steps"] >= num_before - 1
    assert len(engine.prompts) == num_before + reply.reading["calls"]


def test_the_same_request_twice_at_once_is_read_once(tmp_path: Path) -> None:
    engine = PatientEngine(0.01)
    with (
        serving_gateway(tmp_path, engine) as gateway,
        gateway.client() as client,
        ThreadPoolExecutor(4) as pool,
    ):
        replies = list(pool.map(lambda _: chat(client, asking()), range(4)))
    assert {reply.choices[0].message.content for reply in replies} == {FACT}
    assert len(engine.prompts) == max(reply.reading["calls"] for reply in replies)


def test_a_damaged_reading_is_set_aside_and_read_again(tmp_path: Path) -> None:
    with serving_gateway(tmp_path) as gateway, gateway.client() as client:
        chat(client, asking())
        (folder,) = (tmp_path / "readings").iterdir()
        (folder / "replies.jsonl").write_text('{"scope": "0", "call": 5}\n' * 2)
        reply = chat(client, asking())
    assert reply.choices[0].message.content == FACT
    assert reply.reading["stored_steps"] == 0
    assert sorted(path.name for path in (tmp_path / "readings").iterdir()) == [
        folder.name,
        f"{folder.name}-damaged",
    ]
    with serving_gateway(tmp_path, keep_days=1e-9) as gateway, gateway.client() as client:
        chat(client, asking(novel(201)))  # both are old now
    assert len(list((tmp_path / "readings").iterdir())) == 1


def test_one_gateway_at_a_time_holds_a_state_folder(tmp_path: Path) -> None:
    with GatewayState(tmp_path), pytest.raises(RunError, match="another gateway"):
        GatewayState(tmp_path)


# --- keys -----------------------------------------------------------------------------------------


def test_a_gateway_that_began_open_needs_a_key_from_when_one_is_added(tmp_path: Path) -> None:
    with serving_gateway(tmp_path) as gateway:
        assert gateway.send("GET", "/metrics").status_code == 200
        with gateway.client() as client:
            assert chat(client, HELLO).choices[0].message.content
        key = KeyStore(tmp_path / "keys.json").add("anna")
        for path in ("/v1/models", "/openapi.json", "/nosuch"):
            assert (gateway.send("GET", path).status_code, path) == (401, path)
        with gateway.client(key) as client:
            assert chat(client, HELLO).choices[0].message.content


def test_holders_do_not_see_each_others_files_and_readings(tmp_path: Path) -> None:
    store = KeyStore(tmp_path / "keys.json")
    keys = [store.add("anna"), store.add("bert")]
    with serving_gateway(tmp_path) as gateway:
        anna, bert = (gateway.client(key) for key in keys)
        file = anna.files.create(file=("a.txt", novel().encode()), purpose="user_data")
        assert list(bert.files.list()) == []
        for refused in (bert.files.retrieve, bert.files.content, bert.files.delete):
            with pytest.raises(openai.NotFoundError):
                refused(file.id)
        first, second = chat(anna, asking()), chat(bert, asking())
        assert first.reading["calls"] == second.reading["calls"] > 0


class CountingEngine(LocalEngine):
    """A local engine that notes how many tokens of each prompt it did not compute again."""

    num_cached: list[int]

    def _completion(self, request: Any) -> Any:
        completion = super()._completion(request)
        assert completion.usage is not None
        self.num_cached.append(completion.usage.cached_tokens)
        return completion


def test_nobody_can_tell_from_the_cache_what_holders_of_other_keys_sent(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "tiny", "llama")
    reading = {"window": WINDOW, "chunk_tokens": 64, "memory_tokens": 16, "answer_tokens": 16}
    store = KeyStore(tmp_path / "state" / "keys.json")
    keys = [store.add("anna"), store.add("bert")]
    short: Any = [{"role": "user", "content": prose(2)}, {"role": "user", "content": "Why?"}]
    long = asking(prose(20))
    for messages in (short, long):
        engine = CountingEngine(load(str(folder)), LocalConfig(cache_gb=0.01))
        engine.num_cached = cached = []
        with (
            engine,
            serving_gateway(
                tmp_path / "state", engine, reading={**reading, "prompts": "compact"}
            ) as gateway,
        ):
            anna, bert = (gateway.client(key) for key in keys)
            chat(anna, messages, max_tokens=4)
            alone = list(cached)
            chat(bert, messages, max_tokens=4)
            assert cached[len(alone) :] == alone
            assert cached[len(alone)] == 0
            for stream in (False, True):
                reply = chat(bert, short, max_tokens=4, stream=stream, seed=1)
                assert not stream or list(reply)
            assert cached[-1] > 10


def test_a_key_has_limits_of_its_own(tmp_path: Path) -> None:
    store = KeyStore(tmp_path / "keys.json")
    small = store.add("small", KeyLimits(max_request_bytes=1000))
    single = store.add("single", KeyLimits(max_concurrency=1))
    engine = PatientEngine(0.3)
    with serving_gateway(tmp_path, engine) as gateway:
        with gateway.client(small) as client, pytest.raises(openai.APIStatusError) as caught:
            chat(client, asking())
        assert caught.value.status_code == 413
        with gateway.client(single) as client, ThreadPoolExecutor(3) as pool:

            def status(_: int) -> int:
                try:
                    chat(client, HELLO)
                except openai.APIStatusError as error:
                    return error.status_code
                return 200

            assert sorted(pool.map(status, range(3))) == [200, 429, 429]


def test_a_key_stops_at_its_cost_and_remembers_it(tmp_path: Path) -> None:
    store = KeyStore(tmp_path / "keys.json")
    key = store.add("anna", KeyLimits(max_cost=0.01))
    prices = {"price_in": 10.0, "price_out": 10.0}
    for _ in range(2):  # the second server knows what was used
        with serving_gateway(tmp_path, **prices) as gateway, gateway.client(key) as client:
            with pytest.raises(openai.RateLimitError) as caught:
                chat(client, asking(novel(2000)))
            assert caught.value.code == "insufficient_quota"
            used = gateway.state.used(store.list()[0].holder.id)
            assert 0 < used.cost <= 0.01
    reply = gateway.state.folder / "gateway.sqlite3"
    assert reply.exists()


# --- hostile requests -----------------------------------------------------------------------------


async def test_requests_that_arrive_together_share_the_limits_of_their_key(tmp_path: Path) -> None:
    prices = {"price_in": 10.0, "price_out": 10.0, "state_dir": str(tmp_path)}
    holder = KeyHolder(id="key-1", limits=KeyLimits(max_cost=1.0))
    with GatewayState(tmp_path) as state:
        engine = PatientEngine()
        answering = gateways.Gateway(
            engine, Reader(engine, **SMALL), state, GatewayConfig.parse(prices)
        )
        found = await asyncio.gather(*(answering._account_of(holder) for _ in range(5)))
    assert len(set(map(id, found))) == 1


def test_a_stream_that_a_client_leaves_is_counted(tmp_path: Path) -> None:
    with local_gateway(tmp_path) as gateway, gateway.client() as client:
        with chat(client, HELLO, stream=True) as stream:
            for chunk in stream:
                if chunk.choices[0].delta.content:
                    break
        wait_until(lambda: gateway.state.used("anyone").usage.calls == 1)
        used = gateway.state.used("anyone").usage
    assert used.prompt_tokens > 10
    assert 0 < used.completion_tokens < WINDOW


class SilentStream(PatientEngine):
    """An engine that streams tokens, as the local one does, and has not come to the first."""

    def prompt_ids(self, messages: Any) -> list[int]:
        return list(range(71))

    async def stream(self, prompt_ids: list[int], sampling: Any) -> AsyncGenerator[Any, None]:
        await self.complete([], sampling)
        yield None


@pytest.mark.parametrize(
    ("kind", "messages"),
    [(PatientEngine, HELLO), (SilentStream, HELLO), (PatientEngine, asking())],
    ids=["short", "streamed", "long"],
)
def test_calls_that_clients_leave_count_with_their_prompts(
    tmp_path: Path, kind: type[PatientEngine], messages: Any
) -> None:
    store = KeyStore(tmp_path / "keys.json")
    key = store.add("anna", KeyLimits(max_cost=1.0))
    engine = kind(60.0)
    prices = {"price_in": 3000.0 if messages is HELLO else 300.0, "price_out": 0.0}
    with serving_gateway(tmp_path, engine, **prices) as gateway:

        def used() -> Any:
            return gateway.state.used(store.list()[0].holder.id)

        statuses = [
            status_unless_left(gateway, key, messages, stream=number % 2 == 0)
            for number in range(8)
        ]
        assert statuses[:2] == [None, None]
        assert statuses[-1] is not None
        num_left = statuses.count(None)
        wait_until(lambda: used().usage.calls == engine.num_cancelled == num_left)
        assert 0.5 < used().cost <= 1.0
        assert used().usage.prompt_tokens > 2 * num_left


def test_an_answer_that_never_comes_counts_with_all_its_requests(tmp_path: Path) -> None:
    store = KeyStore(tmp_path / "keys.json")
    key = store.add("anna", KeyLimits(max_cost=100.0))

    def silent(request: Json) -> Json:
        return said("noted") if "<section" in prompt_of(request) else said("")

    with chat_server(silent) as server:
        engine = EndpointEngine(EngineConfig(model="test-model", base_url=server.base_url))
        engine.tokenizer = "estimate"
        with serving_gateway(tmp_path, engine, price_in=10.0, price_out=0.0) as gateway:
            with pytest.raises(openai.APIStatusError, match="empty answer"):
                chat(gateway.client(key), asking())

            def used() -> Any:
                return gateway.state.used(store.list()[0].holder.id)

            wait_until(lambda: used().usage.calls == len(server.chats))
            assert used().cost == pytest.approx(0.01 * len(server.chats))
        assert sum("<section" not in prompt_of(request) for request in server.chats) == 4


def test_calls_that_wait_for_their_turn_have_not_left_yet(tmp_path: Path) -> None:
    engine = PatientEngine(60.0)
    with serving_gateway(tmp_path, engine, reading_calls=1) as gateway:

        def are_waiting(number: int) -> bool:
            page = gateway.send("GET", "/metrics").text
            return f"memagent_reading_calls_waiting {number}.0" in page

        with connected(gateway) as first:
            first.sendall(chat_request(asking(novel(200))))
            wait_until(lambda: engine.num_running)
            with connected(gateway) as second:
                second.sendall(chat_request(asking(novel(201))))
                wait_until(lambda: are_waiting(1))
            wait_until(lambda: are_waiting(0))
            assert gateway.state.used("anyone").usage.calls == 0
        wait_until(lambda: gateway.state.used("anyone").usage.calls == 1)
        assert engine.num_cancelled == 1


def status_unless_left(gateway: Gateway, key: str, messages: Any, *, stream: bool) -> bytes | None:
    """What a client receives that leaves as soon as its call has reached the engine; None if that one left."""
    engine = gateway.engine
    assert isinstance(engine, PatientEngine)
    num_before = engine.num_cancelled
    with connected(gateway) as connection:
        connection.sendall(chat_request(messages, key, stream=stream))
        connection.settimeout(0.01)
        received = b""
        while not engine.num_running and b"error" not in received:
            with suppress(TimeoutError):
                received += connection.recv(65536)
    if b"error" in received:
        return received
    wait_until(lambda: engine.num_cancelled > num_before and not engine.num_running)
    return None


def test_paths_do_not_lead_out_of_the_state_folder(gateway: Gateway) -> None:
    for name in (
        "..%2f..%2fkeys.json",
        "%2e%2e/keys.json",
        "../keys.json",
        "file-x/../../x",
        "%00",
    ):
        for path in (f"/v1/files/{name}", f"/v1/files/{name}/content"):
            reply = gateway.send("GET", path)
            assert reply.status_code in (404, 405)


@pytest.mark.parametrize(
    "name", ["a." * 4000 + "b=1", "a." * 100 + "b=1", "seed=" + "[" * 900, "seed=1," * 5000]
)
def test_settings_in_a_name_are_bounded(gateway: Gateway, name: str) -> None:
    body = {"model": f"memagent:{name}", "messages": HELLO}
    status = gateway.send("POST", "/v1/chat/completions", json=body).status_code
    assert status in (400, 404)
    assert gateway.send("GET", f"/v1/models/memagent:{name}").status_code in (200, 400, 404)


def test_a_limit_of_many_digits_is_refused(gateway: Gateway) -> None:
    reply = gateway.send("GET", "/v1/files?limit=000000005" + "9" * 5000)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "limit")


def test_a_file_that_claims_to_have_text_is_not_opened_in_the_event_loop() -> None:
    part = {"type": "file", "text": "", "file": {"file_data": "UmFpbi4="}}
    body = {"messages": [{"role": "user", "content": [part]}]}
    assert parse(GatewayChat, json.dumps(body).encode()).request.has_files


def test_hostile_requests_are_answered_or_refused(gateway: Gateway) -> None:
    assert tried(hostile.sent_to(gateway), 40, 5) == []  # type: ignore[arg-type]


# --- what is reported -----------------------------------------------------------------------------


def test_the_description_names_the_endpoints_that_there_are(gateway: Gateway) -> None:
    description = gateway.send("GET", "/openapi.json").json()
    assert description["openapi"] == "3.1.0"
    for path, operations in description["paths"].items():
        for method in operations:
            reply = gateway.send(method.upper(), path.replace("{", "").replace("}", ""))
            assert reply.status_code != 405, f"{method} {path}"
            assert str(reply.status_code) in operations[method]["responses"]
    body = description["components"]["schemas"]["GatewayChat"]
    assert "messages" in body["required"]


def test_short_and_long_requests_at_once_are_neither_lost_nor_mixed_up(tmp_path: Path) -> None:
    engine = PatientEngine(0.02)
    with serving_gateway(tmp_path, engine) as gateway, gateway.client() as client:

        def answer(number: int) -> str:
            fact = f"The house number {number} was inherited by Anna."
            long = asking(novel(60, fact=fact))
            short = [{"role": "user", "content": f"<memory>\n{fact}\n</memory>"}]
            return str(chat(client, long if number % 2 else short).choices[0].message.content)

        with ThreadPoolExecutor(24) as pool:
            answers = list(pool.map(answer, range(24)))
    assert answers == [f"The house number {n} was inherited by Anna." for n in range(24)]


def test_readings_have_a_limit_and_their_calls_another(tmp_path: Path) -> None:
    engine = PatientEngine(0.05)
    with serving_gateway(tmp_path, engine, max_readings=3, reading_calls=2) as gateway:

        async def ask(client: openai.AsyncOpenAI, number: int) -> str:
            messages = asking(novel(80, fact=f"The house number {number} was inherited by Anna."))
            try:
                reply = await client.chat.completions.create(model=MODEL, messages=messages)
            except openai.RateLimitError as error:
                return str(error.code)
            return str(number) if f"number {number} " in str(reply) else "another"

        async def ask_all() -> list[str]:
            options: Any = {"base_url": gateway.base_url, "api_key": "none", "max_retries": 0}
            async with openai.AsyncOpenAI(**options) as client:
                return await asyncio.gather(*(ask(client, number) for number in range(5)))

        answers = asyncio.run(ask_all())
    assert answers.count("too_many_readings") == 2
    assert len({answer for answer in answers if answer.isdigit()}) == 3
    assert engine.most_at_once == 2
