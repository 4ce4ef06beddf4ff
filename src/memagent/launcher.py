"""Servers of other programs on this machine: how they are started, watched and ended.

    servers = start_servers(launches, seconds=600)      # vLLM's, llama.cpp's
    end_servers(servers)

    memagent ── pipe ──▶ watchdog ──▶ the server, on this machine's own address and behind a generated key

A server runs in its own process, which may use another Python, so neither its libraries nor its version
meet ours. It ends with the engine, with Ctrl-C and with this process.
"""

from __future__ import annotations

import asyncio
import atexit
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memagent.errors import EngineError, MachineError

HOST = "127.0.0.1"
WATCHDOG = Path(__file__).with_name("watchdog.py")
POLL_SECONDS = 0.05
HEALTH_SECONDS = 5.0
"""For one question whether a server is up."""
GRACE_SECONDS = 15.0
"""For a server to end by itself before it is killed."""

_exception_line = re.compile(
    r"[A-Za-z_][\w.]*(?:Error|Exception)\w*(?:: |$)|\S+: error(?: loading model)?: "
)
"""As Python, argparse or llama.cpp ends with; a warning that has such a name in the middle of a line is none."""
_line_head = re.compile(
    r"^(\(\w+ pid=\d+\) *)?((ERROR|WARNING|INFO) [\d-]+ [\d:]+ \[[^]]*\] *|[\d.]+ [DEIW] )?"
)
_ready_line = re.compile(rb"^ready (\d+)\n", re.MULTILINE)
"""How a server says which port it has taken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """One server, before it is started."""

    name: str
    """What it is called in messages."""
    command: tuple[str, ...]
    port: int | None = None
    """None: the server takes one, and says so in its ready line."""
    api_key: str
    log: Path
    keeps_log: bool = True
    """False: the log is deleted when the server has ended."""
    environment: Mapping[str, str]
    """All variables of the server's process."""


def free_ports(count: int) -> list[int]:
    """Unused ports, all different."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for opened in sockets:
            opened.bind((HOST, 0))
        return [int(opened.getsockname()[1]) for opened in sockets]


def watched(pipe: int, grace_seconds: float) -> tuple[str, ...]:
    """What goes before a command that ends with this process: see `watchdog.py`."""
    return (sys.executable, "-I", str(WATCHDOG), str(pipe), str(grace_seconds))


def end_group(process_id: int) -> None:
    """Kill the processes that a watchdog of this number has left; it may have been killed itself."""
    with suppress(
        ProcessLookupError, PermissionError
    ):  # the latter on a Mac, of those that have ended
        os.killpg(process_id, signal.SIGKILL)


class Server:
    """A server and the watchdog that ends it."""

    def __init__(self, launch: Launch) -> None:
        self.launch = launch
        self._port = launch.port
        command = [*watched(0, GRACE_SECONDS), *launch.command]
        with launch.log.open("xb") as log:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=dict(launch.environment),
                start_new_session=True,  # Ctrl-C is for us; we end the server in our own time
            )

    @property
    def port(self) -> int:
        """Where it answers, as soon as it is ready."""
        assert self._port is not None, "it has not said so yet"
        return self._port

    @property
    def base_url(self) -> str:
        """Where it answers."""
        return f"http://{HOST}:{self._port}/v1"

    @property
    def is_running(self) -> bool:
        """Whether its process is there."""
        if self.process.poll() is None:
            return True
        if self.process.returncode < 0:  # the watchdog was killed, and has ended nothing
            end_group(self.process.pid)
        return False

    @property
    def is_healthy(self) -> bool:
        """Whether it says that it is ready."""
        if self._port is None:
            found = _ready_line.search(self.launch.log.read_bytes())
            if found is None:
                return False
            self._port = int(found[1])
        with suppress(OSError, http.client.HTTPException):
            return self._get("/health")[0] == 200
        return False

    def models(self) -> list[dict[str, Any]]:
        """What it serves."""
        try:
            status, body = self._get("/v1/models")
            models: list[dict[str, Any]] = json.loads(body)["data"] if status == 200 else []
        except (OSError, http.client.HTTPException, ValueError, KeyError) as error:
            raise EngineError(
                f"{self.launch.name} does not say what it serves: {error}{self._log()}"
            ) from None
        return models

    def ends_within(self, seconds: float) -> bool:
        """Whether its process is gone, or goes soon."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(seconds)
        return not self.is_running

    def why_ended(self) -> str:
        """One line about a server whose process is gone."""
        status = self.process.wait(GRACE_SECONDS)  # the pipe of a dying process closes first
        return f"{self.launch.name} ended with status {status}: {self.last_lines()}{self._log()}"

    def why_late(self, seconds: float) -> str:
        """One line about a server that is not ready in time."""
        return (
            f"{self.launch.name} was not ready within {seconds:g} s; raise `start_seconds`: {self.last_lines()}"
            f"{self._log()}"
        )

    def last_lines(self) -> str:
        """The most informative lines at the end of its log, on one line."""
        text = self.launch.log.read_text(encoding="utf-8", errors="replace")
        return informative_lines(text) or "its log is empty"

    def let_go(self) -> None:
        """Let the watchdog end it, without waiting."""
        assert self.process.stdin is not None
        with suppress(OSError):
            self.process.stdin.close()

    def wait(self) -> None:
        """Wait until it has ended."""
        if not self.ends_within(GRACE_SECONDS + 10.0):
            end_group(self.process.pid)
            self.process.wait()
        if not self.launch.keeps_log:
            self.launch.log.unlink(missing_ok=True)

    def _get(self, path: str) -> tuple[int, bytes]:
        """Not with urllib, which would ask a proxy for our own machine."""
        connection = http.client.HTTPConnection(HOST, self._port, timeout=HEALTH_SECONDS)
        try:
            key = {"Authorization": f"Bearer {self.launch.api_key}"}
            connection.request("GET", path, headers=key)
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    def _log(self) -> str:
        return f"; its log is {self.launch.log}" if self.launch.keeps_log else ""


def start_servers(launches: Sequence[Launch], *, seconds: float) -> list[Server]:
    """Start servers side by side and wait until all are ready. If one fails, all are ended."""
    deadline = time.monotonic() + seconds
    servers: list[Server] = []
    try:
        for launch in launches:
            servers.append(Server(launch))
            atexit.register(servers[-1].let_go)
        for server in servers:
            _await_health(server, servers, deadline, seconds)
    except BaseException:  # Ctrl-C too
        end_servers(servers)
        raise
    return servers


def _await_health(
    server: Server, servers: Sequence[Server], deadline: float, seconds: float
) -> None:
    while not server.is_healthy:
        for other in servers:
            if not other.is_running:
                raise MachineError(other.why_ended())
        if time.monotonic() > deadline:
            raise EngineError(server.why_late(seconds))
        if _is_cancelled():
            raise asyncio.CancelledError
        time.sleep(POLL_SECONDS)


def _is_cancelled() -> bool:
    """Whether the task that starts servers, if it is one, was cancelled.

    In a task Ctrl-C is not raised: the task is cancelled, which shows only when it waits for something.
    """
    try:
        task = asyncio.current_task()
    except RuntimeError:  # no event loop runs here
        return False
    return task is not None and task.cancelling() > 0


def end_servers(servers: Sequence[Server]) -> None:
    """End servers, all at once, and wait until they are gone. Ending twice does no harm."""
    for server in servers:
        server.let_go()
    for server in servers:
        server.wait()
        atexit.unregister(server.let_go)


def informative_lines(log: str, *, limit: int = 3) -> str:
    """The last exception in a log that does not point to another one, else its last lines, as one line."""
    lines = [_line_head.sub("", line).strip(" ^~") for line in log.splitlines()]
    lines = [line for line in lines if line]
    found = [n for n, line in enumerate(lines) if _exception_line.match(line)]
    causes = [n for n in found if "root cause" not in lines[n]] or found
    if not causes:
        chosen = lines[-limit:]
    elif ": " not in lines[causes[-1]]:  # the line of code says what failed
        chosen = lines[max(0, causes[-1] - 1) : causes[-1] + 1]
    elif "validation error" in lines[causes[-1]]:  # the next line says which
        chosen = lines[causes[-1] : causes[-1] + 2]
    else:
        chosen = [lines[causes[-1]]]
    return " | ".join(" ".join(line.split())[:200] for line in chosen)
