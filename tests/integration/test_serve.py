"""The server with OpenAI's own client, with the reader, and with invalid requests."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import openai
import pytest

from benchmarks.serve_stress import StressPlan, stress
from memagent import Reader, blocking, open_engine
from memagent.config import LocalConfig
from memagent.engines.local.engine import LocalEngine
from memagent.engines.local.loading import load
from memagent.engines.openai import EndpointEngine
from memagent.serve.app import make_app
from memagent.serve.http import serving
from memagent.types import Sampling
from tests.support.broken_gpu import break_gpu
from tests.support.processes import children, is_running
from tests.support.timing import wait_until
from tests.support.tiny_gguf import write_gguf
from tests.support.tiny_models import WINDOW, make_tiny_model
from tests.support.tiny_server import TinyServer, num_lost_slots, serving_tiny, wait_until_idle

MESSAGES: Any = [{"role": "user", "content": "Where is the red ledger?"}]
MEMAGENT = Path(sys.executable).parent / "memagent"
TEXT = "The miller sold a red ledger. Anna Bergström found an old map of the north gate. "


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "llama", "llama")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[TinyServer]:
    with serving_tiny(folder) as server:
        yield server


@pytest.fixture
def client(server: TinyServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.base_url, api_key="none", max_retries=0) as client:
        yield client


def direct(server: TinyServer, max_tokens: int, **sampling: Any) -> Any:
    """The reply of the engine without the server."""
    return blocking.run(
        server.engine.complete(MESSAGES, Sampling(max_tokens=max_tokens, **sampling))
    )


def send(
    server: TinyServer,
    body: Any,
    *,
    path: str = "/v1/chat/completions",
    method: str = "POST",
    headers: dict[str, str] | None = None,
) -> tuple[int, Any, dict[str, str]]:
    """Status, JSON and headers of a plain request."""
    address = urlsplit(server.url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=60)
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    connection.request(method, path, data, {"Content-Type": "application/json", **(headers or {})})
    response = connection.getresponse()
    content = json.loads(response.read())
    connection.close()
    return response.status, content, {name.lower(): value for name, value in response.getheaders()}


# --- OpenAI's client ------------------------------------------------------------------------------


def test_a_chat_is_answered_as_the_engine_does(server: TinyServer, client: openai.OpenAI) -> None:
    expected = direct(server, 12)
    reply = client.chat.completions.create(
        model=server.engine.model,
        messages=MESSAGES,
        max_tokens=12,
        logprobs=True,
        top_logprobs=0,
        extra_body={"return_token_ids": True},
    )
    choice = reply.choices[0]
    assert choice.message.content == expected.text
    assert choice.finish_reason == "length"
    assert choice.token_ids == list(expected.completion_ids)  # type: ignore[attr-defined]
    assert reply.prompt_token_ids == list(expected.prompt_ids)  # type: ignore[attr-defined]
    assert choice.logprobs is not None
    logprobs = [entry.logprob for entry in choice.logprobs.content or ()]
    assert logprobs == pytest.approx(expected.logprobs, abs=1e-4)
    assert reply.usage is not None
    assert reply.usage.prompt_tokens == len(expected.prompt_ids)
    assert reply.usage.completion_tokens == 12
    assert reply.usage.prompt_tokens_details is not None
    assert reply.usage.prompt_tokens_details.cached_tokens == len(expected.prompt_ids) - 1


def test_prompts_of_different_salts_share_nothing(
    server: TinyServer, client: openai.OpenAI
) -> None:
    def cached(salt: str | None) -> int:
        reply = client.chat.completions.create(
            model=server.engine.model,
            messages=[{"role": "user", "content": "Salted and peppered."}],
            max_tokens=2,
            extra_body={"cache_salt": salt},
        )
        assert reply.usage is not None
        assert reply.usage.prompt_tokens_details is not None
        return reply.usage.prompt_tokens_details.cached_tokens or 0

    first, second, third = cached("one"), cached("two"), cached("two")
    assert (first, second) == (0, 0)
    assert third > 10
    with pytest.raises(openai.BadRequestError, match="cache_salt"):
        cached("")


def test_a_stream_joins_to_the_whole_reply(server: TinyServer, client: openai.OpenAI) -> None:
    expected = direct(server, 30)
    chunks = list(
        client.chat.completions.create(
            model=server.engine.model,
            messages=MESSAGES,
            max_tokens=30,
            stream=True,
            logprobs=True,
            stream_options={"include_usage": True},
            extra_body={"return_token_ids": True},
        )
    )
    *parts, last = chunks
    text = "".join(chunk.choices[0].delta.content or "" for chunk in parts)
    ids = [i for c in parts for i in getattr(c.choices[0], "token_ids", None) or ()]
    entries = [
        e for c in parts if c.choices[0].logprobs for e in c.choices[0].logprobs.content or ()
    ]
    assert text == expected.text
    assert ids == list(expected.completion_ids)
    assert [e.logprob for e in entries] == pytest.approx(expected.logprobs, abs=1e-4)
    assert parts[0].prompt_token_ids == list(expected.prompt_ids)  # type: ignore[attr-defined]
    assert parts[-1].choices[0].finish_reason == "length"
    assert len(parts) > 5
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.completion_tokens == 30


def test_stop_and_seed_are_used(server: TinyServer, client: openai.OpenAI) -> None:
    whole = direct(server, 20).text
    stop = whole[6:9]

    def ask(**options: Any) -> Any:
        reply = client.chat.completions.create(
            model=server.engine.model, messages=MESSAGES, max_tokens=20, **options
        )
        return reply.choices[0]

    cut = ask(stop=[stop, "never said"])
    assert (cut.message.content, cut.finish_reason) == (whole[: whole.index(stop)], "stop")
    sampled = [ask(seed=seed, temperature=1.0, top_p=0.9).message.content for seed in (1, 1, 2)]
    assert sampled[0] == sampled[1] != sampled[2]
    assert sampled[0] == direct(server, 20, seed=1, temperature=1.0, top_p=0.9).text


def test_each_choice_is_sampled_with_its_own_seed(
    server: TinyServer, client: openai.OpenAI
) -> None:
    options: Any = {"model": server.engine.model, "messages": MESSAGES, "max_tokens": 8}
    options |= {"n": 3, "seed": 5, "temperature": 1.0}
    reply = client.chat.completions.create(**options)
    texts = [choice.message.content for choice in reply.choices]
    assert texts == [direct(server, 8, seed=5 + i, temperature=1.0).text for i in range(3)]
    assert reply.usage is not None
    assert reply.usage.completion_tokens == 24
    assert reply.usage.prompt_tokens == len(server.engine.prompt_ids(MESSAGES))
    streamed = ["", "", ""]
    for chunk in client.chat.completions.create(**options, stream=True):
        streamed[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert streamed == texts


# --- llama.cpp ------------------------------------------------------------------------------------

SERVE = """
import sys
sys.modules.update(dict.fromkeys(("torch", "transformers", "numpy", "gguf", "safetensors")))
from memagent.cli.main import run
sys.exit(run(["serve", "--port", "0", "--engine", sys.argv[1]]))
"""


def test_a_gguf_file_is_served_by_llama_cpp_without_torch(folder: Path) -> None:
    path = write_gguf(folder, folder / "m.gguf", pre="gpt-2")
    command = [sys.executable, "-c", SERVE, f"local:{path}"]
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process,
        ExitStack() as ended,
    ):
        assert process.stdout is not None
        ended.callback(process.kill)
        url = process.stdout.readline().decode().strip()
        started = children(process.pid)
        options: Any = {"model": "m.gguf", "messages": MESSAGES, "max_tokens": 30, "logprobs": True}
        with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
            (card,) = client.models.list().data
            assert (card.id, card.max_model_len) == ("m.gguf", WINDOW)  # type: ignore[attr-defined]
            whole = client.chat.completions.create(**options).choices[0]
            chunks = [*client.chat.completions.create(**options, stream=True)]
            said = whole.message.content or ""
            assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == said
            assert whole.finish_reason == chunks[-1].choices[0].finish_reason == "length"
            entries = [
                one for c in chunks if (p := c.choices[0].logprobs) for one in p.content or ()
            ]
            assert len(entries) > 20
            cut = client.chat.completions.create(**options, stop=[said[6:9]]).choices[0]
            assert cut.message.content == said[: said.index(said[6:9])]
            hot = client.chat.completions.create(**options, temperature=2.0, seed=5).choices[0]
            assert hot.logprobs is None
            with pytest.raises(openai.BadRequestError, match=r"m\.gguf has"):
                client.chat.completions.create(**{**options, "max_tokens": 600})
            long = client.chat.completions.create(**{**options, "max_tokens": 400}, stream=True)
            next(iter(long))
            long.close()
            wait_until(
                lambda: (
                    b"requests_running 0.0" in urllib.request.urlopen(f"{url[:-3]}/metrics").read()
                )
            )
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=60)
    assert b"Traceback" not in errors, errors
    wait_until(lambda: not any(map(is_running, started)))


# --- the reader -----------------------------------------------------------------------------------


def test_a_model_that_we_know_reads_through_the_server_as_suits_it(folder: Path) -> None:
    loaded = replace(load(str(folder)), name="smollm2-135m")
    with (
        LocalEngine(loaded, LocalConfig(cache_gb=0.01)) as engine,
        serving(partial(make_app, engine)) as url,
        open_engine("openai:", base_url=f"{url}/v1", api_key="none") as endpoint,
    ):
        assert isinstance(endpoint, EndpointEngine)
        blocking.run(endpoint.inspect())
        assert endpoint.reading_defaults == engine.reading_defaults
        assert endpoint.reading_defaults["prompts"]


def test_the_reader_gets_the_same_answer_with_and_without_the_server(
    server: TinyServer, tmp_path: Path
) -> None:
    prompts = tmp_path / "tiny.toml"
    prompts.write_text('read = "{question} {section} {memory}"\nanswer = "{question} {memory}"\n')

    def ask(engine: Any) -> Any:
        budget = {"window": WINDOW, "chunk_tokens": 60, "memory_tokens": 20, "answer_tokens": 20}
        return Reader(engine, prompts=str(prompts), **budget).ask("Where?", TEXT * 12)

    with open_engine("openai:", base_url=server.base_url, api_key="none") as engine:
        assert isinstance(engine, EndpointEngine)
        blocking.run(engine.inspect())
        assert engine.served_window == WINDOW
        through_the_server = ask(engine)
    directly = ask(server.engine)
    assert through_the_server.num_chunks > 2
    assert through_the_server.answer == directly.answer
    assert [s.memory for s in through_the_server.steps] == [s.memory for s in directly.steps]
    assert through_the_server.usage.prompt_tokens == directly.usage.prompt_tokens


# --- errors, one by one ---------------------------------------------------------------------------

HELLO: dict[str, Any] = {"messages": MESSAGES, "max_tokens": 4}


@pytest.mark.parametrize(
    ("body", "status", "param", "code"),
    [
        (b"{nonsense", 400, None, "invalid_json"),
        ([1], 400, None, "invalid_value"),
        ({}, 400, "messages", "missing_required_parameter"),
        ({**HELLO, "temperature": -1}, 400, "temperature", "invalid_value"),
        ({**HELLO, "seed": "soon"}, 400, "seed", "invalid_value"),
        ({**HELLO, "max_tokens": 0}, 400, "max_tokens", "invalid_value"),
        ({**HELLO, "tools": [{}]}, 400, "tools", "unsupported_parameter"),
        ({**HELLO, "max_tokens": WINDOW}, 400, "messages", "context_length_exceeded"),
        (
            {"messages": [{"role": "user", "content": "word " * 2000}]},
            400,
            "messages",
            "context_length_exceeded",
        ),
        (
            {**HELLO, "max_tokens": WINDOW, "stream": True},
            400,
            "messages",
            "context_length_exceeded",
        ),
        ({**HELLO, "model": "gpt-nosuch"}, 404, "model", "model_not_found"),
        (b'"' + b"x" * 16_000_001, 413, None, "request_too_large"),
    ],
)
def test_a_wrong_request_is_refused_and_the_server_keeps_running(
    server: TinyServer, body: Any, status: int, param: str | None, code: str
) -> None:
    got, content, _ = send(server, body)
    assert got == status
    assert content["error"]["type"] == "invalid_request_error"
    assert (content["error"]["param"], content["error"]["code"]) == (param, code)
    assert content["error"]["message"]
    assert send(server, HELLO)[0] == 200


def test_token_ids_that_do_not_exist_are_refused(server: TinyServer) -> None:
    for stream in (False, True):
        body = {"prompt": [5, 10**6], "stream": stream}
        status, content, _ = send(server, body, path="/v1/completions")
        assert (status, content["error"]["code"]) == (400, "invalid_value")


def test_a_server_whose_gpu_failed_is_not_healthy(folder: Path) -> None:
    with serving_tiny(folder) as server:
        assert _health(server.base_url) == 200
        break_gpu(server.engine)
        assert send(server, HELLO)[0] >= 500
        assert _health(server.base_url) == 503


def test_a_request_above_the_limit_gets_429(folder: Path) -> None:
    with serving_tiny(folder, max_concurrency=1) as server:
        with openai.OpenAI(base_url=server.base_url, api_key="none", max_retries=0) as client:
            stream = client.chat.completions.create(
                model=server.engine.model, messages=MESSAGES, max_tokens=400, stream=True
            )
            next(iter(stream))
            status, content, headers = send(server, HELLO)
            assert (status, headers["retry-after"]) == (429, "1")
            assert content["error"]["type"] == "rate_limit_error"
            stream.close()
        wait_until_idle(server.engine)
        wait_until(lambda: send(server, HELLO)[0] == 200)


def test_a_failing_model_gives_503_and_the_server_keeps_running(
    server: TinyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*args: Any) -> Any:
        raise RuntimeError("the model is broken")

    with monkeypatch.context() as patched:
        patched.setattr(server.engine._generator._model, "step", broken)
        status, content, _ = send(server, HELLO)
        assert (status, content["error"]["code"]) == (503, "engine_error")
        with openai.OpenAI(base_url=server.base_url, api_key="none", max_retries=0) as client:
            stream = client.chat.completions.create(
                model=server.engine.model, messages=MESSAGES, stream=True
            )
            with pytest.raises(openai.APIError, match="the engine of this server failed"):
                list(stream)
    assert send(server, HELLO)[0] == 200


def test_a_bug_is_answered_without_its_traceback(
    server: TinyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def buggy(messages: Any) -> Any:
        raise KeyError("private detail")

    with monkeypatch.context() as patched:
        patched.setattr(server.engine, "prompt_ids", buggy)
        status, content, _ = send(server, HELLO)
    assert (status, content["error"]["code"]) == (500, "internal_error")
    assert "private" not in json.dumps(content)
    counted = urllib.request.urlopen(f"{server.url}/metrics").read().decode()
    assert 'memagent_requests_total{path="/v1/chat/completions",status="500"} 1.0' in counted
    assert send(server, HELLO)[0] == 200


# --- clients that leave, and many at once ---------------------------------------------------------


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_client_that_leaves_frees_its_slots(
    server: TinyServer, is_stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = server.engine._generator._model
    run = model.run
    monkeypatch.setattr(model, "run", lambda *args: time.sleep(0.02) or run(*args))
    address = urlsplit(server.url)
    body = json.dumps({**HELLO, "max_tokens": 480, "n": 4, "stream": is_stream, "temperature": 0})
    before = num_replies(server)
    with closing(http.client.HTTPConnection(address.hostname or "", address.port)) as connection:
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/chat/completions", body, headers)
        wait_until(lambda: server.engine.load.num_running == 4)
    wait_until_idle(server.engine)
    assert num_replies(server) == before
    assert num_lost_slots(server.engine) == 0


@pytest.mark.slow
def test_many_requests_of_all_sizes_some_cancelled(folder: Path) -> None:
    with serving_tiny(folder, cache_gb=0.002) as server:
        report = asyncio.run(stress(server, StressPlan(num_requests=300, num_clients=24)))
        assert report.num_finished + report.num_cancelled == 300
        assert report.num_cancelled > 20
        assert report.num_wrong == 0
        wait_until_idle(server.engine)
        assert num_lost_slots(server.engine) == 0


def num_replies(server: TinyServer) -> float:
    """Completed replies, as the metrics count them."""
    page = urllib.request.urlopen(f"{server.url}/metrics").read().decode()
    return float(page.partition("\nmemagent_replies_total ")[2].split()[0])


# --- the process ----------------------------------------------------------------------------------


class Process:
    """`memagent serve` as a process; ended by its id."""

    def __init__(self, program: Path, *arguments: str, **environment: str) -> None:
        self.process = subprocess.Popen(
            [program, "serve", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        )

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *exception: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()

    def address(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def end(self) -> tuple[int, str]:
        errors = self.process.communicate(timeout=60)[1]
        return self.process.returncode, errors


def test_a_signal_lets_running_requests_finish_and_refuses_new_ones(folder: Path) -> None:
    arguments = ("--engine", f"local:{folder}", "--port", "0", "--set", "cache_gb=0.01")
    with Process(MEMAGENT, *arguments, MEMAGENT_API_KEY="secret") as served:
        base_url = served.address()
        assert base_url.startswith("http://127.0.0.1:")
        with openai.OpenAI(base_url=base_url, api_key="secret", max_retries=0) as client:
            stream = client.chat.completions.create(
                model=str(folder), messages=MESSAGES, max_tokens=470, stream=True
            )
            first = next(iter(stream))
            served.process.send_signal(signal.SIGTERM)
            wait_until(lambda: _is_refused(base_url))
            with pytest.raises(urllib.error.HTTPError, match="503"):
                urllib.request.urlopen(base_url.replace("/v1", "/health"))
            chunks = [first, *stream]
        assert chunks[-1].choices[0].finish_reason in ("stop", "length")
        code, errors = served.end()
    assert code == 0
    assert "memagent ask FILE -q QUESTION --base-url" in errors
    assert "secret" not in errors
    assert "Traceback" not in errors


@pytest.mark.parametrize(("how", "is_stream"), [("two signals", True), ("drained", False)])
def test_a_request_that_is_cut_off_gets_an_error_and_no_traceback_is_printed(
    memagent: Path, folder: Path, how: str, is_stream: bool
) -> None:
    drain = "60" if how == "two signals" else "0"
    arguments = ("--engine", f"local:{folder}", "--port", "0", "--set", "cache_gb=0.1")
    with (
        Process(memagent, *arguments, "--set", f"drain_seconds={drain}") as served,
        ThreadPoolExecutor(1) as pool,
    ):
        base_url = served.address()
        many = {"prompt": [SECRET] * 200, "n": 16, "max_tokens": 400}  # minutes of work
        running = pool.submit(_reply_to, base_url, "completions", **many, stream=is_stream)
        wait_until(lambda: "memagent_requests_running 0.0" not in _metrics(base_url))
        served.process.send_signal(signal.SIGINT)
        if how == "two signals":
            wait_until(lambda: _health(base_url) == 503)
            served.process.send_signal(signal.SIGINT)
        reply = running.result(timeout=60)
        code, errors = served.end()
    assert code == 0
    assert "the server is shutting down" in reply
    assert "[DONE]" not in reply
    lines = [line for line in errors.splitlines() if not line.startswith((" ", "serving "))]
    assert lines[0] == "shutting down when 1 request finishes; a second signal stops now"
    (logged,) = [line for line in lines[1:] if "/v1/" in line]
    status = 200 if is_stream else 503
    assert re.search(
        rf" 127\.0\.0\.1 POST /v1/completions {status}.* s, req_\w+, cut off by the shutdown$",
        logged,
    )
    assert [line for line in lines[1:] if line != logged and "/health 503" not in line] == []


def test_requests_are_logged_without_their_text(memagent: Path, folder: Path) -> None:
    arguments = ("--engine", f"local:{folder}", "--port", "0", "--set", "cache_gb=0.01")
    with Process(memagent, *arguments) as served:
        base_url = served.address()
        chat = {"messages": [{"role": "user", "content": SECRET}]}
        _reply_to(base_url, "chat/completions", **chat, max_tokens=3)
        _reply_to(base_url, "chat/completions", **chat, max_tokens=-3)
        assert _health(base_url) == 200
        served.process.send_signal(signal.SIGINT)
        code, errors = served.end()
    assert code == 0
    lines = [
        re.sub(r"[\d,.]+ s, req_\w+$", "1 s", line[20:])
        for line in errors.splitlines()
        if "POST" in line
    ]
    (well, wrong) = lines
    assert re.fullmatch(r"127\.0\.0\.1 POST /v1/chat/completions 200, \d+ \+ \d tokens, 1 s", well)
    assert wrong == "127.0.0.1 POST /v1/chat/completions 400, 1 s"
    assert "/health" not in errors
    assert SECRET not in errors


SECRET = "an-unusual-word"


def _reply_to(base_url: str, path: str, **fields: object) -> str:
    """The body of the response to a request, whatever its status."""
    body = json.dumps(fields).encode()
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{base_url}/{path}", body, headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return str(response.read().decode())
    except urllib.error.HTTPError as error:
        return error.read().decode()


def _metrics(base_url: str) -> str:
    with urllib.request.urlopen(base_url.replace("/v1", "/metrics")) as response:
        return str(response.read().decode())


def _health(base_url: str) -> int:
    try:
        with urllib.request.urlopen(base_url.replace("/v1", "/health")) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        return error.code


def _is_refused(base_url: str) -> bool:
    with openai.OpenAI(base_url=base_url, api_key="secret", max_retries=0) as client:
        try:
            client.completions.create(model="", prompt="a", max_tokens=1)
        except openai.APIStatusError as error:  # 404 before the signal has arrived
            return (error.status_code, error.code) == (503, "shutting_down")
    return False


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--engine", "openai:gpt"), "use --engine local:MODEL"),
        (("--engine", "local:nosuch-model"), "nosuch-model"),
        (("--engine", "local:x", "--port", "99999"), "port"),
        (("run",), "--engine"),
    ],
)
def test_wrong_options_are_one_line_and_exit_code_2(
    memagent: Path, arguments: tuple[str, ...], message: str
) -> None:
    with Process(memagent, *arguments) as served:
        code, errors = served.end()
    assert code == 2
    assert message in errors
    assert len(errors.strip().splitlines()) == 1


def test_a_port_that_is_taken_is_named_before_a_model_is_loaded(
    memagent: Path, server: TinyServer
) -> None:
    port = str(urlsplit(server.url).port)
    with Process(memagent, "--engine", "local:nosuch-model", "--port", port) as served:
        code, errors = served.end()
    assert code == 2
    assert f"port {port} of 127.0.0.1 is taken by another program; choose another --port" in errors
    assert len(errors.strip().splitlines()) == 1
