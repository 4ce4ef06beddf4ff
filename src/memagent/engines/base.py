"""Open an engine by name: `openai:MODEL`, `scripted`, later `local:MODEL` and `vllm:MODEL`."""

from __future__ import annotations

from importlib import import_module
from types import TracebackType
from typing import Any, Self

from memagent import blocking
from memagent.errors import ConfigError
from memagent.types import Engine

ENGINES: dict[str, str] = {
    "openai": "memagent.engines.openai:open_endpoint",
    "scripted": "memagent.engines.scripted:open_scripted",
}
"""Kind to `module:function`; imported when used, because engines bring heavy libraries."""


def open_engine(spec: str, **settings: Any) -> Engine:
    """An engine from `KIND:MODEL`; a plain model name means an OpenAI-compatible endpoint.

    open_engine("openai:qwen2.5-7b", base_url="http://localhost:8000/v1")
    open_engine("scripted")
    """
    kind, model = split_spec(spec)
    module, function = ENGINES[kind].split(":")
    engine: Engine = getattr(import_module(module), function)(model, **settings)
    return engine


def split_spec(spec: str) -> tuple[str, str]:
    """The kind and the model that an engine's name means."""
    kind, colon, model = spec.partition(":")
    if kind in ENGINES:
        return kind, model
    if colon and kind.isalpha() and "/" not in kind and kind.islower() and not model[:1].isdigit():
        raise ConfigError(f"unknown engine {kind!r}; known: {', '.join(ENGINES)}")
    return "openai", spec


class ClosingEngine:
    """What engines have in common: `async with engine:` and `with engine:` close them at the end."""

    async def aclose(self) -> None:
        """Free connections, processes and memory."""

    def close(self) -> None:
        """As `aclose`, for code that is not async."""
        blocking.run(self.aclose())

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
