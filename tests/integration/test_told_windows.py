"""Windows that servers tell beside OpenAI's API, by stand-ins that behave as these do and by llama.cpp itself."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from memagent.cli.main import run
from memagent.engines.balance import BalancedEngine
from memagent.engines.base import BaseEngine, open_engine
from memagent.errors import PromptTooLong
from memagent.types import Sampling
from tests.conftest import prose
from tests.support.chat_servers import ChatServer, Json, chat_server, said
from tests.support.tiny_gguf import write_gguf
from tests.support.tiny_models import make_tiny_model


def reply(request: Json) -> Json:
    return said("A reply.")


class Ollama:
    """Ollama with one model: a load without options, or a call of /v1, takes the window of the server."""

    def __init__(self, own: int, loaded: int | None = None, *, tells: bool = True) -> None:
        self.own, self.loaded, self.tells = own, loaded, tells

    def pages(self) -> dict[str, Any]:
        return {"/api/ps": self.running, "/api/generate": self.load}

    def running(self, server: ChatServer) -> Json:
        window = {"context_length": self.loaded} if self.tells else {}
        entry = {"name": "qwen:latest", "model": "qwen:latest", **window}
        return {
            "models": [
                {"name": "other:7b", "context_length": 64},
                *([entry] if self.loaded else []),
            ]
        }

    def load(self, server: ChatServer) -> Json:
        self.loaded = self.own
        return {"model": "qwen", "response": "", "done": True, "done_reason": "load"}


def lm_studio(**fields: Any) -> Json:
    return {"data": [{"id": "other", "loaded_context_length": 99}, {"id": "qwen", **fields}]}


PAGES: dict[str, tuple[dict[str, Any], int | None]] = {
    "llama.cpp": ({"/props": {"default_generation_settings": {"n_ctx": 4096}}}, 4096),
    "lm studio": ({"/api/v0/models": lm_studio(loaded_context_length=4096)}, 4096),
    "lm studio, not loaded": ({"/api/v0/models": lm_studio(max_context_length=32768)}, None),
    "ollama, not loaded": (Ollama(4096).pages(), 4096),
    "ollama, loaded larger by another program": (Ollama(4096, 32768).pages(), 4096),
    "ollama, an early version": (Ollama(4096, tells=False).pages(), None),
    "no such pages": ({}, None),
    "nonsense": (
        {
            "/props": {"default_generation_settings": [{"n_ctx": 4096}]},
            "/api/ps": {"models": {"context_length": 4096}},
            "/api/v0/models": {"data": [7, {"id": "qwen", "loaded_context_length": "many"}]},
        },
        None,
    ),
    "zero": ({"/props": {"default_generation_settings": {"n_ctx": 0}}}, None),
}


def opened(*servers: ChatServer) -> BaseEngine:
    return open_engine("openai:", base_url=",".join(server.base_url for server in servers))


@pytest.mark.parametrize(("pages", "window"), PAGES.values(), ids=PAGES)
def test_the_window_that_a_server_tells_is_known(pages: dict[str, Any], window: int | None) -> None:
    with chat_server(reply, pages, model="qwen") as server, opened(server) as engine:
        assert engine.served_window == window


def test_the_list_of_models_counts_first() -> None:
    models = {"/v1/models": {"data": [{"id": "qwen", "max_model_len": 2048}]}}
    with chat_server(reply, {**Ollama(4096).pages(), **models}) as server, opened(server) as engine:
        assert engine.served_window == 2048
        assert server.others == ["GET /v1/models"]


def test_of_several_servers_the_smallest_window_counts() -> None:
    with (
        chat_server(reply, Ollama(8192).pages(), model="qwen") as one,
        chat_server(reply, PAGES["llama.cpp"][0], model="qwen") as other,
        opened(one, other) as engine,
    ):
        assert isinstance(engine, BalancedEngine)
        assert engine.served_window == 4096


def test_a_window_that_is_too_small_is_refused_before_any_call(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text.txt"
    text.write_text(prose(500))
    with chat_server(reply, Ollama(4096).pages(), model="qwen") as server:
        asked = ["ask", str(text), "-q", "Who?", "--base-url", server.base_url]
        assert run(asked) == 2
        assert server.chats == []
        shown = capsys.readouterr().err
        assert "give --window 4096" in shown
        assert "OLLAMA_CONTEXT_LENGTH=8192" in shown
        assert run([*asked, "--window=4096"]) == 0
        assert len(server.chats) > 2


# --- llama.cpp's own server -------------------------------------------------------------------------


@pytest.fixture
def llama_cpp(tmp_path: Path) -> Iterator[str]:
    """The address of llama.cpp's server, with a window of 1,024 tokens."""
    xllamacpp = pytest.importorskip("xllamacpp", reason="xllamacpp is not installed")
    folder = make_tiny_model(tmp_path / "llama", "llama", max_position_embeddings=4096)
    params = xllamacpp.CommonParams()
    params.model.path = str(write_gguf(folder, tmp_path / "tiny.gguf"))
    params.n_ctx, params.n_parallel, params.n_gpu_layers, params.port = 1024, 1, 0, 0
    server = xllamacpp.Server(params)
    yield f"{server.listening_address}/v1"
    del server


async def test_the_window_of_llama_cpp_is_known_and_what_is_longer_is_refused(
    llama_cpp: str,
) -> None:
    with open_engine("openai:", base_url=llama_cpp) as engine:
        assert engine.served_window == 1024
        completion = await engine.complete(
            [{"role": "user", "content": "Say yes."}], Sampling(max_tokens=4)
        )
        assert completion.usage is not None
        with pytest.raises(PromptTooLong):
            await engine.complete([{"role": "user", "content": prose(300)}], Sampling(max_tokens=4))
