"""What a request to the gateway may become: memory, parts, files; whatever a key sends, others are answered."""

import gzip
import re
import select
import shutil
import socket
import subprocess
import sys
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest

from memagent.config import KeyLimits
from memagent.engines.openai import open_endpoint_at
from memagent.serve import guard, listen
from memagent.serve.keys import KeyStore
from memagent.serve.reading.files import RequestFiles
from memagent.serve.reading.requests import AttachedFile
from memagent.serve.reading.state import GatewayState
from memagent.serve.wire import ApiError
from tests.support.gateways import (
    MODEL,
    Gateway,
    PatientEngine,
    asking,
    chat_request,
    connected,
    head_of,
    novel,
    serving_gateway,
)
from tests.support.timing import wait_until

# --- memory ---------------------------------------------------------------------------------------

MEASURED = """
import gzip, json, resource, sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tests.support.gateways import MODEL, serving_gateway

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1000

with serving_gateway(Path(sys.argv[1])) as gateway:
    text = b"It rained. " * 450_000

    def chat(content):
        body = {"model": MODEL, "messages": [{"role": "user", "content": content}]}
        return gateway.send("POST", "/v1/chat/completions", json=body)

    def sent(name, data):
        return gateway.send("POST", "/v1/files", files={"file": (name, data)})

    file_id = sent("a.txt", text).json()["id"]
    question = {"type": "text", "text": "Why?"}
    assert chat([question]).status_code == 200
    before = peak()
    many = chat([{"type": "file", "file": {"file_id": file_id}}] * 100 + [question])
    parts = b'{"type":"text","text":"a"},' * 300_000
    body = b'{"messages":[{"role":"user","content":[' + parts + b'{"type":"text","text":"?"}]}]}'
    headers = {"Content-Type": "application/json"}

    def send(_):
        return gateway.send("POST", "/v1/chat/completions", content=body, headers=headers)

    with ThreadPoolExecutor(2) as pool:
        small = list(pool.map(send, range(2)))
    packed = sent("a.txt.gz", gzip.compress(text) * 60)
    for reply in (many, *small, packed):
        print(reply.status_code, reply.json()["error"]["code"])
    print(peak() - before, "MB")
"""


def test_small_requests_do_not_become_large_ones(tmp_path: Path) -> None:
    """A file named a hundred times, 300,000 parts from two clients, a text that unpacks to 300 MB."""
    command = [sys.executable, "-c", MEASURED, str(tmp_path)]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert lines[:-1] == ["413 too_much_text", *["413 too_many_parts"] * 2, "400 invalid_value"]
    assert int(lines[-1].split()[0]) < 200


def test_a_file_is_opened_once_and_counted_each_time(tmp_path: Path) -> None:
    with GatewayState(tmp_path) as state:
        stored = state.add_file("anna", "a.txt", "user_data", b"x" * 400, max_bytes=1000)
        assert stored is not None
        files = RequestFiles(state, "anna", 1000)
        named = AttachedFile(file_id=stored.id)
        first, second = named.part(files), named.part(files)
        assert first.file is second.file
        with pytest.raises(ApiError) as caught:
            AttachedFile(file_data="eHh4" * 100).part(files)
        assert (caught.value.status, caught.value.code) == (413, "too_much_text")
        with pytest.raises(ApiError) as caught:
            RequestFiles(state, "bert", 1000).stored(stored.id)
        assert caught.value.status == 404


def test_a_file_that_no_request_could_have_is_refused_when_it_is_sent(tmp_path: Path) -> None:
    with serving_gateway(tmp_path, server={"max_request_bytes": 2000}) as gateway:
        packed = gzip.compress(b"It rained. " * 300)
        reply = gateway.send("POST", "/v1/files", files={"file": ("a.txt.gz", packed)})
        assert (reply.status_code, reply.json()["error"]["code"]) == (413, "too_much_text")


# --- places ---------------------------------------------------------------------------------------

HELLO = [{"role": "user", "content": "Hello?"}]


def status_of(gateway: Gateway, key: str) -> int:
    """The status of a one-line chat with a key."""
    body = {"model": MODEL, "messages": HELLO}
    headers = {"Authorization": f"Bearer {key}"}
    return gateway.send("POST", "/v1/chat/completions", json=body, headers=headers).status_code


@pytest.mark.parametrize(
    ("max_concurrency", "num_admitted"), [(3, 3), (None, guard.MAX_WAITING_OF_KEY)]
)
def test_half_sent_bodies_take_places_of_their_own_key_only(
    tmp_path: Path, max_concurrency: int | None, num_admitted: int
) -> None:
    store, size = KeyStore(tmp_path / "keys.json"), 1_000_000
    anna, bert = store.add("anna", KeyLimits(max_concurrency=max_concurrency)), store.add("bert")
    with (
        serving_gateway(tmp_path, server={"max_request_bytes": size}) as gateway,
        ExitStack() as opened,
    ):
        connections = [opened.enter_context(connected(gateway)) for _ in range(17)]
        for connection in connections:
            with suppress(ConnectionResetError, BrokenPipeError):  # refused while it is sent
                connection.sendall(head_of("/v1/responses", anna, size + 1) + b" " * size)
        wait_until(lambda: sum(map(has_answer, connections)) >= 17 - num_admitted)
        assert status_of(gateway, bert) == 200
        assert max_concurrency is None or status_of(gateway, anna) == 429


def has_answer(connection: socket.socket) -> bool:
    """Whether the server has answered or closed the connection."""
    return bool(select.select([connection], [], [], 0)[0])


def ask_for_file(gateway: Gateway, key: str, owner: str, connection: socket.socket) -> None:
    """Ask for a file of 11 MB and read no more than its first bytes."""
    data = b"It rained. " * 1_000_000
    stored = gateway.state.add_file(owner, "a.txt", "", data, max_bytes=len(data))
    assert stored is not None
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    head = f"GET /v1/files/{stored.id}/content HTTP/1.1\r\nHost: localhost\r\n"
    connection.sendall(f"{head}Authorization: Bearer {key}\r\n\r\n".encode())
    assert connection.recv(15) == b"HTTP/1.1 200 OK"


def test_downloads_take_places_of_their_key(tmp_path: Path) -> None:
    store = KeyStore(tmp_path / "keys.json")
    anna, bert = store.add("anna", KeyLimits(max_concurrency=1)), store.add("bert")
    with serving_gateway(tmp_path) as gateway:
        with connected(gateway) as connection:
            ask_for_file(gateway, anna, store.list()[0].holder.id, connection)
            assert (status_of(gateway, anna), status_of(gateway, bert)) == (429, 200)
        wait_until(lambda: status_of(gateway, anna) == 200)


def test_a_client_that_does_not_read_is_cut_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listen, "WRITE_SECONDS", 0.2)
    store = KeyStore(tmp_path / "keys.json")
    anna = store.add("anna", KeyLimits(max_concurrency=1))
    with serving_gateway(tmp_path) as gateway, connected(gateway) as connection:
        ask_for_file(gateway, anna, store.list()[0].holder.id, connection)
        wait_until(lambda: status_of(gateway, anna) == 200)


# --- errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
def test_a_stream_for_which_there_is_no_room_is_refused_before_its_headers(
    tmp_path: Path, path: str
) -> None:
    engine = PatientEngine(60.0)

    def status(gateway: Gateway, messages: Any, key: str = "none") -> tuple[int, str]:
        name = "messages" if "chat" in path else "input"
        body = {"model": MODEL, name: messages, "stream": True}
        reply = gateway.send("POST", path, json=body, headers={"Authorization": f"Bearer {key}"})
        return reply.status_code, reply.json()["error"]["code"]

    with (
        serving_gateway(tmp_path, engine, max_readings=1, price_in=1.0, price_out=1.0) as gateway,
        connected(gateway) as connection,
    ):
        connection.sendall(chat_request(asking(), stream=True))
        wait_until(lambda: engine.num_running)
        assert status(gateway, asking(novel(300))) == (429, "too_many_readings")
        key = KeyStore(tmp_path / "keys.json").add("anna", KeyLimits(max_cost=1e-9))
        assert status(gateway, HELLO, key) == (429, "insufficient_quota")


def test_errors_do_not_tell_where_the_engine_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # nobody listens
        address = f"http://127.0.0.1:{closed.getsockname()[1]}/v1"
        engine = open_endpoint_at("upstream", base_url=address, patience=0)
        with serving_gateway(tmp_path, engine) as gateway:
            for stream in (False, True):
                body = {"model": MODEL, "messages": HELLO, "stream": stream}
                reply = gateway.send("POST", "/v1/chat/completions", json=body)
                assert reply.status_code == (200 if stream else 503)
                assert '"engine_error"' in reply.text
                assert not {"127.0.0.1", "upstream"} & set(re.split(r"[/:\"\s]+", reply.text))
    assert address in caplog.text


ON_A_FULL_DISK = """
import sys
from pathlib import Path
from tests.support.gateways import MODEL, asking, novel, serving_gateway

disk = Path(sys.argv[1])
with serving_gateway(disk / "state") as gateway:
    sizes = (200, 201, 2)
    for size in sizes:
        gateway.send("POST", "/v1/files", files={"file": ("a.txt", novel(size).encode())})
    ids = [one["id"] for one in gateway.send("GET", "/v1/files").json()["data"]]
    try:
        with open(disk / "other", "wb", buffering=0) as other:
            while True:
                other.write(bytes(4096))
    except OSError:
        pass
    body = {"model": MODEL, "messages": asking(novel(300))}
    print(gateway.send("POST", "/v1/chat/completions", json=body).status_code)
    for file_id in ids:
        print(gateway.send("DELETE", f"/v1/files/{file_id}").status_code)
    print(gateway.send("GET", "/v1/files").json()["data"])
"""


def test_files_can_be_deleted_on_a_full_disk(tmp_path: Path) -> None:
    mounting = [
        "unshare",
        "-rm",
        "sh",
        "-c",
        'mount -t tmpfs -o size=2m disk "$0" && "$@"',
        tmp_path,
    ]
    if (
        not shutil.which("unshare")
        or subprocess.run([*mounting, "true"], capture_output=True).returncode
    ):
        pytest.skip("this user cannot mount a small disk")
    command = [*mounting, sys.executable, "-c", ON_A_FULL_DISK, str(tmp_path)]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert output.split() == ["503", "200", "200", "200", "[]"]


def test_a_file_that_was_deleted_without_its_row_is_not_listed_by_the_next_server(
    tmp_path: Path,
) -> None:
    with GatewayState(tmp_path) as state:
        kept, lost = (state.add_file("anna", "a.txt", "", b"x", max_bytes=10) for _ in range(2))
        assert kept is not None
        assert lost is not None
        state.file_path(lost).unlink()
    with GatewayState(tmp_path) as state:
        assert [file.id for file in state.files_of("anna")] == [kept.id]
