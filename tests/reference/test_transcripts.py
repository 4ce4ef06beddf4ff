"""What clients send to our servers and get back, byte for byte: a local model, the reading gateway, agents in training.

`python -m tests.reference.test_transcripts` writes the files anew. Ids and times are replaced by what stays the same.
"""

import asyncio
import json
import re
import tempfile
from collections.abc import AsyncGenerator, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from memagent.agent.reader import Reader
from memagent.config import GatewayConfig, ServeConfig
from memagent.engines.scripted import ScriptedEngine, keyword_reply
from memagent.errors import EngineError
from memagent.serve.agents import AgentCall, AgentReplies, AgentServer
from memagent.serve.app import make_app
from memagent.serve.guard import AdmissionGate
from memagent.serve.keys import KeyStore
from memagent.serve.reading.app import gateway_app
from memagent.serve.reading.state import GatewayState
from memagent.types import Completion, Message, Sampling, StreamedToken, Usage
from tests.support.gateways import QUESTION, SMALL, asking, novel

FOLDER = Path(__file__).with_name("transcripts")
HEADERS = (
    "cache-control",
    "connection",
    "content-disposition",
    "content-type",
    "retry-after",
    "www-authenticate",
    "x-content-type-options",
)
"""Headers that are compared; `x-request-id` must be there."""
VOLATILE = {
    r"\b(chatcmpl|cmpl|resp|rs|msg|file|reading)(-|_)[0-9a-f]{24,32}\b": r"\1\2ID",
    r'"(created|created_at)":\s?\d{6,}': r'"\1":TIME',
    r"(# HELP|# TYPE) .*\n": "",
}
CHAT, PLAIN, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
FILES, MODELS = "/v1/files", "/v1/models"
HELLO: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello?"}]
USAGE = {"include_usage": True}
GONE = f"file-{'0' * 24}"
Exchange = tuple[str, str, dict[str, Any]]
"""Method, path and further arguments of a request of httpx."""


def post(path: str, body: Any = None, **more: Any) -> Exchange:
    return "POST", path, {"json": body, **more} if body is not None else more


# --- the servers ----------------------------------------------------------------------------------


class WordEngine:
    """Stands for the engine of a local model: it says the words of the prompt, one token each."""

    public_name, model, tokenizer = "tiny", "models/tiny", "models/tiny"
    served_window, max_token_chars, policy_version = 64, 10, 7
    is_alive = True
    load = SimpleNamespace(num_running=1, num_waiting=2, num_slots=1000, num_used_slots=10)

    def __init__(self) -> None:
        self._words: list[str] = ["<s>"]
        self.vocabulary = self

    def text_ids(self, text: str) -> list[int]:
        new = [word for word in text.split() if word not in self._words]
        self._words += dict.fromkeys(new)
        return [self._words.index(word) for word in text.split()]

    def count(self, text: str) -> int:
        return len(text.split())

    def prompt_ids(self, messages: Sequence[Message]) -> list[int]:
        return [0, *self.text_ids(" ".join(message["content"] for message in messages))]

    def token_text(self, token_id: int) -> str:
        return "\N{REPLACEMENT CHARACTER}" if token_id == 0 else f"{self._words[token_id]} "

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        return self._completion(prompt_ids, sampling)

    def stream(
        self, prompt_ids: Sequence[int], sampling: Sampling
    ) -> AsyncGenerator[StreamedToken | Completion, None]:
        async def tokens() -> AsyncGenerator[StreamedToken | Completion, None]:
            done = self._completion(prompt_ids, sampling)
            for token_id, logprob in zip(
                done.completion_ids or (), done.logprobs or (), strict=True
            ):
                text = "" if token_id == 0 else self.token_text(token_id)
                yield StreamedToken(token_id=token_id, logprob=logprob, text=text)
            yield done

        return tokens()

    def _completion(self, prompt_ids: Sequence[int], sampling: Sampling) -> Completion:
        if "fail" in self._words and self._words.index("fail") in prompt_ids:
            raise EngineError("http://10.0.0.7:9/v1 does not answer")
        ids = tuple(prompt_ids)[: sampling.max_tokens]
        return Completion(
            text="".join(self.token_text(token_id) for token_id in ids if token_id),
            finish_reason="length" if len(ids) < len(prompt_ids) else "stop",
            completion_ids=ids,
            prompt_ids=tuple(prompt_ids),
            logprobs=tuple(-0.5 * number for number in range(len(ids))),
            usage=Usage(
                calls=1,
                prompt_tokens=len(prompt_ids),
                completion_tokens=len(ids),
                cached_tokens=len(prompt_ids) // 2,
            ),
        )


LOCAL: list[Exchange] = [
    post(CHAT, {"messages": HELLO}),
    post(CHAT, {"messages": HELLO, "n": 2, "logprobs": True, "return_token_ids": True}),
    post(CHAT, {"messages": HELLO, "stream": True, "stream_options": USAGE}),
    post(CHAT, {"messages": HELLO, "stream": True, "n": 2, "return_token_ids": True}),
    post(CHAT, {"messages": HELLO, "stream": True, "logprobs": True, "max_tokens": 2}),
    post(PLAIN, {"prompt": "One two three.", "max_tokens": 2, "logprobs": 0}),
    post(PLAIN, {"prompt": ["One two", "three"], "return_token_ids": True}),
    post(PLAIN, {"prompt": "One two three.", "stream": True, "logprobs": 0}),
    post(PLAIN, {"prompt": [[1, 2], [3]], "stream": True, "stream_options": USAGE, "n": 2}),
    post(CHAT, {"messages": HELLO, "tools": [{}]}),
    post(CHAT, {"messages": HELLO, "temperature": -1}),
    post(CHAT, {"messages": HELLO, "model": "gpt"}),
    post(CHAT, {"messages": HELLO, "max_tokens": 100}),
    post(CHAT, {"messages": [{"role": "user", "content": "word " * 2000}]}),
    post(CHAT, {"messages": [{"role": "user", "content": "fail"}]}),
    post(CHAT, {"messages": [{"role": "user", "content": "fail"}], "stream": True}),
    post(CHAT, content=b"{", headers={"Content-Type": "application/json"}),
    post(CHAT, content=b"{}", headers={"Content-Type": "text/plain"}),
    post(CHAT, {"messages": [], "x": "y" * 5000}),
    post(CHAT, {"messages": HELLO}, headers={"Origin": "https://evil.example"}),
    post(CHAT, {"messages": HELLO}, headers={"Authorization": "Bearer wrong"}),
    ("GET", CHAT, {}),
    ("GET", "/v1/nothing", {}),
    ("GET", MODELS, {}),
    ("GET", f"{MODELS}/tiny", {}),
    ("GET", f"{MODELS}/large", {}),
    ("GET", "/health", {}),
    ("GET", "/metrics", {}),
]


def local_model(folder: Path, stack: ExitStack) -> tuple[FastAPI, str, list[Exchange]]:
    config = ServeConfig.parse({"api_key": "right", "max_request_bytes": 12_000})
    engine: Any = WordEngine()
    return make_app(engine, config), "right", LOCAL


def long_input(fields: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"model": "memagent", "input": f"{novel(60)}\n\n{QUESTION}", **(fields or {})}


FORM = {"file": ("mill.txt", novel(50).encode(), "text/plain")}
CITED = "memagent:evidence=true,window=1024,chunk_tokens=200,ledger_tokens=64,quote_tokens=64"
ABOUT_FILE = [
    {"type": "input_file", "file_data": "VGhlIG1pbGwgaXMgb2xkLg==", "filename": "a/b.txt"},
    {"type": "text", "text": "How old is the mill?"},
]
GATEWAY: list[Exchange] = [
    post(CHAT, {"model": "memagent", "messages": HELLO}),
    post(CHAT, {"messages": HELLO, "stream": True, "stream_options": USAGE}),
    post(CHAT, {"messages": asking(novel(60))}),
    post(CHAT, {"messages": asking(novel(60))}),
    post(CHAT, {"messages": asking(novel(70)), "stream": True}),
    post(CHAT, {"messages": asking(novel(80)), "stream": True, "stream_options": USAGE}),
    post(CHAT, {"model": CITED, "messages": asking(novel(90)), "stream": True}),
    post(CHAT, {"model": CITED, "messages": asking(novel(90))}),
    post(CHAT, {"messages": asking(novel(60)), "reading": {"mode": "parallel"}, "stream": True}),
    post(CHAT, {"messages": [{"role": "user", "content": ABOUT_FILE}]}),
    post(RESPONSES, {"input": "Hello?", "instructions": "Be brief."}),
    post(RESPONSES, {"input": "Hello?", "stream": True, "temperature": 0.5}),
    post(RESPONSES, long_input()),
    post(RESPONSES, long_input({"stream": True, "model": CITED, "max_output_tokens": 20})),
    post(FILES, files=FORM, data={"purpose": "user_data"}),
    ("GET", FILES, {}),
    ("GET", f"{FILES}?limit=x", {}),
    ("GET", f"{FILES}/{GONE}", {}),
    ("GET", f"{FILES}/{GONE}/content", {}),
    ("DELETE", f"{FILES}/{GONE}", {}),
    post(FILES, data={"purpose": "x"}, files={"other": ("a.txt", b"a")}),
    post(FILES, files={"file": ("a.bin", b"\x00\x01\x02" * 100)}),
    post(CHAT, {"messages": HELLO, "model": "gpt"}),
    post(CHAT, {"messages": HELLO, "n": 2}),
    post(CHAT, {"messages": HELLO, "logprobs": True}),
    post(CHAT, {"messages": [], "stream": True}),
    post(CHAT, {"messages": HELLO, "reading": {"chunk_token": 5}}),
    post(CHAT, {"messages": [{"role": "user", "content": "word " * 3000}], "stream": True}),
    post(CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}),
    post(CHAT, {"messages": HELLO, "tools": [{"type": "function"}]}),
    post(CHAT, {"messages": [{"role": "user", "content": "fail"}]}),
    post(CHAT, {"messages": [{"role": "user", "content": "fail"}], "stream": True}),
    post(RESPONSES, {"input": "fail", "stream": True}),
    post(RESPONSES, {"input": "x", "previous_response_id": "resp_1"}),
    post(RESPONSES, {"input": "x", "text": {"format": {"type": "json_object"}}}),
    post(RESPONSES, {"input": [{"type": "function_call", "role": "user"}]}),
    post(CHAT, {"messages": HELLO}, headers={"Authorization": "Bearer wrong"}),
    post(CHAT, {"messages": HELLO}, headers={"Host": "evil.example"}),
    ("GET", MODELS, {}),
    ("GET", f"{MODELS}/memagent:seed=1", {}),
    ("GET", f"{MODELS}/gpt", {}),
    ("GET", "/health", {}),
    ("GET", "/metrics", {}),
]


def reply(messages: Sequence[Message], sampling: Sampling) -> str:
    if messages[-1]["content"] == "fail":
        raise EngineError("http://10.0.0.7:9/v1 does not answer")
    return keyword_reply(messages, sampling)


def gateway(folder: Path, stack: ExitStack) -> tuple[FastAPI, str, list[Exchange]]:
    key = KeyStore(folder / "keys.json").add("anna")
    state = stack.enter_context(GatewayState(folder))
    engine = ScriptedEngine(reply)
    config = GatewayConfig.parse({"state_dir": str(folder)})
    app = gateway_app(engine, Reader(engine, **SMALL), state, config, ServeConfig())
    return app, key, GATEWAY


AGENTS: list[Exchange] = [
    post(CHAT, {"messages": HELLO}),
    post(CHAT, {"messages": HELLO, "n": 2, "stream": True, "stream_options": USAGE}),
    post(CHAT, {"messages": HELLO, "stream": True, "max_completion_tokens": 3}),
    post(CHAT, {"messages": HELLO}, headers={"Authorization": "Bearer ended"}),
    post(CHAT, {"messages": HELLO}, headers={"x-memagent-rollout": "ended"}),
    post(CHAT, {"messages": HELLO, "tools": [{}]}),
    ("GET", MODELS, {}),
    ("GET", "/health", {}),
]


def agents(folder: Path, stack: ExitStack) -> tuple[FastAPI, str, list[Exchange]]:
    async def answer(call: AgentCall) -> AgentReplies:
        said = tuple((f"reply {number}", "length" if number else None) for number in range(call.n))
        return AgentReplies(model="policy", replies=said, prompt_tokens=5, completion_tokens=2)

    server = AgentServer()
    app = server.app(ServeConfig(), gate=AdmissionGate(8))
    return app, stack.enter_context(server.admitted(answer)), AGENTS


SERVERS = {"local": local_model, "gateway": gateway, "agents": agents}


# --- recording and comparing ----------------------------------------------------------------------


def transcript(name: str, folder: Path) -> str:
    """All exchanges with a server."""
    with ExitStack() as stack:
        app, key, exchanges = SERVERS[name](folder, stack)
        return asyncio.run(_transcript(app, key, exchanges))


async def _transcript(app: FastAPI, key: str, exchanges: Sequence[Exchange]) -> str:
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    written: list[str] = []
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        for method, path, more in exchanges:
            headers = {"Authorization": f"Bearer {key}", **more.get("headers", {})}
            response = await client.request(method, path, **{**more, "headers": headers})
            assert response.headers["x-request-id"].startswith("req_")
            kept = [
                f"{name}: {response.headers[name]}" for name in HEADERS if name in response.headers
            ]
            lines = [f"=== {method} {path} {_asked(more)}", str(response.status_code), *kept]
            written.append("\n".join([*lines, "", response.text]))
    text = "\n".join(written) + "\n"
    for pattern, replacement in VOLATILE.items():
        text = re.sub(pattern, replacement, text)
    return text


def _asked(more: dict[str, Any]) -> str:
    """The beginning of a request's body."""
    if "json" in more:
        return json.dumps(more["json"], separators=(",", ":"))[:200]
    return str(more.get("content", b"").decode())


@pytest.mark.parametrize("name", SERVERS)
def test_what_clients_get_stays_the_same_byte_for_byte(name: str, tmp_path: Path) -> None:
    expected = (FOLDER / f"{name}.txt").read_text(encoding="utf-8")
    assert transcript(name, tmp_path) == expected


if __name__ == "__main__":
    for server in SERVERS:
        with tempfile.TemporaryDirectory() as state:
            written = transcript(server, Path(state))
        (FOLDER / f"{server}.txt").write_text(written, encoding="utf-8")
