"""The routes of the viewer, all of which only read, and its process: on this machine only, until Ctrl-C.

    with viewing(ViewerApi(open_library(["runs"]))) as url:
        print(url)

GET /                                   the page; its parts are under /assets/
GET /api/runs                           GET /api/runs/ID, /version, /items, /cells, /metrics, /rollouts
GET /api/compare                        GET /api/runs/ID/traces/KEY, and /steps/N, /section, /prompt below it

The content security policy allows what this server sends and nothing else: no script or style inside the
page, no other host, no frame, no form. Texts are never put into a page as HTML.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from importlib.resources import files
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from memagent.errors import MemagentError
from memagent.serve.listen import (
    BACKLOG,
    ForeignRequest,
    HostCheck,
    bound,
    port_errors,
    server_config,
    url_of,
)
from memagent.viewer.api import ViewerApi, json_text
from memagent.viewer.traces import Json

HOST = "127.0.0.1"
PAGE = "index.html"
TYPES = {
    "css": "text/css; charset=utf-8",
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; "
    "trusted-types 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "Cache-Control": "no-store",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}

_RUN, _STEP = "runs/{run_id}", "runs/{run_id}/traces/{key}/steps/{number}"
ROUTES = {
    "runs": "runs",
    "compare": "compare",
    _RUN: "run",
    **{f"{_RUN}/{name}": name for name in ("version", "items", "cells", "metrics", "rollouts")},
    f"{_RUN}/traces/{{key}}": "trace",
    _STEP: "step",
    f"{_STEP}/section": "section",
    f"{_STEP}/prompt": "prompt",
}
"""Paths below `/api/`, and what of `ViewerApi` answers them."""


def make_viewer_app(api: ViewerApi, host: str) -> FastAPI:
    """The ASGI application; `host` is what it listens on."""
    app = FastAPI(title="memagent view", docs_url=None, redoc_url=None, openapi_url=None)
    contents = assets()

    def asset(name: str = PAGE) -> Response:
        content = contents.get(name)
        if content is None:
            return _error(404, "there is no such page")
        return Response(content, headers={"Content-Type": TYPES[name.rpartition(".")[2]]})

    app.add_api_route("/", lambda: asset(), response_model=None)
    app.add_api_route("/assets/{name}", asset, response_model=None)
    for path, name in ROUTES.items():
        app.add_api_route(f"/api/{path}", _answered(getattr(api, name)), response_model=None)
    for kind in (MemagentError, RequestValidationError, HTTPException):
        app.add_exception_handler(kind, _refused)
    app.add_middleware(ViewerGuard, hosts=HostCheck(host, None))
    return app


class ViewerGuard:
    """Refuses requests of other sites, and sets the headers of every response."""

    def __init__(self, app: ASGIApp, *, hosts: HostCheck) -> None:
        self._app = app
        self._hosts = hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        try:
            self._hosts.check(Headers(scope=scope))
        except ForeignRequest as error:
            await _error(403, str(error))(scope, receive, send_with_headers)
            return
        await self._app(scope, receive, send_with_headers)


def _answered(answer: Callable[..., Json]) -> Callable[..., Response]:
    """A handler with the parameters of an answer. It is not async, so that reading a file holds up nobody."""

    @wraps(answer)
    def handler(**given: Any) -> Response:
        return as_json(answer(**given))

    return handler


def assets() -> dict[str, str]:
    """What the browser gets, by name: the page, its stylesheet and its modules."""
    folder = files("memagent.viewer") / "pages"
    found = (each for each in folder.iterdir() if each.name.rpartition(".")[2] in TYPES)
    return {each.name: each.read_text(encoding="utf-8") for each in found}


def as_json(values: dict[str, Any]) -> Response:
    """Values as JSON. Half of a surrogate pair, which a file may hold, is escaped."""
    text = json_text(values)
    return Response(text.encode("utf-8", "backslashreplace"), media_type="application/json")


# --- the process ----------------------------------------------------------------------------------


class ViewerServer(uvicorn.Server):
    """uvicorn that ends quietly: Ctrl-C is how a viewer is closed."""

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.should_exit = True


def view(
    api: ViewerApi, *, port: int = 0, on_ready: Callable[[str], None] = lambda url: None
) -> None:
    """Serve until a signal shuts the process down. `on_ready` gets the address."""
    with bound(HOST, port) as listener:
        with port_errors(HOST, port):
            listener.listen(BACKLOG)
        on_ready(url_of(HOST, listener))
        ViewerServer(server_config(make_viewer_app(api, HOST))).run(sockets=[listener])


@contextmanager
def viewing(api: ViewerApi, *, port: int = 0) -> Iterator[str]:
    """Serve in a thread while the block runs; yields the address."""
    with bound(HOST, port) as listener:
        listener.listen(BACKLOG)
        server = ViewerServer(server_config(make_viewer_app(api, HOST)))
        thread = threading.Thread(target=server.run, args=([listener],), name="memagent-view")
        thread.start()
        try:
            yield url_of(HOST, listener)
        finally:
            server.should_exit = True
            thread.join()


# --- answers that are no pages --------------------------------------------------------------------


def _error(status: int, message: str) -> Response:
    response = as_json({"error": message})
    response.status_code = status
    return response


async def _refused(request: Request, error: Exception) -> Response:
    if isinstance(error, RequestValidationError):
        first = error.errors()[0]
        return _error(400, f"{first['loc'][-1]}: {first['msg']}")
    if isinstance(error, HTTPException):
        return _error(error.status_code, str(error.detail))
    return _error(404, str(error))
