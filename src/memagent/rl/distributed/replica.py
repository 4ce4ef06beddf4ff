"""One engine replica: an engine in a process of its own on a node of the cluster.

    ReplicaActor(EmbeddedReplica(...))     the model in the actor's process, on its GPU or CPU

An opener is sent to the node and called there. What it returns has an engine, takes new weights, and frees its
memory while it sleeps, for ranks that share the GPU. Errors travel as values: Ray would wrap them.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from memagent.config import LocalConfig
from memagent.engines.base import BaseEngine
from memagent.engines.local.engine import LocalEngine
from memagent.errors import EngineError
from memagent.rl.distributed.shipping import shipped
from memagent.rl.settings import ModelSettings
from memagent.rl.weights.merging import MergedCopy
from memagent.rl.weights.models import Trained, open_model
from memagent.types import Completion, Message, Sampling, TokenEngine


class Replica(Protocol):
    """An engine that takes weights."""

    @property
    def engine(self) -> BaseEngine:
        """Samples replies."""
        ...

    async def load(self, buckets: Sequence[Any], policy_version: int) -> None:
        """Sample from these weights from now on; calls in progress go on."""
        ...

    async def sleep(self) -> None:
        """Free the memory of the device. No call may be in progress."""
        ...

    async def wake(self) -> None:
        """Take the memory again."""
        ...

    async def aclose(self) -> None:
        """End what was started."""
        ...


class OpenReplica(Protocol):
    """Opens a replica, on its node."""

    def __call__(self) -> Replica: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaFacts:
    """What the driver needs to know of a replica."""

    model: str
    tokenizer: str
    served_window: int | None
    reading_defaults: Mapping[str, Any] = field(default_factory=dict)
    pid: int = 0
    """The process of the actor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaReply:
    """A completion, or why there is none."""

    completion: Completion | None = None
    error: Exception | None = None


class ReplicaActor:
    """Runs as a Ray actor."""

    def __init__(self, open_replica: OpenReplica) -> None:
        self._open = open_replica
        self._replica: Replica | None = None

    async def start(self) -> ReplicaFacts:
        """Open the engine."""
        self._replica = await asyncio.to_thread(self._open)
        engine = self._replica.engine
        return ReplicaFacts(
            model=engine.model,
            tokenizer=engine.tokenizer,
            served_window=engine.served_window,
            reading_defaults=dict(engine.reading_defaults),
            pid=os.getpid(),
        )

    async def complete(self, messages: Sequence[Message], sampling: Sampling) -> ReplicaReply:
        """One reply to a conversation."""
        return await _reply(self._opened.engine.complete(messages, sampling))

    async def generate(self, prompt_ids: Sequence[int], sampling: Sampling) -> ReplicaReply:
        """One reply to a prompt of tokens."""
        engine = self._opened.engine
        if not isinstance(engine, TokenEngine):
            return ReplicaReply(error=EngineError(f"{engine.model} takes no prompts of tokens"))
        return await _reply(engine.generate(prompt_ids, sampling))

    async def load(self, buckets: Sequence[Any], policy_version: int) -> None:
        """Take new weights."""
        await self._opened.load(buckets, policy_version)

    async def sleep(self) -> None:
        """Free the device."""
        await self._opened.sleep()

    async def wake(self) -> None:
        """Take the device again."""
        await self._opened.wake()

    async def aclose(self) -> None:
        """End the engine."""
        if self._replica is not None:
            await self._replica.aclose()

    @property
    def _opened(self) -> Replica:
        assert self._replica is not None, "the driver starts a replica first"
        return self._replica


async def _reply(call: Awaitable[Completion]) -> ReplicaReply:
    try:
        return ReplicaReply(completion=await call)
    except Exception as error:
        return ReplicaReply(error=error)


# --- the model in the actor's process -------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddedReplica:
    """Opens the model of a run in the actor; its own copy of the weights."""

    model: ModelSettings
    source: str
    """The model, at the same place on all nodes."""
    seed: int
    engine_settings: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self) -> Replica:
        trained = open_model(self.model, self.source, seed=self.seed)
        return _Embedded(trained, LocalConfig.parse(dict(self.engine_settings)))


class _Embedded:
    """A local engine on its own copy of the weights, with the adapter merged in if there is one."""

    def __init__(self, trained: Trained, config: LocalConfig) -> None:
        self._trained = trained
        self._config = config
        self._device = trained.model.device
        self._merged = MergedCopy(trained.loaded) if trained.has_adapter else None
        loaded = trained.loaded if self._merged is None else self._merged.loaded
        self._loaded = loaded
        self._engine: LocalEngine | None = LocalEngine(loaded, config)
        self._version = 0

    @property
    def engine(self) -> LocalEngine:
        """Raises EngineError while it sleeps."""
        if self._engine is None:
            raise EngineError("the engine replica sleeps while the ranks train")
        return self._engine

    async def load(self, buckets: Sequence[Any], policy_version: int) -> None:
        """Copy the weights between two steps of the engine; calls in progress go on with them."""
        await asyncio.to_thread(self._load, buckets, policy_version)

    def _load(self, buckets: Sequence[Any], policy_version: int) -> None:
        parameters = dict(self._trained.parameters)
        with self.engine.changing_weights(policy_version), torch.no_grad():
            for name, value in shipped(buckets):
                parameters[name].copy_(value)
            if self._merged is not None:
                self._merged.refresh()
        self._version = policy_version

    async def sleep(self) -> None:
        """Drop the KV cache and move the weights to the CPU."""
        await self.aclose()
        self._move(torch.device("cpu"))
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    async def wake(self) -> None:
        """The weights are those from before; the cache is empty."""
        if self._engine is not None:
            return
        self._move(self._device)
        self._engine = LocalEngine(self._loaded, self._config)
        self._engine.weights_changed(self._version)

    async def aclose(self) -> None:
        """Stop the engine's thread."""
        engine, self._engine = self._engine, None
        if engine is not None:
            await engine.aclose()

    def _move(self, device: torch.device) -> None:
        for model in (self._trained.model, self._loaded.model):
            model.to(device)  # type: ignore[arg-type]
