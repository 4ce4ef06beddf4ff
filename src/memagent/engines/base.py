"""Open an engine by name: `local:MODEL`, `openai:MODEL`, `vllm:MODEL` or `scripted`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any, Self

from memagent import blocking
from memagent.errors import ConfigError
from memagent.types import Completion, Message, Sampling

ENGINES: dict[str, str] = {
    "local": "memagent.engines.local.engine:open_local",
    "openai": "memagent.engines.openai:open_endpoint",
    "scripted": "memagent.engines.scripted:open_scripted",
    "vllm": "memagent.engines.vllm:open_vllm",
}
"""Kind to `module:function`; imported when used, because engines bring heavy libraries."""
NEEDS: dict[str, tuple[str, ...]] = {"local": ("torch", "transformers")}
"""Libraries of the extra of a kind, looked for before anything is fetched."""


class BaseEngine(ABC):
    """What our engines have in common: `with engine:` and `async with engine:` close them."""

    model: str
    tokenizer: str
    served_window: int | None = None
    """Tokens the model can see at once, where the engine knows."""
    reading_defaults: Mapping[str, Any] = MappingProxyType({})
    """Settings of reading that suit the model, by name; what the user sets counts more."""
    limits_itself: bool = False
    """True when the engine keeps to its own limit of calls at once, waits between attempts left out."""

    @abstractmethod
    async def complete(self, messages: Sequence[Message], sampling: Sampling) -> Completion:
        """One reply. Raises EngineError when the engine fails for good."""

    @abstractmethod
    async def aclose(self) -> None:
        """Free connections, processes and memory."""

    def close(self) -> None:
        """As `aclose`, for code that is not async."""
        blocking.run(self.aclose())

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.aclose()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def open_engine(spec: str, **settings: Any) -> BaseEngine:
    """An engine from `KIND:MODEL`; a plain model name means an OpenAI-compatible endpoint.

    open_engine("openai:qwen2.5-7b", base_url="http://localhost:8000/v1")
    open_engine("scripted")
    """
    kind, model = split_spec(spec)
    engine: BaseEngine = _opener(kind)(model, **settings)
    return engine


def check_engine(kind: str) -> None:
    """Raise ConfigError when what a kind of engine needs is not installed."""
    _opener(kind)


def _opener(kind: str) -> Callable[..., Any]:
    for library in NEEDS.get(kind, ()):
        if find_spec(library) is None:
            raise _lacks(kind, library)
    module, function = ENGINES[kind].split(":")
    try:
        opener: Callable[..., Any] = getattr(import_module(module), function)
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("memagent"):
            raise
        raise _lacks(kind, error.name) from None
    return opener


def _lacks(kind: str, library: str | None) -> ConfigError:
    return ConfigError(
        f'the {kind} engine needs {library}; install it with pip install "memagent[{kind}]", '
        "or name an endpoint with --base-url"
    )


def split_spec(spec: str) -> tuple[str, str]:
    """The kind and the model that an engine's name means."""
    kind, colon, model = spec.partition(":")
    if kind in ENGINES:
        return kind, model
    if colon and kind.isalpha() and "/" not in kind and kind.islower() and not model[:1].isdigit():
        raise ConfigError(f"unknown engine {kind!r}; known: {', '.join(ENGINES)}")
    return "openai", spec
