"""What a request to the gateway may become: memory, parts, files; whatever a key sends, others are answered."""

from __future__ import annotations

import gzip
import subprocess
import sys
from pathlib import Path

import pytest

from memagent.serve.errors import ApiError
from memagent.serve.reading.files import RequestFiles
from memagent.serve.reading.requests import AttachedFile
from memagent.serve.reading.state import GatewayState
from tests.support.gateways import serving_gateway

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
