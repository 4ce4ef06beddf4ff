"""Embeddings of texts, for retrieval: a model in this process, or an endpoint.

    embedder = open_embedder("all-minilm-l6-v2")                     # pulled when it is first used
    embedder = open_embedder("./my-embedder")                        # a folder of sentence-transformers
    embedder = open_embedder("openai:bge-m3", base_url="http://localhost:8000/v1")
    vectors = await embedder.embed(["a passage", "another one"])
    [question] = await embedder.embed(["a question"], is_query=True)

Vectors have length 1, so that a dot product is the cosine. What a folder of sentence-transformers has:

    FOLDER/
      config.json, tokenizer.json, model.safetensors     the encoder
      sentence_bert_config.json                          max_seq_length
      1_Pooling/config.json                              mean (the default) or the first token
      config_sentence_transformers.json                  prompts before questions and passages, if any

A text longer than the encoder reads at once is split, and the mean of its parts is its vector: nothing is
cut off. No code of the folder is run, and only safetensors are read.
"""

from __future__ import annotations

import asyncio
import json
import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from memagent.config import EngineConfig
from memagent.engines import store
from memagent.engines.addresses import addresses
from memagent.errors import ConfigError, MachineError
from memagent.foreign import check_tokenizer

if TYPE_CHECKING:
    import torch

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


TOKENS_PER_BATCH = 8192
"""Tokens of texts that are encoded together, padding included."""
DEFAULT_TOKENS = 512
"""Tokens that an encoder reads at once where nothing says how many."""
MAX_JSON_BYTES = 1_000_000


class LocalEmbedder(Embedder):
    """An encoder in this process, on the GPU where there is one."""

    def __init__(self, folder: Path, *, name: str) -> None:
        import torch
        from transformers import AutoModel, PreTrainedTokenizerFast

        from memagent.engines.local.loading import quietly

        self.name = name
        pooling = _read(folder / "1_Pooling" / "config.json")
        self._takes_first = _takes_first(pooling, folder)
        self._prompts = _prompts(folder)
        if (file := folder / "tokenizer.json").is_file():
            check_tokenizer(file)
        try:
            with quietly():
                self._tokenizer = PreTrainedTokenizerFast.from_pretrained(
                    folder, local_files_only=True
                )
                model: Any = AutoModel.from_pretrained(
                    folder,
                    local_files_only=True,
                    trust_remote_code=False,
                    use_safetensors=True,
                    dtype=torch.float32,
                )
        except Exception as error:  # a foreign file: whatever the libraries raise
            reason = " ".join(str(error).split())[:200]
            raise ConfigError(
                f"{folder} is no embedding model ({type(error).__name__}: {reason})"
            ) from None
        positions = int(getattr(model.config, "max_position_embeddings", DEFAULT_TOKENS))
        asked = _read(folder / "sentence_bert_config.json").get("max_seq_length")
        self._max_tokens = min(positions, asked) if isinstance(asked, int) else positions
        if self._max_tokens <= self._tokenizer.num_special_tokens_to_add():
            raise ConfigError(f"{folder}: a max_seq_length of {self._max_tokens} leaves no room")
        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        self._model = model.eval().to(self._device)
        self._lock = threading.Lock()

    async def embed(self, texts: Sequence[str], *, is_query: bool = False) -> list[Vector]:
        prompt = self._prompts["query" if is_query else "passage"]
        try:
            return await asyncio.to_thread(self._embed, [prompt + text for text in texts])
        except Exception as error:
            from memagent.engines.local.loading import is_out_of_memory

            if not is_out_of_memory(error):
                raise
        raise MachineError(
            f"the embedding model {self.name} ran out of memory; lower `cache_gb` of the model beside it"
        )

    async def aclose(self) -> None:
        """Nothing to free: the model goes with the object."""

    def _embed(self, texts: list[str]) -> list[Vector]:
        import torch

        if not texts:
            return []
        split = self._tokenizer(
            texts, truncation=True, max_length=self._max_tokens, return_overflowing_tokens=True
        )
        parts: list[list[int]] = split["input_ids"]
        owners: list[int] = split["overflow_to_sample_mapping"]
        sums = [torch.zeros(self._model.config.hidden_size) for _ in texts]
        with self._lock, torch.inference_mode():
            for batch in _batches(parts):
                vectors = self._encode([parts[number] for number in batch])
                for number, vector in zip(batch, vectors, strict=True):
                    sums[owners[number]] += vector * len(parts[number])
        return [torch.nn.functional.normalize(total, dim=0).tolist() for total in sums]

    def _encode(self, parts: list[list[int]]) -> torch.Tensor:
        """A vector for each part, a row each; rows are normalised."""
        import torch

        padded = self._tokenizer.pad({"input_ids": parts}, return_tensors="pt").to(self._device)
        states = self._model(**padded).last_hidden_state
        if self._takes_first:
            vectors = states[:, 0]
        else:
            mask = padded["attention_mask"].unsqueeze(-1).to(states.dtype)
            vectors = (states * mask).sum(1) / mask.sum(1).clamp(min=1)
        return torch.nn.functional.normalize(vectors, dim=1).cpu()


def _batches(parts: Sequence[list[int]]) -> list[list[int]]:
    """Numbers of parts of similar length, so that little is padding."""
    batches: list[list[int]] = []
    for number in sorted(range(len(parts)), key=lambda one: -len(parts[one])):
        longest = len(parts[batches[-1][0]]) if batches else 0
        if not batches or (len(batches[-1]) + 1) * longest > TOKENS_PER_BATCH:
            batches.append([])
        batches[-1].append(number)
    return batches


def _takes_first(pooling: dict[str, Any], folder: Path) -> bool:
    """Whether the first token's state is the vector; else it is the mean of all."""
    chosen = {name for name, value in pooling.items() if name.startswith("pooling_mode") and value}
    if not chosen or chosen == {"pooling_mode_mean_tokens"}:
        return False
    if chosen == {"pooling_mode_cls_token"}:
        return True
    raise ConfigError(
        f"{folder} pools by {', '.join(sorted(chosen))}; only the mean and the first token are known"
    )


def _prompts(folder: Path) -> dict[str, str]:
    found = _read(folder / "config_sentence_transformers.json").get("prompts")
    texts = found if isinstance(found, dict) else {}
    passage = texts.get("passage") or texts.get("document") or ""
    return {"query": str(texts.get("query") or ""), "passage": str(passage)}


def _read(path: Path) -> dict[str, Any]:
    """A JSON object; empty where the file is not there."""
    if not path.is_file():
        return {}
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise ValueError("it is too large")
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{path} cannot be read: it is no object")
    return found
