"""The key on all routes of a vLLM server whose weights change."""

import subprocess
import sys
from typing import Any

import pytest

from memagent.engines.vllm.inside.memagent_route_guard import RouteGuard
from memagent.engines.vllm.servers import INSIDE, ROUTE_GUARD

KEY = (b"authorization", b"Bearer secret")


async def asked(kind: str, path: str, *headers: tuple[bytes, bytes]) -> list[Any]:
    """What an application behind the guard sees, or what the guard sends."""
    events: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        events.append("reached")

    async def send(event: dict[str, Any]) -> None:
        events.append(event.get("status") or event.get("code") or event["type"])

    await RouteGuard(app)({"type": kind, "path": path, "headers": headers}, None, send)
    return events


async def test_only_health_and_who_has_the_key_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "secret")
    refused = [401, "http.response.body"]
    assert await asked("http", "/update_weights") == refused
    assert await asked("http", "/update_weights", (b"authorization", b"Bearer other")) == refused
    assert await asked("http", "/health/../update_weights") == refused
    assert await asked("http", "/update_weights", KEY) == ["reached"]
    assert await asked("http", "/health") == ["reached"]
    assert await asked("websocket", "/v1/realtime") == [1008]
    assert await asked("lifespan", "") == ["reached"]


def test_it_is_found_by_its_name_in_a_python_without_our_package() -> None:
    module, name = ROUTE_GUARD.split(".")
    code = f"import sys; sys.path.insert(0, {str(INSIDE)!r}); from {module} import {name}"
    subprocess.run([sys.executable, "-I", "-S", "-c", code], check=True)
