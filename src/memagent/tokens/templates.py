"""Chat templates of models: programs of strangers, rendered in a process with limits.

    template = ChatTemplate(source, {"bos_token": "<s>"}, name="my-model")
    template.render(messages)     # ConfigError if it fails, takes too long or needs too much memory

Jinja's sandbox keeps a template from files and code, but not from loops without end or texts of any
size. All templates of a program are rendered by one process, which starts when the first of them is opened.
"""

from __future__ import annotations

import atexit
import importlib.util
import json
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from memagent.errors import ConfigError, plain
from memagent.types import Message

SECONDS = 5.0
BYTES_PER_SECOND = 1e6
"""A rendering may take this long: so many seconds, and one for so many bytes of messages."""
START_SECONDS = 60.0
"""For the process to start on a busy machine."""
MAX_TEMPLATE_CHARS = 1 << 20
WORKER = Path(__file__).with_name("template_worker.py")
_PING = {"template": "ready", "values": {}}


class ChatTemplate:
    """A model's chat template, as Hugging Face tokenizers carry it (Jinja)."""

    def __init__(self, source: str, special_tokens: Mapping[str, str], *, name: str) -> None:
        """`name` is where the template is from, for errors."""
        if len(source) > MAX_TEMPLATE_CHARS:
            raise ConfigError(f"{name} has a chat template of {len(source):,} characters")
        self._name = name
        self._source = source
        self._special_tokens = dict(special_tokens)
        _renderer.begin()

    def render(self, messages: Sequence[Message], *, is_open: bool = True) -> str:
        """The conversation as the model sees it; with `is_open`, ready for a reply."""
        given = [{"role": message["role"], "content": message["content"]} for message in messages]
        values = {
            **self._special_tokens,
            "messages": given,
            "tools": None,
            "documents": None,
            "add_generation_prompt": is_open,
        }
        reply = _renderer.ask({"template": self._source, "values": values})
        if "text" in reply:
            return str(reply["text"])
        if "broken" in reply:
            reason = plain(str(reply["broken"]))
            raise ConfigError(f"{self._name} has a broken chat template: {reason}")
        reason = plain(str(reply.get("error")))
        raise ConfigError(f"{self._name} has a chat template that rejects these messages: {reason}")


class _Renderer:
    """The process that renders; it starts while the program goes on, and again after it was ended."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._is_ready = False
        self._inherited: list[Any] = []

    def begin(self) -> None:
        """Start the process without waiting for it."""
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self._start()

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """The process's reply to a request; a process that dies over it is replaced once."""
        body = json.dumps(request).encode()
        with self._lock:
            for _ in range(2):
                if self._process is None or self._process.poll() is not None:
                    self._start()
                if not self._is_ready:
                    try:
                        self._exchange(json.dumps(_PING).encode(), START_SECONDS)
                    except (OSError, EOFError):
                        self._end()
                        raise ConfigError(
                            "the process that renders chat templates does not start"
                        ) from None
                    self._is_ready = True
                try:
                    return self._exchange(body, SECONDS + len(body) / BYTES_PER_SECOND)
                except TimeoutError as error:
                    self._end()
                    return {"error": str(error)}
                except (OSError, EOFError):
                    self._end()
        return {"error": "it needs too much memory"}

    def _start(self) -> None:
        self._end()  # close the pipes of one that died
        # found, not imported: the program itself does not need them
        found = (importlib.util.find_spec(name) for name in ("jinja2", "markupsafe"))
        folders = {str(Path(spec.origin).parents[1]) for spec in found if spec and spec.origin}
        self._process = subprocess.Popen(
            [sys.executable, "-I", str(WORKER), *sorted(folders)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
        )
        self._is_ready = False

    def _exchange(self, body: bytes, seconds: float) -> dict[str, Any]:
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        deadline = time.monotonic() + seconds
        data = memoryview(len(body).to_bytes(8, "little") + body)
        while data:
            data = data[os.write(process.stdin.fileno(), data) :]
        size = int.from_bytes(_read(process.stdout.fileno(), 8, deadline, seconds), "little")
        reply: dict[str, Any] = json.loads(_read(process.stdout.fileno(), size, deadline, seconds))
        return reply

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()

    def close(self) -> None:
        """End the process."""
        with self._lock:
            self._end()

    def forget(self) -> None:
        """In a fork of the program, whose parent keeps the process."""
        self._inherited.append(self._process)
        self._process = None
        self._lock = threading.Lock()


def _read(descriptor: int, num_bytes: int, deadline: float, seconds: float) -> bytes:
    pieces = []
    while num_bytes:
        left = deadline - time.monotonic()
        if left <= 0 or not select.select([descriptor], [], [], left)[0]:
            raise TimeoutError(f"more than {seconds:.0f} seconds")
        piece = os.read(descriptor, min(num_bytes, 1 << 20))
        if not piece:
            raise EOFError
        pieces.append(piece)
        num_bytes -= len(piece)
    return b"".join(pieces)


_renderer = _Renderer()
atexit.register(_renderer.close)
os.register_at_fork(after_in_child=_renderer.forget)
