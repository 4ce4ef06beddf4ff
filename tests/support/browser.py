"""Chromium without a window, driven over its own protocol through two pipes.

with Browser(folder) as browser:
    page = browser.open("http://127.0.0.1:8000/")
    page.wait_for("document.querySelector('h1')")
    page.press("j")
    assert page.problems == []
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import pytest

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
needs_chromium = pytest.mark.skipif(
    CHROMIUM is None, reason="needs chromium, chromium-browser or google-chrome on the PATH"
)
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run"),
    *("--disable-dev-shm-usage", "--disable-extensions", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync", "--metrics-recording-only", "--mute-audio"),
)
ON_3_AND_4 = """
import fcntl, os, sys
reads, writes = (fcntl.fcntl(int(each), fcntl.F_DUPFD, 10) for each in sys.argv[1:3])
os.dup2(reads, 3)
os.dup2(writes, 4)
os.execv(sys.argv[3], sys.argv[3:])
"""
"""Starts a program with two pipes where the protocol wants them."""
WAIT_SECONDS = 30.0
KEYS = {
    "Enter": ("Enter", 13),
    "Backspace": ("Backspace", 8),
    "ArrowDown": ("ArrowDown", 40),
    "Tab": ("Tab", 9),
}


class Browser:
    """One Chromium; closed with the block."""

    def __init__(self, folder: Path) -> None:
        """`folder` gets the profile."""
        assert CHROMIUM is not None
        reads, self._writes = os.pipe()
        self._reads, writes = os.pipe()
        self._process = subprocess.Popen(
            [
                *(sys.executable, "-c", ON_3_AND_4, str(reads), str(writes), CHROMIUM, *FLAGS),
                *(f"--user-data-dir={folder / 'profile'}", "--remote-debugging-pipe"),
            ],
            pass_fds=(reads, writes),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(reads)
        os.close(writes)
        self._number = 0
        self._rest = b""
        self._pages: dict[str, Page] = {}

    def open(self, url: str, *, width: int = 1280, height: int = 900, dark: bool = False) -> Page:
        """A new page at an address."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = self._pages[session] = Page(self, session)
        for domain in ("Page", "Runtime", "Log", "Network"):
            page.call(f"{domain}.enable")
        page.call("Emulation.setFocusEmulationEnabled", enabled=True)
        page.resize(width, height)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        page.call("Emulation.setEmulatedMedia", features=[scheme])
        page.go(url)
        return page

    def call(self, method: str, session: str | None = None, **parameters: Any) -> Any:
        """The result of a command; events that arrive meanwhile go to their pages."""
        self._number += 1
        number = self._number
        command = {"id": number, "method": method, "params": parameters}
        if session:
            command["sessionId"] = session
        os.write(self._writes, json.dumps(command).encode() + b"\0")
        while True:
            message = self._next(time.monotonic() + WAIT_SECONDS)
            assert message is not None, f"{method}: no reply of the browser"
            if message.get("id") == number:
                assert "error" not in message, f"{method}: {message['error']}"
                return message["result"]

    def listen(self, seconds: float) -> None:
        """Take in events for a while."""
        until = time.monotonic() + seconds
        while self._next(until) is not None:
            pass

    def _next(self, until: float) -> dict[str, Any] | None:
        while b"\0" not in self._rest:
            left = until - time.monotonic()
            if left <= 0 or not select.select([self._reads], [], [], left)[0]:
                return None
            block = os.read(self._reads, 1 << 16)
            assert block, "the browser has ended"
            self._rest += block
        raw, _, self._rest = self._rest.partition(b"\0")
        message: dict[str, Any] = json.loads(raw)
        if "method" in message and message.get("sessionId") in self._pages:
            self._pages[message["sessionId"]].take(message["method"], message["params"])
        return message

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._writes)
        os.close(self._reads)


class Page:
    """One tab."""

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser = browser
        self._session = session
        self.problems: list[str] = []
        """Errors of scripts, refusals by the content security policy, failed requests."""
        self.requests: list[str] = []
        """Addresses that were asked for."""

    def call(self, method: str, **parameters: Any) -> Any:
        """The result of a command to this page."""
        return self._browser.call(method, self._session, **parameters)

    def go(self, url: str) -> None:
        """Open an address."""
        self.call("Page.navigate", url=url)

    def resize(self, width: int, height: int, *, scale: float = 1.0) -> None:
        """The size of the window."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=scale,
            mobile=False,
        )

    def value(self, expression: str) -> Any:
        """What an expression of JavaScript gives, as plain values."""
        result = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def wait_for(self, condition: str) -> Any:
        """Wait until an expression is true; its value."""
        until = time.monotonic() + WAIT_SECONDS
        while time.monotonic() < until:
            if found := self.value(
                f"(() => {{ const found = {condition}; return found && true; }})()"
            ):
                return found
            self._browser.listen(0.02)
        shown = self.value("document.body.innerText")
        raise AssertionError(f"never true: {condition}; {self.problems}; the page shows: {shown}")

    def text(self, selector: str = "main") -> str:
        """The text of an element, as it is shown."""
        found: str = self.value(f"document.querySelector({json.dumps(selector)}).innerText")
        return found

    def texts(self, selector: str) -> list[str]:
        """The texts of all elements that match."""
        query = f"[...document.querySelectorAll({json.dumps(selector)})].map(e => e.innerText)"
        found: list[str] = self.value(query)
        return found

    def click(self, selector: str, place: int = 0) -> None:
        """Click one of the elements that match."""
        event = "new MouseEvent('click', {bubbles: true, cancelable: true})"
        found = f"document.querySelectorAll({json.dumps(selector)})[{place}]"
        self.value(f"{found}.dispatchEvent({event})")

    def press(self, key: str) -> None:
        """Press a key, and let it go."""
        name, code = KEYS.get(key, (key, ord(key[0].upper())))
        event = {"key": name, "windowsVirtualKeyCode": code}
        typed = {"text": "\r"} if key == "Enter" else {} if key in KEYS else {"text": key}
        self.call("Input.dispatchKeyEvent", type="keyDown", **event, **typed)
        self.call("Input.dispatchKeyEvent", type="keyUp", **event)

    def screenshot(self, path: Path) -> None:
        """What the window shows, as PNG."""
        data = self.call("Page.captureScreenshot", format="png")["data"]
        path.write_bytes(base64.b64decode(data))

    def take(self, method: str, values: Mapping[str, Any]) -> None:
        """Keep what an event reports."""
        if method == "Runtime.exceptionThrown":
            self.problems.append(str(values["exceptionDetails"]))
        elif method == "Log.entryAdded" and values["entry"]["level"] == "error":
            self.problems.append(values["entry"]["text"])
        elif method == "Runtime.consoleAPICalled" and values["type"] == "error":
            self.problems.append(str(values["args"]))
        elif method == "Network.requestWillBeSent":
            self.requests.append(values["request"]["url"])
