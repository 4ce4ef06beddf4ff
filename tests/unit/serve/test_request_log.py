"""What the server reports of a request."""

from dataclasses import replace

from memagent.serve.guard import MAX_PATH, RequestRecord, client_of, path_of
from memagent.types import Usage

RECORD = RequestRecord(
    client="127.0.0.1",
    method="POST",
    path="/v1/completions",
    status=200,
    seconds=0.421,
    usage=Usage(calls=1, prompt_tokens=1031, completion_tokens=10),
    request_id="req_1",
    is_cut=False,
)


def test_a_line_has_client_path_status_tokens_and_seconds() -> None:
    assert str(RECORD) == "127.0.0.1 POST /v1/completions 200, 1,031 + 10 tokens, 0.42 s, req_1"
    refused = replace(RECORD, status=400, usage=Usage(), is_cut=True)
    assert (
        str(refused) == "127.0.0.1 POST /v1/completions 400, 0.42 s, req_1, cut off by the shutdown"
    )


def test_probes_are_recognised_only_if_they_succeed() -> None:
    assert replace(RECORD, path="/health").is_probe
    assert not replace(RECORD, path="/health", status=503).is_probe
    assert not RECORD.is_probe


def test_paths_that_clients_invent_are_short_and_visible() -> None:
    path = path_of({"raw_path": b"/a\x1b[2J\n%1b\xff", "path": "/"})
    assert path == "/a%1B[2J%0A%1b%FF"
    assert path_of({"path": "/ä"}) == "/%C3%A4"
    assert len(str(replace(RECORD, path="/" * 9999))) < MAX_PATH + 100
    assert client_of({"client": ("10.0.0.7", 5)}) == "10.0.0.7"
    assert client_of({}) == "-"
