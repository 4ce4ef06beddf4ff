"""A middleware of vLLM's server: every route but the question for its health asks for the key.

vLLM itself asks for it on /v1 only. The routes that change weights and adapters would be open to every user of the
machine, and can run code.
"""

from __future__ import annotations

import hmac
import os
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

OPEN = ("/health",)
Scope = MutableMapping[str, Any]
App = Callable[[Scope, Any, Any], Awaitable[None]]


class RouteGuard:
    """An ASGI application around another."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._expected = f"Bearer {os.environ['VLLM_API_KEY']}".encode()

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        if scope["type"] not in ("http", "websocket") or self._may_pass(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            await send({"type": "http.response.start", "status": 401, "headers": []})
            await send({"type": "http.response.body", "body": b"the key is missing or wrong"})

    def _may_pass(self, scope: Scope) -> bool:
        given = dict(scope["headers"]).get(b"authorization", b"")
        return scope["path"] in OPEN or hmac.compare_digest(given, self._expected)
