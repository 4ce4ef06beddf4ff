"""Every route in the tables of our servers: without a key, with a wrong one, for what belongs to another key, with
a body without end, from another site. A route that is added is tested here, or fails for want of an entry.
"""

import asyncio
import json
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.routing import APIRoute

from memagent.agent.reader import Reader
from memagent.config import GatewayConfig, ServeConfig
from memagent.engines.scripted import ScriptedEngine, keyword_reply
from memagent.serve.agents import AgentServer
from memagent.serve.app import make_app
from memagent.serve.guard import AdmissionGate
from memagent.serve.keys import KeyStore
from memagent.serve.reading.app import gateway_app
from memagent.serve.reading.state import GatewayState
from memagent.viewer.api import ViewerApi
from memagent.viewer.app import make_viewer_app
from memagent.viewer.library import Library
from tests.support.gateways import MODEL, SMALL

MAX_BYTES = 200_000
PIECE = b" " * 65536
SECRET = "Nobody but Anna may know of the corn in the mill."
JSON_TYPE = "application/json"


@dataclass(frozen=True, kw_only=True)
class Served:
    """A server, and what its routes are asked with."""

    app: FastAPI
    right: str | None = None
    """A key that is admitted; None: the server has no keys."""
    wrong: tuple[str, ...] = ()
    open_paths: frozenset[str] = frozenset()
    """Paths that are documented to need no key."""
    parameters: dict[str, str] = field(default_factory=dict)
    """What stands for each parameter of a path: what belongs to another key, where it belongs to one."""
    of_others: frozenset[str] = frozenset()
    """Parameters that belong to another key."""
    bodies: dict[str, Any] = field(default_factory=dict)
    """By the path of each route with a body: one that names what belongs to another key, or its content type."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    status: int
    headers: dict[str, str]
    text: str
    num_taken: int
    """Bytes of the body that the server asked for."""


def gateway(folder: Path, stack: ExitStack) -> Served:
    store = KeyStore(folder / "keys.json")
    keys = [store.add(name) for name in ("anna", "bert", "removed")]
    store.remove("removed")
    state = stack.enter_context(GatewayState(folder))
    anna = store.list()[0].holder.id
    file = state.add_file(anna, "corn.txt", "user_data", SECRET.encode(), max_bytes=1000)
    assert file is not None
    engine = ScriptedEngine(keyword_reply)
    config = GatewayConfig.parse({"state_dir": str(folder)})
    server = ServeConfig(max_request_bytes=MAX_BYTES)
    content = [{"type": "input_file", "file_id": file.id}, {"type": "text", "text": "Where?"}]
    messages = [{"role": "user", "content": content}]
    return Served(
        app=gateway_app(engine, Reader(engine, **SMALL), state, config, server),
        right=keys[1],
        wrong=("mem-wrong", keys[2], keys[1][:-1], keys[1].upper()),
        open_paths=frozenset({"/health"}),
        parameters={"file_id": file.id, "name": MODEL},
        of_others=frozenset({"file_id"}),
        bodies={
            "/v1/chat/completions": {"model": MODEL, "messages": messages},
            "/v1/responses": {"model": MODEL, "input": messages},
            "/v1/files": "multipart/form-data; boundary=x",
        },
    )


def local_model() -> Served:
    load = dict.fromkeys(("num_running", "num_waiting", "num_slots", "num_used_slots"), 0)
    card = {"public_name": "tiny", "model": "tiny", "tokenizer": "tiny", "served_window": 64}
    engine: Any = SimpleNamespace(is_alive=True, load=SimpleNamespace(**load), **card)
    config = ServeConfig.parse({"api_key": "right", "max_request_bytes": MAX_BYTES})
    return Served(
        app=make_app(engine, config),
        right="right",
        wrong=("wrong", "Right", "right2"),
        open_paths=frozenset({"/health", "/metrics"}),
        parameters={"name": "any"},
        bodies={"/v1/chat/completions": JSON_TYPE, "/v1/completions": JSON_TYPE},
    )


def agents(stack: ExitStack) -> Served:
    async def never(call: Any) -> Any:
        raise AssertionError("a refused request reached a rollout")

    server = AgentServer()
    config = ServeConfig(max_request_bytes=MAX_BYTES)
    app = server.app(config, gate=AdmissionGate(8))
    with server.admitted(never) as ended:
        pass
    return Served(
        app=app,
        right=stack.enter_context(server.admitted(never)),
        wrong=("wrong", ended),
        bodies={"/v1/chat/completions": JSON_TYPE},
    )


def viewer(folder: Path) -> Served:
    parameters = dict.fromkeys(("name", "run_id", "key"), "any") | {"number": "0"}
    return Served(
        app=make_viewer_app(ViewerApi(Library([folder])), "127.0.0.1"), parameters=parameters
    )


@pytest.fixture(params=["gateway", "local model", "agents", "viewer"])
def served(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Served]:
    with ExitStack() as stack:
        yield {
            "gateway": lambda: gateway(tmp_path, stack),
            "local model": local_model,
            "agents": lambda: agents(stack),
            "viewer": lambda: viewer(tmp_path),
        }[request.param]()


def routes_of(served: Served) -> list[tuple[str, str]]:
    """Method and path of every route in the application's own table."""
    assert all(isinstance(route, APIRoute) for route in served.app.routes)
    return [
        (method, route.path)
        for route in served.app.routes
        if isinstance(route, APIRoute)
        for method in route.methods
    ]


def ask(
    served: Served, method: str, path: str, *, key: str | None, endless: bool = False, **more: str
) -> Answer:
    """What a route answers, with the body that its entry gives or with one that never ends."""
    body = b""
    headers = {"host": "localhost", **more}
    if method == "POST":
        given = served.bodies[path]  # a new route with a body: say which
        headers["content-type"] = given if isinstance(given, str) else JSON_TYPE
        body = b"{}" if isinstance(given, str) else json.dumps(given).encode()
    if key is not None:
        headers["authorization"] = f"Bearer {key}"
    if endless:
        headers["transfer-encoding"] = "chunked"
    else:
        headers["content-length"] = str(len(body))
    filled = path.replace(":path}", "}").format(**served.parameters)  # a new parameter: say which
    return asyncio.run(_answer(served.app, method, filled, headers, endless=endless, body=body))


async def _answer(
    app: FastAPI, method: str, path: str, headers: dict[str, str], *, endless: bool, body: bytes
) -> Answer:
    sent: list[Any] = []
    num_taken = 0
    is_taken = False

    async def receive() -> Any:
        nonlocal num_taken, is_taken
        if endless:
            num_taken += len(PIECE)
            is_unbounded = num_taken > 4 * MAX_BYTES  # the test ends all the same
            return {"type": "http.request", "body": PIECE, "more_body": not is_unbounded}
        if is_taken:
            await asyncio.Event().wait()
        is_taken = True
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "method": method,
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
    }
    await app(scope, receive, send)
    content = b"".join(message.get("body", b"") for message in sent)
    pairs = [(name.decode(), value.decode()) for name, value in sent[0]["headers"]]
    return Answer(
        status=sent[0]["status"], headers=dict(pairs), text=content.decode(), num_taken=num_taken
    )


def test_no_route_is_answered_without_a_right_key(served: Served) -> None:
    routes = routes_of(served)
    assert served.open_paths <= {path for _, path in routes}
    for method, path in routes:
        for key in (None, *served.wrong):
            answer = ask(served, method, path, key=key)
            if served.right is None or path in served.open_paths:
                assert (answer.status, path) != (401, path)
            else:
                assert (answer.status, path, key) == (401, path, key)
                assert json.loads(answer.text)["error"]["code"] == "invalid_api_key"
        assert (ask(served, method, path, key=served.right).status, path) != (401, path)


def test_no_route_tells_one_key_of_what_belongs_to_another(served: Served) -> None:
    for method, path in routes_of(served):
        if not served.of_others or isinstance(served.bodies.get(path), str):
            continue  # nothing belongs to a key, or the request names nothing
        answer = ask(served, method, path, key=served.right)
        names_others = any(f"{{{name}}}" in path for name in served.of_others)
        if names_others or method == "POST":
            assert (answer.status, path) == (404, path)
        assert SECRET not in answer.text
        assert "corn.txt" not in answer.text


def test_no_route_reads_a_body_above_its_limit(served: Served) -> None:
    for method, path in routes_of(served):
        answer = ask(served, method, path, key=served.right, endless=True)
        if method == "POST":
            assert (answer.status, path) == (413, path)
            assert MAX_BYTES < answer.num_taken <= MAX_BYTES + len(PIECE)
        else:
            assert (answer.num_taken, path) == (0, path)
        if served.right is not None:
            assert answer.headers["connection"] == "close"  # what is left is not read either


def test_no_route_reads_more_of_a_body_for_a_wrong_key(served: Served) -> None:
    for method, path in routes_of(served) if served.right else ():
        answer = ask(served, method, path, key="wrong", endless=True)
        is_open = path in served.open_paths
        assert answer.num_taken <= (MAX_BYTES + len(PIECE) if method == "POST" else 0)
        assert is_open or answer.status in (401, 413)
        assert answer.headers["connection"] == "close"


def test_no_route_answers_pages_of_other_sites(served: Served) -> None:
    for method, path in routes_of(served):
        for headers in (
            {"host": "evil.example"},
            {"host": "127.0.0.1.evil.example"},
            {"origin": "https://evil.example"},
        ):
            answer = ask(served, method, path, key=served.right, **headers)
            assert (answer.status, path) == (403, path)
