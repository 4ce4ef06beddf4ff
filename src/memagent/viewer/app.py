"""The routes of the viewer. All of them only read.

GET /                                   the page; its parts are under /assets/
GET /api/runs                           GET /api/runs/ID, /version, /items, /cells, /metrics, /rollouts
GET /api/compare                        GET /api/runs/ID/traces/KEY, and /steps/N, /section, /prompt below it

The content security policy allows what this server sends and nothing else: no script or style inside the
page, no other host, no frame, no form. Texts are never put into a page as HTML.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.resources import files
from typing import Annotated, Any

from fastapi import FastAPI, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from memagent.errors import MemagentError
from memagent.serve.listen import ForeignRequest, HostCheck
from memagent.viewer.api import ViewerApi, json_text
from memagent.viewer.evaluations import MAX_ITEMS, PAGE_ITEMS

PAGE = "index.html"
TYPES = {
    "css": "text/css; charset=utf-8",
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
MAX_NUMBER = 10**9
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

Whole = Annotated[int, Query(ge=0, le=MAX_NUMBER)]
Limit = Annotated[int, Query(ge=1, le=MAX_ITEMS)]


def make_viewer_app(api: ViewerApi, host: str) -> FastAPI:
    """The ASGI application; `host` is what it listens on."""
    app = FastAPI(title="memagent view", docs_url=None, redoc_url=None, openapi_url=None)
    routes = _Routes(api)
    for path, endpoint in routes.all().items():
        app.add_api_route(path, endpoint, methods=["GET"], response_model=None)
    app.add_exception_handler(MemagentError, _not_found)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _refused)
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


class _Routes:
    """The handlers. They are not async, so that reading a file holds up nobody."""

    def __init__(self, api: ViewerApi) -> None:
        self._api = api
        self._assets = dict(_assets())

    def all(self) -> dict[str, Callable[..., Response]]:
        run, trace = "/api/runs/{run_id}", "/api/runs/{run_id}/traces/{key}"
        return {
            "/": self.page,
            "/assets/{name}": self.asset,
            "/api/runs": lambda: as_json(self._api.runs()),
            "/api/compare": self.compare,
            run: self.run,
            f"{run}/version": self.version,
            f"{run}/items": self.items,
            f"{run}/cells": self.cells,
            f"{run}/metrics": self.metrics,
            f"{run}/rollouts": self.rollouts,
            trace: self.trace,
            f"{trace}/steps/{{number}}": self.step,
            f"{trace}/steps/{{number}}/section": self.section,
            f"{trace}/steps/{{number}}/prompt": self.prompt,
        }

    def page(self) -> Response:
        return self.asset(PAGE)

    def asset(self, name: str) -> Response:
        content = self._assets.get(name)
        if content is None:
            return _error(404, "there is no such page")
        return Response(content, headers={"Content-Type": TYPES[name.rpartition(".")[2]]})

    def run(self, run_id: str) -> Response:
        return as_json(self._api.run(run_id))

    def version(self, run_id: str) -> Response:
        return as_json(self._api.version(run_id))

    def items(
        self,
        request: Request,
        run_id: str,
        offset: Whole = 0,
        limit: Limit = PAGE_ITEMS,
        step: Whole | None = None,
        grader: str | None = None,
    ) -> Response:
        names = ("task", "method", "tokens", "status", "text")
        given = request.query_params
        wanted = {name: given[name] for name in names if name in given}
        found = self._api.items(
            run_id, wanted, offset=offset, limit=limit, step=step, grader=grader
        )
        return as_json(found)

    def cells(self, run_id: str, step: Whole | None = None, grader: str | None = None) -> Response:
        return as_json(self._api.cells(run_id, step=step, grader=grader))

    def compare(
        self, first: str, second: str, offset: Whole = 0, limit: Limit = PAGE_ITEMS
    ) -> Response:
        return as_json(self._api.compare(first, second, offset=offset, limit=limit))

    def metrics(self, run_id: str, after: Whole = 0) -> Response:
        return as_json(self._api.metrics(run_id, after=after))

    def rollouts(self, run_id: str, step: Whole = 0) -> Response:
        return as_json(self._api.rollouts(run_id, step))

    def trace(self, run_id: str, key: str) -> Response:
        return as_json(self._api.trace(run_id, key))

    def step(self, run_id: str, key: str, number: int) -> Response:
        return as_json(self._api.step(run_id, key, number))

    def section(self, run_id: str, key: str, number: int) -> Response:
        return as_json(self._api.section(run_id, key, number))

    def prompt(self, run_id: str, key: str, number: int) -> Response:
        return as_json(self._api.prompt(run_id, key, number))


def assets() -> dict[str, str]:
    """What the browser gets, by name: the page, its stylesheet and its modules."""
    return {name: content.decode() for name, content in _assets()}


def _assets() -> list[tuple[str, bytes]]:
    folder = files("memagent.viewer") / "pages"
    return [
        (each.name, each.read_bytes())
        for each in folder.iterdir()
        if each.name.rpartition(".")[2] in TYPES
    ]


def as_json(values: dict[str, Any]) -> Response:
    """Values as JSON. Half of a surrogate pair, which a file may hold, is escaped."""
    text = json_text(values)
    return Response(text.encode("utf-8", "backslashreplace"), media_type="application/json")


def _error(status: int, message: str) -> Response:
    response = as_json({"error": message})
    response.status_code = status
    return response


async def _not_found(request: Request, error: Exception) -> Response:
    return _error(404, str(error))


async def _invalid(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    return _error(400, f"{first['loc'][-1]}: {first['msg']}")


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return _error(error.status_code, str(error.detail))
