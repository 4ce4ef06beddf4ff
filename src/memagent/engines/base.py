"""Open an engine by name: `openai:MODEL`, `scripted`, later `local:MODEL` and `vllm:MODEL`."""

from __future__ import annotations

from importlib import import_module
from typing import Any

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
