"""An OpenAI-compatible chat endpoint on 127.0.0.1 for tests and benchmarks: fast, faulty on demand.

It runs in its own process on plain asyncio, keeps connections alive, and writes one JSON line per
call to a log, so that a test can prove which calls were answered and which were repeated.

    client ---- POST .../chat/completions ----> parse -> refuse? -> fault? -> wait -> reply -> log
           ---- GET  .../models --------------> model list

From a shell (prints `{"port": N}` when ready):

    python -m tests.support.loopback --port 0 --log calls.jsonl --faults "500=0.05,reset=0.02"

From a test:

    with running(log=tmp_path / "calls.jsonl", reply="echo") as endpoint:
        ask(endpoint.base_url)
        endpoint.kill()      # the endpoint is down ...
        endpoint.restart()   # ... and back on the same port, with the same log
        answered = [call for call in endpoint.calls() if call["outcome"] == "ok"]
"""

import argparse
import asyncio
import hashlib
import json
import math
import os
import random
import re
import socket
import struct
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from http import HTTPStatus
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qs, urlsplit
from urllib.request import urlopen

REPO_ROOT = Path(__file__).resolve().parents[2]
NOTHING_FOUND = "Nothing found yet."
NAMED_FAULTS = ("reset", "stall", "malformed", "empty", "cut")
"""Any HTTP error status (400 to 599) is a fault as well."""
CHAT_PATH = "/chat/completions"
MODELS_PATH = "/models"
STATS_PATH = "/stats"
"""`{"calls": N, "call_seconds": X, "span_seconds": Y}`, for benchmarks without a log: chat calls so far,
the time they were under way, added up, and the time from the first call's start to the last one's end."""
PHRASES = {status.value: status.phrase for status in HTTPStatus}
RESET_ON_CLOSE = struct.pack("ii", 1, 0)
"""SO_LINGER on with zero seconds: closing sends RST instead of FIN."""

# --- replies: pure functions of the prompt --------------------------------------------------------


class Prompt(NamedTuple):
    """What a reply may depend on."""

    text: str
    """All messages' texts, one after the other."""
    last_user: str
    max_tokens: int | None


class Reply(NamedTuple):
    text: str
    finish_reason: str = "stop"


def message_text(message: dict[str, Any]) -> str:
    """The text of a message whose content is a string or a list of text parts."""
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    return "".join(part.get("text", "") for part in content)


def read_prompt(request: dict[str, Any]) -> Prompt:
    messages = request["messages"]
    texts = [message_text(message) for message in messages]
    users = [text for text, m in zip(texts, messages, strict=True) if m.get("role") == "user"]
    max_tokens = request.get("max_completion_tokens") or request.get("max_tokens")
    return Prompt(
        text=texts[0] if len(texts) == 1 else "\n".join(texts),
        last_user=users[-1] if users else "",
        max_tokens=max_tokens,
    )


def block(prompt: str, tag: str) -> str | None:
    """The text between `<tag ...>` and `</tag>`, None where there is no such block.

    The last closing tag and the last opening tag before it count, so that instructions may name
    the tags.
    """
    end = prompt.rfind(f"</{tag}>")
    if end < 0:
        return None
    start = max(prompt.rfind(f"<{tag}>", 0, end), prompt.rfind(f"<{tag} ", 0, end))
    if start < 0:
        return None
    return prompt[prompt.index(">", start) + 1 : end].strip()


def sentences_with(key: str, section: str) -> list[str]:
    if key not in section:
        return []
    sentences = re.split(r"(?<=[.!?])\s+|\n\s*\n", section)
    return [" ".join(sentence.split()) for sentence in sentences if key in sentence]


def keyword_notes(key: str, section: str, memory: str) -> str:
    """The memory's lines, then the section's sentences with the key that are not yet among them."""
    lines = [line for line in memory.splitlines() if line.strip() != NOTHING_FOUND]
    found = [sentence for sentence in sentences_with(key, section) if sentence not in lines]
    if not found and not any(key in line for line in lines):
        return NOTHING_FOUND
    return "\n".join(lines + found)


def keyword_answer(key: str, memory: str) -> str:
    """What follows " is " in the first line of the memory that has the key."""
    for line in memory.splitlines():
        after_key = line.partition(key)[2]
        value = after_key.partition(" is ")[2].strip().removesuffix(".")
        if value:
            return rf"\boxed{{{value}}}"
    return r"\boxed{unknown}"


def note_texts(prompt: str) -> str:
    """The notes of a prompt that merges them."""
    return "\n\n".join(re.findall(r'<note sections="[^"]*">\n(.*?)\n</note>', prompt, re.DOTALL))


def keyword_reply(prompt: Prompt) -> Reply:
    """Read by rule: keep sentences that contain the text the question has in double quotes."""
    question = block(prompt.last_user, "question") or ""
    section = block(prompt.last_user, "section")
    memory = block(prompt.last_user, "memory") or ""
    quoted = re.search(r'"([^"]+)"', question)
    if quoted is None:
        return Reply(r"\boxed{unknown}" if section is None else NOTHING_FOUND)
    if section is None and "<note " in prompt.last_user:
        merged = [*memory.splitlines(), *sentences_with(quoted[1], note_texts(prompt.last_user))]
        lines = dict.fromkeys(line for line in merged if quoted[1] in line)
        return Reply("\n".join([*lines, "Missing: nothing"]))
    if section is None:
        return Reply(keyword_answer(quoted[1], memory))
    notes = keyword_notes(quoted[1], section, memory)
    if notes == NOTHING_FOUND and "this word only: Nothing." in prompt.last_user:
        notes = "Nothing."
    if prompt.max_tokens is not None and len(notes) > prompt.max_tokens * 3:
        return Reply(notes[: prompt.max_tokens * 3], "length")
    return Reply(notes)


def echo_reply(prompt: Prompt) -> Reply:
    """A digest of the whole prompt: any change in a chain of memories changes all that follows."""
    data = prompt.text.encode()
    digest = "".join(hashlib.sha256(b"%d:" % part + data).hexdigest() for part in range(3))
    return Reply(" ".join(digest[at : at + 8] for at in range(0, len(digest), 8)))


def fixed_reply(num_chars: int) -> Callable[[Prompt], Reply]:
    filler = "Nothing in this section changes what the memory says. "
    reply = Reply((filler * (num_chars // len(filler) + 1))[:num_chars])
    return lambda prompt: reply


def make_reply(kind: str, *, reply_chars: int) -> Callable[[Prompt], Reply]:
    replies = {"keyword": keyword_reply, "echo": echo_reply, "fixed": fixed_reply(reply_chars)}
    return replies[kind]


# --- faults ---------------------------------------------------------------------------------------


def parse_faults(spec: str) -> dict[str, float]:
    """`"500=0.05,reset=0.02"` as probabilities by name; refuses unknown names and sums above 1."""
    faults = {}
    for item in filter(None, spec.split(",")):
        name, _, probability = item.strip().partition("=")
        if name not in NAMED_FAULTS and not re.fullmatch("[45][0-9][0-9]", name):
            raise SystemExit(f"unknown fault {name!r}: a 4xx/5xx status or {NAMED_FAULTS}")
        faults[name] = float(probability)
    if sum(faults.values()) > 1 + 1e-9:
        raise SystemExit(f"fault probabilities add up to more than 1: {spec}")
    return faults


def draw_fault(faults: dict[str, float], *, seed: int, n: int) -> str | None:
    """The fault of call number `n`: a function of seed and number, so a restart does not rewind."""
    if not faults:
        return None
    point = random.Random(f"{seed}:{n}").random()
    for name, probability in faults.items():
        point -= probability
        if point < 0:
            return name
    return None


# --- bodies on the wire ---------------------------------------------------------------------------


class Refusal(NamedTuple):
    """A call that is wrong in itself, with OpenAI's error fields."""

    status: int
    message: str
    type: str = "invalid_request_error"
    param: str | None = None
    code: str | None = None


def error_body(refusal: Refusal) -> bytes:
    error = {name: getattr(refusal, name) for name in ("message", "type", "param", "code")}
    return json.dumps({"error": error}).encode()


def completion_body(reply: Reply, *, n: int, model: str, prompt_chars: int) -> bytes:
    prompt_tokens, completion_tokens = prompt_chars // 4, len(reply.text) // 4
    message = {"role": "assistant", "content": reply.text, "refusal": None}
    choice = {
        "index": 0,
        "message": message,
        "logprobs": None,
        "finish_reason": reply.finish_reason,
    }
    usage = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    body = {
        "id": f"chatcmpl-{n}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": model,
        "choices": [choice],
        "usage": usage,
    }
    return json.dumps(body).encode()


def response_bytes(status: int, body: bytes, *, headers: str = "") -> bytes:
    head = (
        f"HTTP/1.1 {status} {PHRASES.get(status, 'Error')}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n{headers}\r\n"
    )
    return head.encode() + body


def messages_sha(messages: Any) -> str:
    """Short hash of a request's messages, as the log has it."""
    return hashlib.sha256(json.dumps(messages, sort_keys=True).encode()).hexdigest()[:16]


class Request(NamedTuple):
    method: str
    target: str
    headers: dict[str, str]
    """Names in lower case."""
    body: bytes

    @property
    def path(self) -> str:
        return urlsplit(self.target).path

    @property
    def auth_header(self) -> str | None:
        return next((name for name in ("authorization", "api-key") if name in self.headers), None)


async def read_request(reader: asyncio.StreamReader) -> Request:
    """The next request: HTTP/1.1 with a Content-Length."""
    head = await reader.readuntil(b"\r\n\r\n")
    request_line, *lines = head.decode("latin-1").rstrip("\r\n").split("\r\n")
    method, target, _ = request_line.split(" ", 2)
    pairs = (line.partition(":") for line in lines)
    headers = {name.lower(): value.strip() for name, _, value in pairs}
    body = await reader.readexactly(int(headers.get("content-length", 0)))
    return Request(method, target, headers, body)


# --- the server -----------------------------------------------------------------------------------


class CallLog:
    """Appends JSON lines, unbuffered: what was logged survives SIGKILL."""

    def __init__(self, path: Path | None) -> None:
        self.num_calls = 0
        self.file: int | None = None
        if path is not None:
            self.num_calls = max((call["n"] or 0 for call in read_log(path)), default=0)
            self.file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def next_number(self) -> int:
        self.num_calls += 1
        return self.num_calls

    def write(self, record: dict[str, Any], outcome: str) -> None:
        if self.file is not None:
            line = json.dumps({"t": time.time(), **record, "outcome": outcome})
            os.write(self.file, line.encode() + b"\n")


def read_log(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines()]


class Server:
    """What all connections share."""

    def __init__(self, settings: argparse.Namespace) -> None:
        self.settings = settings
        self.reply = make_reply(settings.reply, reply_chars=settings.reply_chars)
        self.log = CallLog(settings.log)
        self.places = asyncio.Semaphore(settings.max_concurrency or sys.maxsize)
        self.num_open = 0
        """Calls being answered, and those that wait for a place."""
        self.num_active = 0
        self.call_seconds = 0.0
        self.first_at: float | None = None
        self.changed_at = 0.0

    @asynccontextmanager
    async def place(self) -> AsyncIterator[None]:
        """One of the places of calls that are answered at the same time."""
        self.num_open += 1
        try:
            async with self.places:
                self.count_time(started=1)
                try:
                    yield
                finally:
                    self.count_time(started=-1)
        finally:
            self.num_open -= 1

    def count_time(self, *, started: int) -> None:
        """Add the time since the last change for each call under way, of which there is now one more or less."""
        now = time.monotonic()
        if self.first_at is None:
            self.first_at = self.changed_at = now
        self.call_seconds += self.num_active * (now - self.changed_at)
        self.changed_at = now
        self.num_active += started

    def stats_body(self) -> bytes:
        span = 0.0 if self.first_at is None else self.changed_at - self.first_at
        stats = {
            "calls": self.log.num_calls,
            "call_seconds": self.call_seconds,
            "span_seconds": span,
        }
        return json.dumps(stats).encode()

    def check_key(self, request: Request) -> Refusal | None:
        if self.settings.api_key is None:
            return None
        given = request.headers.get("authorization", "").removeprefix("Bearer ")
        if request.path.startswith("/openai/"):
            given = request.headers.get("api-key", given)
        if given == self.settings.api_key:
            return None
        return Refusal(401, "Incorrect API key provided.", code="invalid_api_key")

    def check_model(self, request: Request, asked: dict[str, Any]) -> Refusal | None:
        name = asked.get("model")
        deployment = re.match("/openai/deployments/([^/]+)/", request.path)
        if deployment is not None:
            name = deployment[1]
            if "api-version" not in parse_qs(urlsplit(request.target).query):
                return Refusal(404, "Resource not found", code="404")
        if name == self.settings.model:
            return None
        message = f"The model `{name}` does not exist or you do not have access to it."
        return Refusal(404, message, code="model_not_found")

    def check_length(self, prompt: Prompt) -> Refusal | None:
        window = self.settings.context_window
        if window is None:
            return None
        num_tokens = math.ceil(len(prompt.text.split()) * 1.3)
        if num_tokens <= window:
            return None
        message = (
            f"This model's maximum context length is {window} tokens. However, your messages "
            f"resulted in {num_tokens} tokens. Please reduce the length of the messages."
        )
        return Refusal(400, message, param="messages", code="context_length_exceeded")

    def models_body(self) -> bytes:
        model: dict[str, Any] = {"id": self.settings.model, "object": "model", "created": 0}
        model["owned_by"] = "loopback"
        if self.settings.root is not None:
            model["root"] = self.settings.root
        if self.settings.max_model_len is not None:
            model["max_model_len"] = self.settings.max_model_len
        return json.dumps({"object": "list", "data": [model]}).encode()


class Connection(asyncio.StreamReaderProtocol):
    """One client, whose requests are answered one after the other."""

    def __init__(self, server: Server) -> None:
        super().__init__(asyncio.StreamReader(), self.accept)
        self.server = server
        self.settings = server.settings

    def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        writer.transport.set_write_buffer_limits(high=0)  # drained means: all is with the kernel
        self.conversation = asyncio.create_task(self.converse())

    def eof_received(self) -> bool:
        super().eof_received()
        return False  # whoever sends no more is gone

    def connection_lost(self, exc: Exception | None) -> None:
        self.conversation.cancel()
        super().connection_lost(exc)

    async def converse(self) -> None:
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            while not self.writer.is_closing():
                request = await read_request(self.reader)
                if request.method == "POST" and request.path.endswith(CHAT_PATH):
                    await self.answer_call(request)
                else:
                    await self.answer_other(request)
                if request.headers.get("connection", "").lower() == "close":
                    self.writer.close()

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def refuse(self, record: dict[str, Any], refusal: Refusal, *, headers: str = "") -> None:
        self.server.log.write(record, str(refusal.status))
        await self.send(response_bytes(refusal.status, error_body(refusal), headers=headers))

    async def answer_other(self, request: Request) -> None:
        record = {
            "n": None,
            "sha": None,
            "prompt_chars": 0,
            "path": request.target,
            "auth": request.auth_header,
        }
        refusal = self.server.check_key(request)
        if request.path == STATS_PATH:
            await self.send(response_bytes(200, self.server.stats_body()))
        elif request.method != "GET" or not request.path.endswith(MODELS_PATH):
            message = f"Invalid URL ({request.method} {request.path})"
            await self.refuse(record, Refusal(404, message))
        elif refusal is not None:
            await self.refuse(record, refusal)
        else:
            await self.send(response_bytes(200, self.server.models_body()))
            self.server.log.write(record, "ok")

    async def answer_call(self, request: Request) -> None:
        server = self.server
        n = server.log.next_number()
        asked, prompt, refusal = self.parse_call(request)
        record = {
            "n": n,
            "sha": messages_sha(asked.get("messages")) if server.log.file is not None else None,
            "prompt_chars": len(prompt.text),
            "path": request.target,
            "auth": request.auth_header,
            "inflight": server.num_open + 1,
        }
        if refusal is not None:
            await self.refuse(record, refusal)
            return
        fault = draw_fault(self.settings.faults, seed=self.settings.seed, n=n)
        if fault is not None:
            await self.fail(fault, n, prompt, record)
            return
        try:
            async with server.place():
                if self.settings.latency_ms:
                    await asyncio.sleep(self.settings.latency_ms / 1000)
                body = self.body(server.reply(prompt), n, prompt)
                await self.send(response_bytes(200, body))
                server.log.write(record, "ok")
        except (asyncio.CancelledError, ConnectionError):
            server.log.write(record, "client_left")
            raise

    def parse_call(self, request: Request) -> tuple[dict[str, Any], Prompt, Refusal | None]:
        refusal = self.server.check_key(request)
        try:
            asked = json.loads(request.body)
            prompt = read_prompt(asked)
        except (ValueError, KeyError, TypeError, AttributeError):
            wrong = Refusal(400, "We could not parse the JSON body of your request.")
            return {}, Prompt("", "", None), refusal or wrong
        refusal = refusal or self.server.check_model(request, asked)
        return asked, prompt, refusal or self.server.check_length(prompt)

    def body(self, reply: Reply, n: int, prompt: Prompt) -> bytes:
        return completion_body(reply, n=n, model=self.settings.model, prompt_chars=len(prompt.text))

    async def fail(self, fault: str, n: int, prompt: Prompt, record: dict[str, Any]) -> None:
        """Faults are logged on arrival."""
        if fault == "429":
            refusal = Refusal(429, "Rate limit reached.", "requests", code="rate_limit_exceeded")
            wait = f"Retry-After: {self.settings.retry_after:g}\r\n"
            await self.refuse(record, refusal, headers=wait)
            return
        if fault.isdigit():
            await self.refuse(
                record, Refusal(int(fault), "The server had an error.", "server_error")
            )
            return
        self.server.log.write(record, fault)
        if fault == "reset":
            sock = self.writer.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
            self.writer.transport.abort()
        elif fault == "stall":
            await asyncio.sleep(self.settings.stall_seconds)
            self.writer.close()
        elif fault == "cut":
            whole = response_bytes(200, self.body(Reply("This reply is cut off."), n, prompt))
            self.writer.write(whole[:-60])
            self.writer.close()
        elif fault == "malformed":
            broken = self.body(Reply("This reply is never closed"), n, prompt)[:-40]
            await self.send(response_bytes(200, broken))
        else:
            await self.send(response_bytes(200, self.body(Reply(""), n, prompt)))


async def serve(settings: argparse.Namespace) -> None:
    server = Server(settings)
    listener = await asyncio.get_running_loop().create_server(
        lambda: Connection(server), "127.0.0.1", settings.port, reuse_address=True, backlog=1024
    )
    sys.stdout.write(json.dumps({"port": listener.sockets[0].getsockname()[1]}) + "\n")
    sys.stdout.flush()
    await listener.serve_forever()


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.support.loopback", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("--port", type=int, default=0, help="0: any free port")
    add("--log", type=Path, help="file to append one JSON line per call to")
    add("--reply", choices=("keyword", "echo", "fixed"), default="keyword")
    add("--reply-chars", type=int, default=400, help="length of the fixed reply")
    add("--faults", type=parse_faults, default={}, help='such as "500=0.05,429=0.03,stall=0.01"')
    add("--seed", type=int, default=0)
    add("--retry-after", type=float, default=0.2, help="seconds, sent with 429")
    add("--stall-seconds", type=float, default=60.0)
    add("--latency-ms", type=float, default=0.0)
    add("--max-concurrency", type=int, help="answer so many calls at once, let others wait")
    add("--model", default="test-model")
    add("--root", help="listed for the model, as vLLM does")
    add("--max-model-len", type=int, help="listed for the model, as vLLM does")
    add("--api-key", help="refuse other keys with 401")
    add("--context-window", type=int, help="refuse prompts of more words * 1.3 with 400")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    with suppress(KeyboardInterrupt):
        asyncio.run(serve(parse_arguments(argv)))


# --- for tests: the server in its own process -----------------------------------------------------


class Endpoint:
    """A loopback server process; `running` makes one and ends it."""

    def __init__(self, log: Path | None, arguments: list[str]) -> None:
        self.log = log
        self.arguments = arguments
        self.port = 0
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    @property
    def root_url(self) -> str:
        """Without `/v1`: where Azure-shaped clients put their own path."""
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start the process, on the same port as before if there was one, and wait until it listens."""
        command = [sys.executable, "-m", "tests.support.loopback", *self.arguments]
        command += ["--port", str(self.port)]
        self.process = subprocess.Popen(command, cwd=REPO_ROOT, stdout=subprocess.PIPE)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"the loopback endpoint did not start: {' '.join(command)}")
        self.port = json.loads(line)["port"]

    def kill(self) -> None:
        """End the process at once (SIGKILL): connections break, new ones are refused."""
        if self.process is None:
            return
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()
        self.process = None

    def restart(self) -> None:
        self.kill()
        self.start()

    def num_calls(self) -> int:
        """Chat calls the server has seen; works without a log."""
        return int(self.stats()["calls"])

    def stats(self) -> dict[str, float]:
        """How many calls there were, and how long; see STATS_PATH."""
        with urlopen(self.root_url + STATS_PATH) as response:
            stats: dict[str, float] = json.load(response)
            return stats

    def records(self) -> list[dict[str, Any]]:
        """The whole log, model listings included."""
        assert self.log is not None, "started without a log"
        with suppress(OSError):  # a round trip, after which the last reply's line is in the log
            self.num_calls()
        return read_log(self.log)

    def calls(self) -> list[dict[str, Any]]:
        """The chat calls in the log, in the order of their outcome."""
        return [record for record in self.records() if record["n"] is not None]


@contextmanager
def running(log: Path | str | None = None, **options: object) -> Iterator[Endpoint]:
    """A loopback endpoint in its own process; options are the flags, such as `latency_ms=5`."""
    log = None if log is None else Path(log).resolve()
    arguments = []
    for name, value in {"log": log, **options}.items():
        if value is not None:
            arguments += [f"--{name.replace('_', '-')}", str(value)]
    endpoint = Endpoint(log, arguments)
    try:
        endpoint.start()
        yield endpoint
    finally:
        endpoint.kill()


if __name__ == "__main__":
    main()
