"""Embeddings of texts, for retrieval: a model in this process, or an endpoint.

    embedder = open_embedder("all-minilm-l6-v2")                     # pulled when it is first used
    embedder = open_embedder("./my-embedder")                        # a folder of sentence-transformers
    embedder = open_embedder("openai:bge-m3", base_url="http://localhost:8000/v1")
    vectors = await embedder.embed(["a passage", "another one"])
    [question] = await embedder.embed(["a question"], is_query=True)

Vectors have length 1, so that a dot product is the cosine.
"""

from __future__ import annotations

import asyncio
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from memagent.config import EngineConfig
from memagent.engines import store
from memagent.engines.addresses import addresses
from memagent.errors import ConfigError

DEFAULT_EMBEDDER = "all-minilm-l6-v2"
ENDPOINT = "openai:"
TEXTS_PER_CALL = 64
"""Texts in one request to an endpoint."""

Vector = list[float]


class Embedder(ABC):
    """Turns texts into vectors of length 1."""

    name: str

    @abstractmethod
    async def embed(self, texts: Sequence[str], *, is_query: bool = False) -> list[Vector]:
        """A vector for each text; `is_query` is for models that encode questions in another way."""

    @abstractmethod
    async def aclose(self) -> None:
        """Free connections and memory."""


def open_embedder(
    spec: str = DEFAULT_EMBEDDER,
    *,
    base_url: str | None = None,
    settings: EngineConfig | None = None,
) -> Embedder:
    """An embedder by name.

    `openai:MODEL` is a model behind an endpoint: at `base_url`, else that of `settings`, else in the
    environment. Other names are of models in this process: a short name, which is pulled when it is first
    used, a folder, or a hub id that was pulled.
    """
    if spec.startswith(ENDPOINT):
        model = spec.removeprefix(ENDPOINT)
        if not model:
            raise ConfigError("name the model of the embeddings: `embedder=openai:MODEL`")
        given: dict[str, Any] = {}
        if len(addresses(base_url)) > 1:
            raise ConfigError("`embedder_url` is one address")
        if settings is not None and base_url in (None, settings.base_url):
            given = settings.model_dump(exclude={"model", "extra_body"})
            base_url = next(iter(addresses(settings.base_url)), None)
        from memagent.engines.openai import open_endpoint_at  # brings the HTTP client

        return EndpointEmbedder(open_endpoint_at(model, **{**given, "base_url": base_url}))
    if base_url is not None:
        raise ConfigError(
            f"{spec} runs in this process; an endpoint's model is openai:MODEL, or leave `embedder_url` out"
        )
    for library in ("torch", "transformers"):
        if find_spec(library) is None:
            raise ConfigError(
                f'the embedder {spec} needs {library}; install it with pip install "memagent[gpu]", or '
                "name a model behind an endpoint, `embedder=openai:MODEL`"
            )
    if spec in store.KNOWN:
        path = store.pull(spec)
    elif (found := store.find(spec)) is None:
        raise ConfigError(
            f"there is no embedder {spec!r} on this machine; name a folder, {DEFAULT_EMBEDDER}, or "
            "openai:MODEL for an endpoint"
        )
    else:
        path = found
    from memagent.engines.local.embedding import LocalEmbedder  # brings torch

    return LocalEmbedder(Path(path), name=spec)


def unit(vector: Sequence[float]) -> Vector:
    """A vector of length 1 in the same direction; zeros stay as they are."""
    length = math.sqrt(math.fsum(value * value for value in vector))
    return [value / length for value in vector] if length else list(vector)


class EndpointEmbedder(Embedder):
    """A model behind an endpoint that serves `/embeddings`."""

    def __init__(self, engine: Any) -> None:
        """`engine` is an EndpointEngine, which limits and retries the requests."""
        self.name = str(engine.model)
        self._engine = engine

    async def embed(self, texts: Sequence[str], *, is_query: bool = False) -> list[Vector]:
        starts = range(0, len(texts), TEXTS_PER_CALL)
        calls = [
            asyncio.ensure_future(self._engine.embed(texts[start : start + TEXTS_PER_CALL]))
            for start in starts
        ]
        try:
            parts = await asyncio.gather(*calls)
        finally:
            for call in calls:
                call.cancel()
        return [unit(vector) for part in parts for vector in part]

    async def aclose(self) -> None:
        await self._engine.aclose()
