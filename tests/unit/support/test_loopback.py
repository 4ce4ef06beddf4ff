"""The loopback endpoint does what its flags say, seen by the standard library's HTTP client."""

import http.client
import json
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.support.loopback import (
    Endpoint,
    Prompt,
    draw_fault,
    keyword_reply,
    messages_sha,
    parse_faults,
    running,
)

QUESTION = '<question>What is the code of "amber-17"?</question>'


Connect = Callable[[Endpoint], http.client.HTTPConnection]


@pytest.fixture
def connect() -> Iterator[Connect]:
    """Opens connections that are closed after the test."""
    with ExitStack() as stack:

        def open_connection(endpoint: Endpoint) -> http.client.HTTPConnection:
            connection = http.client.HTTPConnection("127.0.0.1", endpoint.port, timeout=60)
            stack.callback(connection.close)
            return connection

        yield open_connection


def messages(prompt: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": prompt}]


def send(
    connection: http.client.HTTPConnection,
    prompt: str = "hello",
    *,
    path: str = "/v1/chat/completions",
    model: str = "test-model",
    headers: dict[str, str] | None = None,
) -> tuple[int, dict[str, Any], dict[str, str]]:
    body = json.dumps({"model": model, "messages": messages(prompt), "max_tokens": 1024})
    connection.request("POST", path, body, headers or {})
    response = connection.getresponse()
    return response.status, json.loads(response.read()), dict(response.headers)


def text(completion: dict[str, Any]) -> str:
    return completion["choices"][0]["message"]["content"]


def keyword(prompt: str, *, max_tokens: int = 1024) -> str:
    return keyword_reply(Prompt(prompt, prompt, max_tokens)).text


# --- replies


def test_keyword_reader_collects_sentences_and_answers_from_its_memory() -> None:
    section = '<section number="1">It rained. The code of amber-17\nis 4821. It cleared.</section>'
    notes = keyword(f"{QUESTION}{section}<memory>Nothing found yet.</memory>")
    assert notes == "The code of amber-17 is 4821."
    later = keyword(f"<memory>{notes}</memory><section>More rain.</section>{QUESTION}")
    assert later == notes
    assert keyword(f"{QUESTION}\n<memory>\n{later}\n</memory>") == r"\boxed{4821}"


def test_keyword_reader_says_when_it_found_nothing() -> None:
    section = "<section>The code of jade-3 is 99.</section>"
    assert keyword(f"{QUESTION}{section}<memory>none</memory>") == "Nothing found yet."
    assert keyword(f"{QUESTION}<memory>Nothing found yet.</memory>") == r"\boxed{unknown}"


def test_keyword_reader_keeps_to_max_tokens_and_to_the_last_blocks() -> None:
    prompt = f"Read <section>s into <memory>.{QUESTION}<section>amber-17 abcdefgh</section><memory></memory>"
    reply = keyword_reply(Prompt(prompt, prompt, 4))
    assert reply == ("amber-17 abc", "length")


def test_echo_changes_with_any_change_of_the_prompt(connect: Connect) -> None:
    with running(reply="echo") as endpoint:
        connection = connect(endpoint)
        first, again, other = (text(send(connection, prompt)[1]) for prompt in ("ab", "ab", "ac"))
    assert first == again != other
    assert 190 < len(first) < 230


# --- the wire


def test_one_connection_serves_many_calls_and_each_is_logged(
    tmp_path: Path, connect: Connect
) -> None:
    with running(tmp_path / "calls.jsonl", reply="fixed", reply_chars=40) as endpoint:
        connection = connect(endpoint)
        completion = send(connection, "x" * 25_000)[1]
        first_socket = connection.sock
        send(connection, "y", headers={"Authorization": "Bearer secret"})
        assert connection.sock is first_socket
        calls = endpoint.calls()
        assert endpoint.num_calls() == 2
    assert len(text(completion)) == 40
    assert completion["usage"] == {
        "prompt_tokens": 6250,
        "completion_tokens": 10,
        "total_tokens": 6260,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert [call["n"] for call in calls] == [1, 2]
    assert [call["outcome"] for call in calls] == ["ok", "ok"]
    assert [call["auth"] for call in calls] == [None, "authorization"]
    assert calls[0]["sha"] == messages_sha(messages("x" * 25_000))
    assert calls[0]["prompt_chars"] == 25_000
    assert "secret" not in (tmp_path / "calls.jsonl").read_text()


def test_models_are_listed_as_vllm_does(tmp_path: Path, connect: Connect) -> None:
    log = tmp_path / "calls.jsonl"
    with running(log, root="org/model", max_model_len=8192) as endpoint:
        connection = connect(endpoint)
        connection.request("GET", "/v1/models")
        [model] = json.load(connection.getresponse())["data"]
        assert endpoint.calls() == []
        assert [record["path"] for record in endpoint.records()] == ["/v1/models"]
    assert (model["id"], model["root"], model["max_model_len"]) == ("test-model", "org/model", 8192)


def test_wrong_calls_are_refused_in_openai_shape(tmp_path: Path, connect: Connect) -> None:
    key = {"Authorization": "Bearer right"}
    with running(tmp_path / "log", api_key="right", context_window=100) as endpoint:
        connection = connect(endpoint)
        refused = [
            send(connection, headers={"Authorization": "Bearer wrong"}),
            send(connection, headers={"api-key": "right"}),
            send(connection, model="other", headers=key),
            send(connection, "word " * 77, headers=key),
        ]
        assert send(connection, "word " * 76, headers=key)[0] == 200
        outcomes = [call["outcome"] for call in endpoint.calls()]
    assert [(status, body["error"]["code"]) for status, body, _ in refused] == [
        (401, "invalid_api_key"),
        (401, "invalid_api_key"),
        (404, "model_not_found"),
        (400, "context_length_exceeded"),
    ]
    assert outcomes == ["401", "401", "404", "400", "ok"]


def test_azure_paths_take_the_api_key_header(connect: Connect) -> None:
    path = "/openai/deployments/test-model/chat/completions"
    key = {"api-key": "right"}
    with running(api_key="right") as endpoint:
        connection = connect(endpoint)
        assert send(connection, path=f"{path}?api-version=2024-10-21", headers=key)[0] == 200
        assert send(connection, path=path, headers=key)[0] == 404
        assert send(connection, path=f"{path}?api-version=1", headers={"api-key": "no"})[0] == 401


# --- faults


def test_fault_rates_follow_the_spec_and_the_seed() -> None:
    faults = parse_faults("500=0.2,reset=0.1")
    drawn = [draw_fault(faults, seed=3, n=n) for n in range(5000)]
    assert drawn == [draw_fault(faults, seed=3, n=n) for n in range(5000)]
    assert drawn.count("500") / 5000 == pytest.approx(0.2, abs=0.02)
    assert drawn.count("reset") / 5000 == pytest.approx(0.1, abs=0.02)


@pytest.mark.parametrize("spec", ["oops=0.1", "200=0.1", "500=0.7,reset=0.7"])
def test_impossible_fault_specs_are_refused(spec: str) -> None:
    with pytest.raises(SystemExit):
        parse_faults(spec)


@pytest.mark.parametrize("status", [500, 503, 429])
def test_status_faults_keep_the_connection(tmp_path: Path, status: int, connect: Connect) -> None:
    with running(tmp_path / "log", faults=f"{status}=1", retry_after=0.5) as endpoint:
        connection = connect(endpoint)
        replies = [send(connection), send(connection)]
        assert [call["outcome"] for call in endpoint.calls()] == [str(status)] * 2
    assert [reply[0] for reply in replies] == [status] * 2
    assert replies[0][2].get("Retry-After") == ("0.5" if status == 429 else None)


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        ("reset", ConnectionResetError),
        ("stall", TimeoutError),
        ("malformed", json.JSONDecodeError),
        ("cut", http.client.IncompleteRead),
    ],
)
def test_broken_replies(
    tmp_path: Path, fault: str, error: type[Exception], connect: Connect
) -> None:
    with running(tmp_path / "log", faults=f"{fault}=1") as endpoint:
        connection = connect(endpoint)
        connection.timeout = 0.3
        with pytest.raises(error):
            send(connection)
        assert [call["outcome"] for call in endpoint.calls()] == [fault]


def test_empty_replies_and_the_end_of_a_stall(connect: Connect) -> None:
    with running(faults="empty=1") as endpoint:
        completion = send(connect(endpoint))[1]
        assert text(completion) == ""
        assert completion["choices"][0]["finish_reason"] == "stop"
    with (
        running(faults="stall=1", stall_seconds=0.1) as endpoint,
        pytest.raises(http.client.RemoteDisconnected),
    ):
        send(connect(endpoint))


# --- time and life


def test_latency_and_concurrency_limit_queue_calls(tmp_path: Path, connect: Connect) -> None:
    with running(tmp_path / "log", latency_ms=100, max_concurrency=2) as endpoint:
        start = time.monotonic()
        with ThreadPoolExecutor(4) as pool:
            statuses = [*pool.map(lambda _: send(connect(endpoint))[0], range(4))]
        seconds = time.monotonic() - start
        assert max(call["inflight"] for call in endpoint.calls()) == 4
    assert statuses == [200] * 4
    assert seconds >= 0.2


def test_client_that_leaves_before_its_reply_is_logged_and_frees_its_place(
    tmp_path: Path, connect: Connect
) -> None:
    with running(tmp_path / "log", latency_ms=300, max_concurrency=1) as endpoint:
        connection = connect(endpoint)
        connection.timeout = 0.1
        with pytest.raises(TimeoutError):
            send(connection)
        connection.close()
        assert send(connect(endpoint))[0] == 200
        assert [call["outcome"] for call in endpoint.calls()] == ["client_left", "ok"]


def test_killed_endpoint_comes_back_on_its_port_and_goes_on_counting(
    tmp_path: Path, connect: Connect
) -> None:
    with running(tmp_path / "log") as endpoint:
        port = endpoint.port
        send(connect(endpoint))
        assert endpoint.num_calls() == 1  # by now its line is in the log
        endpoint.kill()
        with pytest.raises(ConnectionRefusedError):
            send(connect(endpoint))
        endpoint.restart()
        assert endpoint.port == port
        send(connect(endpoint))
        assert [call["n"] for call in endpoint.calls()] == [1, 2]
        process_id = endpoint.process.pid
    with pytest.raises(ProcessLookupError):
        os.kill(process_id, 0)


def test_a_call_of_25_kb_costs_the_server_hardly_more_than_a_short_one(connect: Connect) -> None:
    def cpu_seconds() -> float:
        fields = Path(f"/proc/{endpoint.process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    with running(reply="fixed") as endpoint:
        connection = connect(endpoint)
        send(connection)
        costs = []
        for text in ("word", "word " * 5000):
            before = cpu_seconds()
            for _ in range(300):
                send(connection, text)
            costs.append(cpu_seconds() - before)
        tick = 1 / os.sysconf("SC_CLK_TCK")
        assert costs[1] < 3 * costs[0] + 5 * tick
