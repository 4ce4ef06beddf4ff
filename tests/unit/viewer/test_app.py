"""The viewer over HTTP: its headers, and what it refuses."""

import http.client
import json
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest

from memagent.viewer.api import ViewerApi
from memagent.viewer.app import POLICY, viewing
from memagent.viewer.library import Library
from tests.support.viewer_runs import make_reading


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("given")
    make_reading(folder / "reading", num_sections=2)
    (folder.parent / "secret.txt").write_text("secret")
    with viewing(ViewerApi(Library([folder]))) as url:
        yield url


def ask(
    url: str, path: str, method: str = "GET", **headers: str
) -> tuple[int, dict[str, str], bytes]:
    address = urlsplit(url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=30)
    connection.request(method, path, headers=headers)
    response = connection.getresponse()
    found = (response.status, dict(response.headers), response.read())
    connection.close()
    return found


def test_every_response_carries_the_policy(url: str) -> None:
    for path in ("/", "/assets/main.js", "/api/runs", "/nosuch"):
        _, headers, _ = ask(url, path)
        assert headers["content-security-policy"] == POLICY
        assert headers["x-content-type-options"] == "nosniff"
    assert "unsafe" not in POLICY
    assert "default-src 'none'" in POLICY


def test_the_page_names_no_other_host_and_has_no_inline_script(url: str) -> None:
    status, headers, body = ask(url, "/")
    assert (status, headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert b"http://" not in body
    assert b"https://" not in body
    assert body.count(b"<script") == 1
    assert b'<script type="module" src="/assets/main.js">' in body


@pytest.mark.parametrize(
    "path",
    [
        "/assets/../app.py",
        "/assets/..%2f..%2fapp.py",
        "/assets/%2e%2e/%2e%2e/__init__.py",
        "/api/runs/..%2fsecret.txt",
        "/api/runs/reading/../../../etc/passwd",
        "/api/runs/%2e%2e/traces/q0",
        "/../../etc/passwd",
        "/assets/__init__.py",
    ],
)
def test_paths_that_lead_elsewhere_find_nothing(url: str, path: str) -> None:
    status, _, body = ask(url, path)
    assert status == 404
    assert b"secret" not in body
    assert b"root:" not in body


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH"])
def test_nothing_can_be_changed(url: str, method: str) -> None:
    status, _, _ = ask(url, "/api/runs", method)
    assert status == 405


@pytest.mark.parametrize(
    "query", ["offset=-1", "offset=x", "limit=0", "limit=100000", "offset=1e99"]
)
def test_numbers_out_of_range_are_errors_of_one_line(url: str, query: str) -> None:
    run = json.loads(ask(url, "/api/runs")[2])["runs"][0]["id"]
    status, _, body = ask(url, f"/api/runs/{run}/items?{query}")
    assert status == 400
    assert json.loads(body)["error"].startswith(query.partition("=")[0])


def test_a_run_of_another_kind_is_an_error(url: str) -> None:
    run = json.loads(ask(url, "/api/runs")[2])["runs"][0]["id"]
    status, _, body = ask(url, f"/api/runs/{run}/items")
    assert (status, json.loads(body)) == (404, {"error": "this is a run of kind 'ask', not 'eval'"})
